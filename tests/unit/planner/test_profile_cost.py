"""The time of a stage from a profile made by hand: exact sums, for shapes of steps and for real steps."""

from dataclasses import replace

import pytest

from orca.core.domain.errors import SettingError
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest, Part, Row, Step
from orca.planner.profile.profile import HostLoad, ProcessorTime
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.profile.real_step import shape_of
from orca.planner.profile.step_shape import LikeRows, StepShape
from support.planner.profiles import profile, profile_for

ROW_BYTES = 32 * 4


def us(shape: StepShape, layers: tuple[int, ...] = (6,), ranks: int = 1, *, has_encoder: bool = False) -> list[float]:
    return [cost.shape_us(shape) for cost in stage_costs(profile(has_encoder=has_encoder), layers, ranks)]


def test_a_step_without_rows_takes_no_time() -> None:
    assert us(StepShape()) == [0]


def test_increments_take_rest_and_attention_of_each_layer_and_the_head() -> None:
    shape = StepShape(increments=8, context=50, sampled=8)
    layer = 5_000 + 8_000 + 8 * 50
    assert us(shape) == pytest.approx([(100 + 80) + 4 * 8 + 6 * layer + (900 + 160)])


def test_expected_numbers_of_requests_are_interpolated() -> None:
    one, half = (StepShape(increments=n, context=50, sampled=n) for n in (1.0, 0.5))
    layer = 5_000 + 500 + 0.5 * 50
    assert us(half) == pytest.approx([105 + 2 + 6 * layer + 910])
    [whole] = us(one)
    assert us(half)[0] < whole


def test_the_last_layer_only_keeps_what_no_token_is_drawn_from() -> None:
    shape = StepShape(prompts=(LikeRows(1, 64),))
    layer = 5_000 + 64_000 + 64
    assert us(shape) == pytest.approx([110 + 256 + 5 * layer + (2_000 + 300 * 64)])


def test_the_last_layer_computes_the_sampled_rows_to_their_end() -> None:
    shape = StepShape(prompts=(LikeRows(1, 64),), sampled=1)
    layer = 5_000 + 64_000 + 64
    last = (2_000 + 300 * 64) + (6_000 - 2_300) + 1 * 64
    assert us(shape) == pytest.approx([110 + 256 + 5 * layer + last + 920])


def test_mixed_rows_add_up() -> None:
    shape = StepShape(increments=4, context=30, prompts=(LikeRows(2, 20, 10), LikeRows(1, 5, 40)), sampled=6)
    layer = 5_000 + 49_000 + 4 * 30 + 2 * 30 + 45
    ends = (2 * 30 + 45) / 3
    context = (4 * 30 + 2 * ends) / 6
    last = (2_000 + 300 * 49) + (5_000 + 6_000 - 2_000 - 1_800) + 6 * context
    assert us(shape) == pytest.approx([100 + 70 + 4 * 49 + 5 * layer + last + (900 + 120)])


def test_stages_of_an_uneven_cut_share_the_layers_and_send_their_rows() -> None:
    shape = StepShape(increments=8, context=50, sampled=8)
    layer = 5_000 + 8_000 + 8 * 50
    send = 30 + 0.5 * 8 * ROW_BYTES
    first, middle, last = us(shape, (1, 3, 2))
    assert first == pytest.approx(180 + 32 + layer + send)
    assert middle == pytest.approx(180 + 3 * layer + send)
    assert last == pytest.approx(180 + 2 * layer + 1_060)


def test_more_ranks_have_times_of_their_own() -> None:
    shape = StepShape(increments=8, context=50, sampled=8)
    layer = (5_000 + 8_000 + 8 * 50) / 2
    assert us(shape, ranks=2) == pytest.approx([180 + 32 + 6 * layer + 1_060])


ENCODED = StepShape(
    increments=3, context=1, sampled=3, sources=(LikeRows(2, 20), LikeRows(1, 10)), source_context=50 / 3
)


def test_an_encoder_decoder_model_runs_sources_then_targets() -> None:
    encoder = 3 * (5_000 + 50_000 + 20 + 20 + 10)
    decoder = (5_000 + 3_000 + 3) + 2 * 50 + 70 * 50
    expected = 130 + (4 * encoder + 200) + (6 * decoder + 12) + 960
    assert us(ENCODED, (10,), has_encoder=True) == pytest.approx([expected])


def test_stages_of_an_encoder_decoder_model_send_what_the_next_stack_needs() -> None:
    encoder = 3 * (5_000 + 50_000 + 20 + 20 + 10)
    decoder = (5_000 + 3_000 + 3) + 2 * 50 + 70 * 50
    sources, both = (30 + 0.5 * rows * ROW_BYTES for rows in (50, 53))
    in_encoder, at_border, both_stacks, last = us(ENCODED, (2, 2, 1, 5), has_encoder=True)
    assert in_encoder == pytest.approx(130 + 2 * encoder + 200 + sources)
    assert at_border == pytest.approx(130 + 2 * encoder + sources)
    assert both_stacks == pytest.approx(130 + decoder + 12 + both)
    assert last == pytest.approx(130 + 5 * decoder + 960)
    first, _ = us(ENCODED, (6, 4), has_encoder=True)
    assert first == pytest.approx(130 + 4 * encoder + 200 + 2 * decoder + 12 + both)


def test_a_step_of_targets_alone_costs_an_encoder_stage_next_to_nothing() -> None:
    shape = StepShape(increments=3, context=5, sampled=3, source_context=10)
    encoder, _ = us(shape, (4, 6), has_encoder=True)
    assert encoder == pytest.approx(130), "nothing to compute, and nothing to send"


@pytest.mark.parametrize("layers", [(), (6, 1), (5,), (7,), (6, 0), (-1, 7)])
def test_layers_that_do_not_divide_the_model_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match="do not divide the profile's 6 layers"):
        stage_costs(profile(), layers, 1)


def test_a_degree_that_was_not_measured_is_refused() -> None:
    with pytest.raises(SettingError, match="no times for stages of 3 ranks, only of 1, 2"):
        stage_costs(profile(), (6,), 3)


def test_without_times_of_sending_there_is_one_stage() -> None:
    alone = profile(sends=False)
    assert len(stage_costs(alone, (6,), 1)) == 1
    with pytest.raises(SettingError, match="measure it with --devices 2"):
        stage_costs(alone, (3, 3), 1)


EPOCH = Epoch(1, "test")
GREEDY = SamplingParams(temperature=0.0)


def new(handle: int, prompt: int, prefix: tuple[int, ...] = ()) -> NewRequest:
    return NewRequest(
        handle=handle,
        request_id=f"r{handle}",
        claim=Claim(1, "test/1"),
        tokens=(1,) * prompt,
        prompt_length=prompt,
        max_total_tokens=prompt + 20,
        sampling=GREEDY,
        decoder_prefix=prefix,
    )


def test_a_real_step_costs_what_its_shape_costs() -> None:
    """Increments, a whole prompt, the first and the last chunk of another one, and a chunk of a single token."""
    rows = (
        Row(1, 40, 1, True, 5),
        Row(2, 60, 1, True, 5),
        Row(3, 0, 12, True),
        Row(4, 0, 30, False),
        Row(5, 30, 7, True),
        Row(6, 30, 1, False),
    )
    step = Step(epoch=EPOCH, number=1, new=(new(3, 12), new(4, 50)), rows=rows)
    shape = StepShape(
        increments=3,
        context=(41 + 61 + 31) / 3,
        prompts=(LikeRows(1, 12), LikeRows(1, 30), LikeRows(1, 7, 30)),
        sampled=4,
    )
    for layers in ((6,), (2, 4)):
        costs = stage_costs(profile(), layers, 1)
        assert [cost.stage_us(step) for cost in costs] == [round(cost.shape_us(shape)) for cost in costs]


def test_a_step_that_only_frees_takes_no_time() -> None:
    [cost] = stage_costs(profile(), (6,), 1)
    assert cost.stage_us(Step(epoch=EPOCH, number=1, freed=(1,))) == 0


def encoded(*handles_and_sources: tuple[int, int], number: int = 1, epoch: Epoch = EPOCH) -> Step:
    """Return a step in which requests enter."""
    return Step(
        epoch=epoch,
        number=number,
        new=tuple(new(handle, source, (0,)) for handle, source in handles_and_sources),
        rows=(
            *(Row(handle, 0, source, False, part=Part.SOURCE) for handle, source in handles_and_sources),
            *(Row(handle, 0, 1, True, part=Part.TARGET) for handle, _ in handles_and_sources),
        ),
    )


def decoding(*handles: int, number: int, freed: tuple[int, ...] = (), epoch: Epoch = EPOCH) -> Step:
    rows = tuple(Row(handle, number - 1, 1, True, 7, Part.TARGET) for handle in handles)
    return Step(epoch=epoch, number=number, freed=freed, rows=rows)


def test_cross_attention_reads_the_sources_of_running_requests() -> None:
    [cost] = stage_costs(profile(has_encoder=True), (10,), 1)
    first = StepShape(increments=2, context=1, sampled=2, sources=(LikeRows(1, 20), LikeRows(1, 60)), source_context=40)
    assert cost.stage_us(encoded((1, 20), (2, 60))) == round(cost.shape_us(first))
    both = StepShape(increments=2, context=2, sampled=2, source_context=40)
    assert cost.stage_us(decoding(1, 2, number=2)) == round(cost.shape_us(both))
    one = StepShape(increments=1, context=3, sampled=1, source_context=60)
    assert cost.stage_us(decoding(2, number=3, freed=(1,))) == round(cost.shape_us(one))
    assert cost.stage_us(decoding(2, number=3)) == round(cost.shape_us(one)), "a step may be asked for again"


def test_a_new_epoch_forgets_the_sources_of_the_one_before() -> None:
    [cost] = stage_costs(profile(has_encoder=True), (10,), 1)
    cost.stage_us(encoded((1, 60)))
    second = Epoch(2, "test")
    cost.stage_us(encoded((2, 10), epoch=second))
    shape = StepShape(increments=2, context=2, sampled=2, source_context=5)
    assert cost.stage_us(decoding(1, 2, number=2, epoch=second)) == round(cost.shape_us(shape))


HOST = HostLoad(
    service=ProcessorTime(step_us=1_000, row_us=100, answer_us=3_000),
    controller=ProcessorTime(step_us=800, row_us=10, answer_us=20),
)


def test_ranks_on_all_processors_lose_their_share_of_the_host() -> None:
    shape = StepShape(increments=8, context=50, prompts=(LikeRows(2, 20),), sampled=10, entering=2)
    alone = [cost.shape_us(shape) for cost in stage_costs(profile(), (3, 3), 1)]
    loaded = [cost.shape_us(shape) for cost in stage_costs(replace(profile(), host=HOST), (3, 3), 1)]
    share = ((1_000 + 2 * 800) + 10 * (100 + 2 * 10) + 2 * (3_000 + 2 * 20)) / 2
    lost = [after - before for after, before in zip(loaded, alone, strict=True)]
    # The longer stage loses time only while the shorter one computes.
    busy = [us / max(alone) for us in alone]
    assert lost == pytest.approx([share * busy[1], share * busy[0]])
    assert max(busy) == 1 > min(busy)


def test_groups_that_fill_the_machine_together_lose_their_share_of_the_host() -> None:
    """Two groups of one rank on two processors: each loses to the host of both, as both compute all the time."""
    shape = StepShape(increments=8, context=50, sampled=8)
    [alone] = stage_costs(profile(), (6,), 1)
    [one], [two] = (stage_costs(replace(profile(), host=HOST), (6,), 1, groups=groups) for groups in (1, 2))
    assert one.shape_us(shape) == alone.shape_us(shape)
    lost = 2 * (1_000 + 800 + 8 * (100 + 10)) / 2
    assert two.shape_us(shape) - alone.shape_us(shape) == pytest.approx(lost)


def test_groups_of_several_stages_wait_for_the_stages_of_all() -> None:
    own = replace(profile_for(replace(profile().key, processors=4, devices=4)), host=HOST)
    shape = StepShape(increments=8, context=50, sampled=8)
    alone = [cost.shape_us(shape) for cost in stage_costs(profile(), (3, 3), 1)]
    loaded = [cost.shape_us(shape) for cost in stage_costs(own, (3, 3), 1, groups=2)]
    share = 2 * ((1_000 + 2 * 800) + 8 * (100 + 2 * 10)) / 4
    busy = [us / max(alone) for us in alone]
    # One other stage of the same group, and both of the other group.
    shares = [share * (2 * sum(busy) - each) / 3 for each in busy]
    assert [after - before for after, before in zip(loaded, alone, strict=True)] == pytest.approx(shares)


def test_threads_of_one_rank_lose_their_share_all_the_time() -> None:
    own = profile_for(replace(profile().key, threads=2))
    shape = StepShape(increments=8, context=50, sampled=8)
    [alone], [loaded] = (stage_costs(each, (6,), 1) for each in (own, replace(own, host=HOST)))
    lost = (1_000 + 800 + 8 * (100 + 10)) / 2
    assert loaded.shape_us(shape) - alone.shape_us(shape) == pytest.approx(lost)


def test_stages_may_ask_for_steps_in_any_order() -> None:
    costs = stage_costs(replace(profile(has_encoder=True), host=HOST), (6, 4), 1)
    first, second = encoded((1, 20), (2, 60)), decoding(2, number=2, freed=(1,))
    in_order = [cost.stage_us(step) for step in (first, second) for cost in costs]
    again = stage_costs(replace(profile(has_encoder=True), host=HOST), (6, 4), 1)
    ahead = [again[0].stage_us(first), again[0].stage_us(second), again[1].stage_us(first), again[1].stage_us(second)]
    assert [ahead[0], ahead[2], ahead[1], ahead[3]] == in_order


def test_a_processor_without_a_rank_carries_the_host() -> None:
    shape = StepShape(increments=8, context=50, sampled=8)
    [alone], [loaded] = (stage_costs(each, (6,), 1) for each in (profile(), replace(profile(), host=HOST)))
    assert loaded.shape_us(shape) == alone.shape_us(shape)


def test_a_step_without_rows_costs_the_host_nothing() -> None:
    for cost in stage_costs(replace(profile(), host=HOST), (3, 3), 1):
        assert cost.shape_us(StepShape()) == 0
        assert cost.stage_us(Step(epoch=EPOCH, number=1, freed=(1,))) == 0


@pytest.mark.parametrize("has_encoder", [False, True])
def test_a_real_step_tells_which_requests_enter(has_encoder: bool) -> None:
    rows = (
        [
            Row(1, 0, 5, False, part=Part.SOURCE),
            Row(1, 0, 1, True, part=Part.TARGET),
            Row(2, 3, 1, True, 9, Part.TARGET),
        ]
        if has_encoder
        else [Row(1, 0, 5, True), Row(2, 3, 4, False), Row(3, 8, 1, True, 9), Row(4, 0, 1, True)]
    )
    step = Step(epoch=Epoch(1, "e"), number=1, freed=(), new=(), rows=tuple(rows))
    assert shape_of(step, {}).entering == (1 if has_encoder else 2)
