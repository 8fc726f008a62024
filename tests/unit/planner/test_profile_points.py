"""The steps that a profile times, and the tables computed from their times (planner/profile/measuring)."""

import pytest

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.domain.step import Part, Step
from orca.planner.profile.measuring.points import POSITIONS_MIN, SHORT, Point, PointBounds, View, all_points
from orca.planner.profile.measuring.process_order import ProcessFacts, StepTime, WeightBytes
from orca.planner.profile.measuring.steps import PointSteps
from orca.planner.profile.measuring.summary import Rounds, degree_times, send_times
from orca.planner.profile.profile import Curve, DegreeTimes, Profile
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.profile.step_shape import LikeRows, StepShape
from support.planner import profiles

LAYERS, ENCODER_LAYERS = 6, 4
ROW_BYTES = 128


def bounds(
    positions: int = 2048, *, slots: int = 16_384, has_encoder: bool = False, ranks: int = 2, sends: bool = True
) -> PointBounds:
    return PointBounds(
        positions=positions,
        source_positions=positions if has_encoder else None,
        slots=slots,
        row_bytes=ROW_BYTES,
        ranks=ranks,
        sends=sends,
    )


MODELS = pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder-only", "encoder-decoder"])


@MODELS
@pytest.mark.parametrize("positions", [POSITIONS_MIN, 64, 100, 256, 2048, 131_072])
@pytest.mark.parametrize("slots", [2048, 16_384])
def test_points_fit_the_model_and_the_cache(positions: int, slots: int, has_encoder: bool) -> None:
    limits = bounds(positions, slots=slots, has_encoder=has_encoder)
    points = all_points(limits, has_fewer=True)
    assert len(points) == len(set(points))
    assert [point.work for point in points] == sorted(point.work for point in points)
    for point in points:
        assert point.slots <= max(slots, 64 * (SHORT + 16) * (1 + has_encoder))
        if point.rows == 1:
            assert point.start + point.count <= max(positions, SHORT)
            assert point.source <= max(positions, SHORT)
    assert {point.view for point in points} == {view for view in View if has_encoder or view is not View.ENCODER}


def test_without_other_ranks_there_are_no_messages() -> None:
    views = {point.view for point in all_points(bounds(ranks=1, sends=False), has_fewer=False)}
    assert not views & {View.SEND, View.ALL_REDUCE, View.FEWER}


def test_a_point_brings_its_requests_once_and_frees_those_of_the_one_before() -> None:
    steps = PointSteps(97, None)
    decode = Point(view=View.LAYERS, rows=3, start=63)
    first, again = steps.first(decode), steps.again(decode)
    assert [new.handle for new in first.new] == [row.handle for row in first.rows] == [1, 2, 3]
    assert (again.new, again.freed) == ((), ())
    assert [(row.start, row.count, row.sample) for row in again.rows] == [(63, 1, True)] * 3
    assert len({row.token for row in again.rows}) == 3
    prompt = Point(view=View.LAYERS, rows=1, count=20, enters=True, samples=False)
    entering, second = steps.first(prompt), steps.again(prompt)
    assert (entering.freed, [new.handle for new in entering.new]) == ((1, 2, 3), [4])
    assert (second.freed, [new.handle for new in second.new]) == ((4,), [5]), "its requests are new in each step"
    assert len(second.new[0].tokens) == 20
    assert [step.number for step in (first, again, entering, second)] == [1, 2, 3, 4]


def test_sources_run_when_their_requests_are_new() -> None:
    steps = PointSteps(97, EncoderDecoder(encoder_layers=2, start_token_id=0))

    def parts(step: Step) -> list[tuple[Part, int]]:
        return [(row.part, row.count) for row in step.rows]

    cross = Point(view=View.LAYERS, rows=2, source=64)
    assert parts(steps.first(cross)) == [(Part.SOURCE, 64)] * 2 + [(Part.TARGET, 1)] * 2
    assert parts(steps.again(cross)) == [(Part.TARGET, 1)] * 2
    entering = Point(view=View.LAYERS, rows=1, source=64, enters=True)
    assert parts(steps.first(entering)) == parts(steps.again(entering)) == [(Part.SOURCE, 64), (Part.TARGET, 1)]
    encoder = Point(view=View.ENCODER, rows=1, source=1, enters=True, samples=False)
    assert parts(steps.again(encoder)) == [(Part.SOURCE, 1)]


@MODELS
def test_every_step_fits_what_its_requests_reserve(has_encoder: bool) -> None:
    kind = EncoderDecoder(encoder_layers=2, start_token_id=0, forced_bos_token_id=5) if has_encoder else None
    steps = PointSteps(97, kind)
    for point in all_points(bounds(256, has_encoder=has_encoder), has_fewer=True):
        if point.is_link:
            continue
        step = steps.first(point)
        reserved = sum(new.slots(DEFAULT_BLOCK_TOKENS) for new in step.new)
        assert reserved <= point.slots
        new = {each.handle: each for each in step.new}
        for row in step.rows:
            known = new[row.handle]
            if row.part is Part.SOURCE:
                assert row.count == known.source_tokens
            elif row.token is None:
                assert row.start + row.count <= len(known.target)


class LinearMachine:
    """Takes known times for the steps of points."""

    START, SCALE = 50.0, 3.0

    def time(self, point: Point) -> StepTime:
        if point.is_link:
            return StepTime(30 + 0.5 * point.size, 30 + 0.5 * point.size)
        layers = {View.FEWER: LAYERS // 2, View.EMBEDDED: 1, View.BARE: 1, View.KEPT: 0}.get(point.view, LAYERS)
        compute = self.START + layers * self.layer(point)
        if point.view is View.ENCODER:
            sources = point.rows * point.source
            attention = 0.5 * point.source if point.rows == 1 and point.source > SHORT else 0.0
            compute = self.START + ENCODER_LAYERS * (self.SCALE * (500 + 10 * sources) + attention)
        if point.view is not View.BARE:
            compute += 4 * point.tokens
        if point.view is View.KEPT:
            compute += 200 + 3 * point.tokens
        if point.view is View.HEADED:
            compute += 900 + 20 * point.rows
        return StepTime(100 + 10 * point.rows + compute, compute)

    def layer(self, point: Point) -> float:
        us = 500 + 10.0 * point.tokens
        if point.count == 1:
            us += 0.1 * point.rows * point.start
        elif point.rows == 1:
            us += 0.2 * point.count * (1 + point.start)
        if point.source > 1:
            us += 0.3 * point.rows * (point.source - 1)
        if point.enters and point.source > 1:
            us += 7 * point.rows * point.source
        return us


def degree(*, has_encoder: bool = False, without: frozenset[Point] = frozenset()) -> DegreeTimes:
    machine, limits = LinearMachine(), bounds(has_encoder=has_encoder)
    measured = [point for point in all_points(limits, has_fewer=True) if point not in without]
    facts = ProcessFacts(
        layers=LAYERS,
        fewer_layers=LAYERS // 2,
        kv_bytes_per_slot=64,
        weights=WeightBytes(layers=(1, 2) if has_encoder else (1,), embed=3, head=4),
    )
    rounds = Rounds(limits, facts, {point: [machine.time(point)] * 4 for point in measured})
    return degree_times(rounds, encoder_layers=ENCODER_LAYERS if has_encoder else 0)


def values(curve: Curve) -> dict[int, float]:
    return dict(zip(curve.at, (time.us for time in curve.times), strict=True))


@MODELS
def test_the_tables_hold_the_times_of_the_parts(has_encoder: bool) -> None:
    times = degree(has_encoder=has_encoder)
    near = {"abs": 0.01}
    assert values(times.step) == pytest.approx({n: 150 + 10 * n for n in times.step.at}, **near)
    assert values(times.embed) == pytest.approx({n: 4 * n for n in times.embed.at}, **near)
    assert values(times.head) == pytest.approx({n: 900 + 20 * n for n in times.head.at}, **near)
    stack = times.stacks[-1]
    assert stack.keep is not None
    assert stack.increments is not None
    assert values(stack.rest) == pytest.approx({n: 500 + 10 * n for n in stack.rest.at}, **near)
    assert values(stack.keep) == pytest.approx({n: 200 + 3 * n for n in stack.keep.at}, **near)
    for rows, curve in zip(stack.increments.at, stack.increments.curves, strict=True):
        assert values(curve) == pytest.approx({c: 0.1 * rows * (c - 1) for c in curve.at}, **near)
    for count, curve in zip(stack.prompts.at, stack.prompts.curves, strict=True):
        assert values(curve) == pytest.approx({s: 0.2 * count * (1 + s) for s in curve.at}, **near)
    assert all(time.repeats == 4 for time in stack.rest.times)
    if not has_encoder:
        assert (stack.cross, stack.memory) == (None, None)
        return
    assert stack.cross is not None
    assert stack.memory is not None
    for rows, curve in zip(stack.cross.at, stack.cross.curves, strict=True):
        assert values(curve) == pytest.approx({s: 0.3 * rows * (s - 1) for s in curve.at}, **near)
    assert values(stack.memory) == pytest.approx({n: 7 * n for n in stack.memory.at}, **near)
    encoder = times.stacks[0]
    assert values(encoder.rest) == pytest.approx({n: 3 * (500 + 10 * n) for n in encoder.rest.at}, **near)


def test_a_profile_predicts_steps_that_were_not_measured() -> None:
    key = profiles.key(ranks=(2,))
    profile = Profile(key=key, digest=key.digest, seconds=1, device_bytes=1, send=None, host=None, degrees=(degree(),))
    [cost] = stage_costs(profile, (LAYERS,), 2)
    mixed = StepShape(increments=11, context=301, prompts=(LikeRows(1, 100, 250),), sampled=11)
    layer = 500 + 1110 + 0.1 * 11 * 300 + 0.2 * 100 * 251
    last = (200 + 333) + (500 + 110 - 200 - 33) + 0.1 * 11 * 300
    expected = (150 + 120) + 4 * 111 + 5 * layer + last + (900 + 220)
    assert cost.shape_us(mixed) == pytest.approx(expected, rel=1e-3)


def test_slow_points_may_be_missing() -> None:
    slow = frozenset(point for point in all_points(bounds(), has_fewer=True) if not (point.is_small or point.is_link))
    assert slow
    times = degree(without=slow)
    assert max(times.stacks[0].rest.at) <= SHORT
    assert all(len(table.at) >= 2 for table in (times.stacks[0].rest, times.stacks[0].prompts, times.head, times.step))


def test_messages_are_listed_by_their_bytes() -> None:
    limits = bounds()
    machine = LinearMachine()
    measured = {point: [machine.time(point)] for point in all_points(limits, has_fewer=True)}
    facts = ProcessFacts(layers=LAYERS, fewer_layers=3, kv_bytes_per_slot=64, weights=None)
    sent = send_times(Rounds(limits, facts, measured))
    assert sent is not None
    assert values(sent) == pytest.approx({size: 30 + 0.5 * size for size in sent.at})
    assert all(time.repeats == 1 for time in sent.times)
