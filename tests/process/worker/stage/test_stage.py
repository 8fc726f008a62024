"""Stage: state of requests over steps, log probabilities, fed tokens, seeds, and what breaks an epoch."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from orca.core.domain.errors import EngineError
from orca.core.domain.request import Logprob, SamplingParams
from orca.core.domain.step import Claim, NewRequest, Row, Sampled, Step
from orca.worker.models.blocks import Layer, StepContext
from orca.worker.models.build import load_stage
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.rank.progress_layers import count_progress
from orca.worker.stage.laid_out_steps import LaidOutStep
from orca.worker.stage.stage import Stage
from orca.worker.weights.linear import Linear, PanelLinear
from support.worker.stage_driver import EPOCH, GREEDY, Ask, Chain, random_asks, serve

VOCAB = 199


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=1)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return reference_model(folder)


def new(handle: int = 0, tokens: tuple[int, ...] = (5, 6, 7), params: SamplingParams = GREEDY) -> NewRequest:
    return NewRequest(
        handle=handle,
        request_id=f"r{handle}.0",
        claim=Claim(1, "test/1"),
        tokens=tokens,
        prompt_length=len(tokens),
        max_total_tokens=len(tokens) + 5,
        sampling=params,
    )


def step(number: int = 1, **parts: Any) -> Step:
    return Step(epoch=EPOCH, number=number, **parts)


@torch.no_grad()
def reference_scores(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [tokens, vocab] of what follows each token."""
    scores: torch.Tensor = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return scores


@pytest.mark.parametrize(("stages", "tensor", "chunk"), [(1, 1, None), (2, 1, 3), (1, 2, None), (2, 2, 5)])
def test_log_probabilities_of_output_and_prompt_equal_the_reference(
    folder: Path, reference: Any, stages: int, tensor: int, chunk: int | None
) -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
    asks = random_asks(VOCAB, 5, seed=2)
    for place, ask in enumerate(asks):
        ask.params = params if place % 2 == 0 else GREEDY
    chain = Chain(folder, stages=stages, tensor=tensor)
    serve(chain, asks, chunk=chunk)
    chain.close()
    for place, ask in enumerate(asks):
        first = ask.sampled[0].token
        if place % 2:
            assert first.logprob is None
            assert first.prompt_logprobs == ()
            continue
        scores = reference_scores(reference, ask.prompt + ask.output)
        told = [*first.prompt_logprobs, *(one.token.logprob for one in ask.sampled)]
        assert [one.token for one in told if one] == ask.prompt[1:] + ask.output
        for row, one in enumerate(told):
            assert one is not None
            assert one.logprob == pytest.approx(scores[row, one.token].item(), abs=2e-4)
            values, ids = scores[row].topk(len(one.top))
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=2e-4)
            assert one.top[0][0] == ids[0]
        assert all(not one.token.prompt_logprobs for one in ask.sampled[1:])


def told_of_prompts(folder: Path, *, tensor: int, bytes_max: int) -> list[list[Logprob]]:
    """Log probabilities of the prompts of six requests, most of which share their first step."""
    asks = random_asks(VOCAB, 6, seed=4)
    for place, ask in enumerate(asks):
        ask.arrival = 0
        ask.params = replace(GREEDY, prompt_logprobs=place) if place else GREEDY
    chain = Chain(folder, tensor=tensor, prompt_logits_bytes=bytes_max)
    serve(chain, asks, max_batch_size=6, chunk=13)
    chain.close()
    return [list(ask.sampled[0].token.prompt_logprobs) for ask in asks]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 7], ids=["less than one row", "one row", "seven rows"])
def test_prompt_log_probabilities_do_not_depend_on_how_many_rows_are_computed_at_a_time(
    folder: Path, tensor: int, rows: int
) -> None:
    whole = told_of_prompts(folder, tensor=tensor, bytes_max=1 << 30)
    parts = told_of_prompts(folder, tensor=tensor, bytes_max=rows * 4 * VOCAB)
    for one, other in zip(itertools.chain(*whole), itertools.chain(*parts), strict=True):
        assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
        # A product of fewer rows may take its sums in another order.
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
    assert [len(each) for each in whole] == [len(each) for each in parts]
    assert max(len(each) for each in whole) > 13


def test_prompt_log_probabilities_need_no_logits_of_the_whole_prompt(folder: Path) -> None:
    model = load_stage(folder, packs=False)
    head, rows = model.head, list[int]()
    assert head is not None

    def watched(hidden: Tensor, context: StepContext) -> Tensor:
        rows.append(len(hidden))
        return head(hidden, context)

    stage = Stage(
        replace(model, head=watched),
        slots=64,
        block_tokens=4,
        eos_token_ids=(),
        feeds_tokens=False,
        prompt_logits_bytes=5 * 4 * VOCAB,
    )
    asking = new(tokens=tuple(range(2, 60)), params=replace(GREEDY, prompt_logprobs=1))
    prepared = stage.begin(step(new=(asking,), rows=(Row(handle=0, start=0, count=58, sample=True),)))
    assert len(stage.sample(prepared, stage.forward(prepared)).read()[0].token.prompt_logprobs) == 57
    assert (max(rows), sum(rows)) == (5, 58)


@pytest.mark.parametrize("packs", [False, PanelLinear], ids=["plain", "panels"])
def test_log_probabilities_of_a_long_prompt_report_progress_repeatedly(
    folder: Path, packs: bool | type[Linear]
) -> None:
    """Log probabilities of a small model with a large vocabulary take longer than all layers. A rank without progress
    counts as hanging.
    """
    model, progress, marks = load_stage(folder, packs=packs), RankProgress(), list[int]()
    head = model.head
    assert head is not None

    def watched(hidden: Tensor, context: StepContext) -> Tensor:
        marks.append(progress.mark)
        return head(hidden, context)

    watched.only_kernels = head.only_kernels  # type: ignore[attr-defined]
    model = replace(model, head=watched)
    count_progress(model, progress)
    stage = Stage(
        model, slots=64, block_tokens=4, eos_token_ids=(), feeds_tokens=False, prompt_logits_bytes=5 * 4 * VOCAB
    )
    asking = new(tokens=tuple(range(2, 60)), params=replace(GREEDY, prompt_logprobs=1))
    prepared = stage.begin(step(new=(asking,), rows=(Row(handle=0, start=0, count=58, sample=True),)))
    stage.sample(prepared, stage.forward(prepared)).read()
    told = marks[:12]  # 57 tokens by five
    assert [after - before for before, after in itertools.pairwise(told)] == [1] * 11


@pytest.mark.parametrize("stages", [1, 2])
def test_the_last_layer_ends_with_the_rows_whose_logits_are_wanted(folder: Path, stages: int) -> None:
    shard = Shard(stage=stages - 1, stages=stages)
    model = load_stage(folder, shard)
    rows: list[list[int]] = []
    model.layers[:] = [WatchedLayer(layer, rows) for layer in model.layers]
    stage = Stage(model, slots=256, block_tokens=4, eos_token_ids=(), feeds_tokens=False)

    def run(*bring: NewRequest, parts: list[Row]) -> list[int]:
        rows.append([])
        prepared = stage.begin(step(new=bring, rows=tuple(parts)))
        hidden = None if shard.is_first else torch.zeros(prepared.step.tokens, model.config.hidden_size)
        stage.forward(prepared, hidden)
        return rows[-1]

    asking = replace(GREEDY, prompt_logprobs=1)
    prompt = tuple(range(2, 22))
    before = [20] * (len(model.layers) - 1)
    # Of a whole prompt, the last token; of one that comes in chunks too, beside it.
    assert run(new(0, prompt), parts=[Row(handle=0, start=0, count=20, sample=True)]) == [*before, 1]
    chunks = [Row(handle=0, start=20, count=1, sample=True, token=9), Row(handle=1, start=0, count=19, sample=False)]
    assert run(new(1, prompt), parts=chunks) == [*before, 1]
    # None where nothing is drawn: its keys and values are all that is needed.
    assert run(new(2, prompt), parts=[Row(handle=2, start=0, count=20, sample=False)]) == before
    # All of them where the prompt is told of.
    assert run(new(3, prompt, asking), parts=[Row(handle=3, start=0, count=20, sample=True)]) == [*before, 20]


class WatchedLayer:
    """Tells how many rows a layer returns."""

    def __init__(self, layer: Layer, rows: list[list[int]]) -> None:
        self._layer, self._rows = layer, rows
        self.only_kernels = layer.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        output = self._layer(x, step)
        self._rows[-1].append(len(output))
        return output

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._layer.keep(x, step)


def test_prompt_log_probabilities_are_not_reported_again_after_a_restart(folder: Path) -> None:
    ask = Ask([5, 6, 7], 4, SamplingParams(temperature=0.0, prompt_logprobs=0), log=[8])
    serve(Chain(folder), [ask])
    assert [one.index for one in ask.sampled] == [1, 2, 3]
    assert all(one.token.prompt_logprobs == () for one in ask.sampled)


PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(seed=4, presence_penalty=1.0, min_tokens=5, logit_bias=((1, 30.0),)),
    GREEDY,
]


def seeded_outputs(folder: Path, *, log: int = 0, **layout: Any) -> list[list[int]]:
    """Outputs of ten sampled requests; with `log`, each starts again behind that many of its tokens."""
    asks = random_asks(VOCAB, 10, seed=5, new_max=10)
    for place, ask in enumerate(asks):
        ask.params = PARAMS[place % len(PARAMS)]
    options = {name: layout.pop(name) for name in ("max_batch_size", "chunk", "seed") if name in layout}
    chain = Chain(folder, **layout)
    serve(chain, asks, **options)
    if log:
        asks = [replace(ask, log=ask.output[:log], sampled=[]) for ask in asks if len(ask.output) > log]
        serve(chain, asks, **options)
    chain.close()
    return [ask.output for ask in asks]


def test_a_seed_gives_the_same_tokens_in_every_layout_batch_and_chunking(folder: Path) -> None:
    alone = seeded_outputs(folder, max_batch_size=1)
    assert len({tuple(output) for output in alone}) == len(alone)
    for layout in (
        {"max_batch_size": 10, "seed": 3},
        {"stages": 3, "chunk": 2},
        {"tensor": 2, "block_tokens": 8},
        {"stages": 2, "feeds_tokens": True, "packs": PanelLinear},
    ):
        assert seeded_outputs(folder, **layout) == alone, layout


def test_a_seed_continues_with_the_same_tokens_after_a_restart(folder: Path) -> None:
    whole = [output for output in seeded_outputs(folder) if len(output) > 3]
    assert seeded_outputs(folder, log=3) == whole


def test_min_tokens_suppresses_eos_and_stop_ids_and_then_allows_them(folder: Path) -> None:
    params = SamplingParams(
        temperature=0.0, min_tokens=3, stop_token_ids=(2,), logit_bias=((1, 1e4), (2, 1e5)), ignore_eos=True
    )
    ask = Ask([5, 6], 5, params)
    serve(Chain(folder), [ask])
    assert not {1, 2} & set(ask.output[:3])
    assert ask.output[3:] == [2, 2]


def test_blocks_are_used_by_one_request_after_another(folder: Path) -> None:
    chain = Chain(folder, slots=80)  # two requests at a time
    asks = random_asks(VOCAB, 12, seed=6)
    serve(chain, asks, max_batch_size=2)
    stage = chain.stages[0][0]
    assert (stage.slots_in_use, stage.cache.slots_charged) == (0, 0)
    alone = [Ask(ask.prompt, ask.max_new_tokens) for ask in asks]
    for ask in alone:
        serve(Chain(folder), [ask])
    assert [ask.output for ask in asks] == [ask.output for ask in alone]


def test_a_step_without_rows_only_frees(folder: Path) -> None:
    chain = Chain(folder)
    stage = chain.stages[0][0]
    chain.run(step(new=(new(),), rows=(Row(handle=0, start=0, count=3, sample=True),)))
    assert stage.slots_in_use == 4
    prepared = stage.begin(step(2, freed=(0, 99)))
    assert stage.slots_in_use == 0
    assert not stage.sample(prepared, stage.forward(prepared)).read()


def test_a_handle_may_be_freed_and_another_taken_up_in_one_step(folder: Path) -> None:
    chain = Chain(folder, slots=8)
    row = Row(handle=0, start=0, count=3, sample=True)
    first = chain.run(step(new=(new(),), rows=(row,)))
    second = chain.run(step(2, freed=(0,), new=(new(1),), rows=(replace(row, handle=1),)))
    assert first[0].token == second[0].token


def test_plans_may_be_laid_out_before_earlier_steps_have_run(folder: Path) -> None:
    chain = Chain(folder, feeds_tokens=True)
    stage = chain.stages[0][0]
    first = stage.begin(step(new=(new(),), rows=(Row(handle=0, start=0, count=3, sample=True),)))
    second = stage.begin(step(2, rows=(Row(handle=0, start=3, count=1, sample=True),)))
    tokens = []
    for prepared in (first, second):
        (one,) = stage.sample(prepared, stage.forward(prepared)).read()
        assert isinstance(one, Sampled)
        stage.put_device_tokens([one.handle], [one.token.id])
        tokens.append(one.token.id)
    asked = Ask([5, 6, 7], 2)
    serve(Chain(folder), [asked])
    assert tokens == asked.output


def test_tokens_for_freed_requests_are_ignored(folder: Path) -> None:
    chain = Chain(folder, feeds_tokens=True)
    stage = chain.stages[0][0]
    stage.begin(step(new=(new(0), new(1)), rows=(Row(handle=1, start=0, count=3, sample=True),)))
    stage.begin(step(2, freed=(0,)))
    stage.put_device_tokens([0, 1], torch.tensor([11, 12]))
    prepared = stage.begin(step(3, rows=(Row(handle=1, start=3, count=1, sample=False),)))
    stage.forward(prepared)
    assert isinstance(prepared, LaidOutStep)
    assert prepared.inputs is not None
    assert prepared.inputs.ids.tolist() == [12]
    stage.put_device_tokens([0], [13])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row(handle=3, start=0, count=1, sample=False), "request 3 is not on this stage"),
        (Row(handle=0, start=3, count=1, sample=True), r"tokens 3..3 of request 0 are not known"),
        (Row(handle=0, start=2, count=2, sample=True), r"tokens 2..3 of request 0 are not known"),
        (Row(handle=0, start=8, count=1, sample=True, token=4), "runs 9 tokens, but reserved 8"),
    ],
)
def test_a_row_that_cannot_be_run_breaks_the_epoch_with_the_reason(folder: Path, row: Row, reason: str) -> None:
    stage = Chain(folder).stages[0][0]
    with pytest.raises(EngineError, match=reason):
        stage.begin(step(new=(new(),), rows=(row,)))


def test_kv_in_use_stays_within_a_block_of_the_tokens_of_each_request(folder: Path) -> None:
    chain = Chain(folder, block_tokens=4)
    stage = chain.stages[0][0]
    asks = random_asks(VOCAB, 10, seed=9)
    run, lengths = chain.run, dict[int, int]()

    def watched(one: Step) -> Any:
        for handle in one.freed:
            del lengths[handle]
        lengths.update({row.handle: row.start + row.count for row in one.rows})
        sampled = run(one)
        assert 0 <= stage.slots_in_use - sum(lengths.values()) < 4 * max(1, len(lengths))
        return sampled

    chain.run = watched  # type: ignore[method-assign]
    serve(chain, asks)
    assert stage.cache.bytes == 1024 * 3 * 2 * 2 * 10 * 4
