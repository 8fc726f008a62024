"""The encoder-decoder chain model detects faults: after one, the tokens differ from the oracle's."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checker.oracles.seq2seq_chain_model import Seq2SeqChainModel
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Part, Row, Step
from orca.worker.stage.stage import Stage
from orca.worker.stage.step_runner import PreparedStep, StepOutput
from support.worker.faulty_chain import FaultyChain, assert_wrong_from, at_step, equal_tokens
from support.worker.seq2seq_chain import VOCAB, expected
from support.worker.stage_driver import Ask, Chain, serve

SOURCE_LENGTH, PREFIX_LENGTH, NEW_TOKENS = 9, 3, 25
# Step n draws token n - 1 of each request, so a fault before this step spoils the tokens from FIRST_WRONG on.
FAULTY_STEP = 11
FIRST_WRONG = FAULTY_STEP - 1
STAGES = 2
"""The first stage has the encoder and a layer of the decoder, the second one the other two layers of the decoder."""


def some_asks(chain_model: Seq2SeqChainModel, count: int) -> list[Ask]:
    draw = random.Random(count)
    asks = []
    for seed in range(count):
        source = [draw.randrange(VOCAB) for _ in range(SOURCE_LENGTH)]
        prefix = chain_model.beginning(tuple(draw.randrange(1, VOCAB) for _ in range(PREFIX_LENGTH)))
        asks.append(Ask(source, NEW_TOKENS, SamplingParams(seed=seed), decoder_prefix=prefix))
    return asks


def run(chain: Chain, asks: list[Ask]) -> None:
    """All asks side by side to their end."""
    serve(chain, asks, max_batch_size=len(asks))
    chain.close()


def agreements(chain_model: Seq2SeqChainModel, ask: Ask) -> list[bool]:
    return equal_tokens(ask.output, expected(chain_model, ask))


def one_value(kept: torch.Tensor) -> None:
    kept[0, -1, -1] += 1


def one_mark(kept: torch.Tensor) -> None:
    kept[0, -1, 0] += 1


def one_key(kept: torch.Tensor) -> None:
    kept[0, 0, 0] = 0


@pytest.mark.parametrize("stage", [0, 1])
def test_one_number_changed_at_one_position_of_one_stage_changes_all_tokens_after_it(
    chain_folder: Path, chain_model: Seq2SeqChainModel, stage: int
) -> None:
    """Each request has another change at another position, and the last one none."""
    of_sources = [(True, position) for position in (0, 5, SOURCE_LENGTH - 1)]
    of_targets = [(False, position) for position in (0, 2, PREFIX_LENGTH + FIRST_WRONG - 1)]
    changes = (one_value, one_mark, one_key, torch.Tensor.zero_)
    faults = list(itertools.product(changes, of_sources + of_targets))

    def act(chain: FaultyChain) -> None:
        for handle, (change, (of_source, position)) in enumerate(faults):
            chain.spoil(change, stage=stage, handle=handle, position=position, of_source=of_source)

    asks = some_asks(chain_model, len(faults) + 1)
    run(FaultyChain(chain_folder, at_step(FAULTY_STEP, act), stages=STAGES, slots=len(asks) * 44), asks)
    for ask in asks[:-1]:
        assert_wrong_from(FIRST_WRONG, agreements(chain_model, ask))
    assert all(agreements(chain_model, asks[-1])), "another request is untouched"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("of_source", [False, True])
def test_one_number_changed_in_the_part_of_one_rank_changes_all_tokens_after_it(
    chain_folder: Path, chain_model: Seq2SeqChainModel, rank: int, of_source: bool
) -> None:
    def act(chain: FaultyChain) -> None:
        chain.spoil(one_value, stage=1, handle=0, position=1, rank=rank, of_source=of_source)

    asks = some_asks(chain_model, 1)
    run(FaultyChain(chain_folder, at_step(FAULTY_STEP, act), stages=STAGES, tensor=2), asks)
    assert_wrong_from(FIRST_WRONG, agreements(chain_model, asks[0]))


def test_a_request_that_gets_the_source_of_its_neighbour_is_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel
) -> None:
    def exchanged(_: FaultyChain, step: Step) -> Step:
        if not step.new:
            return step
        one, other = step.new
        return replace(step, new=(replace(one, tokens=other.tokens), replace(other, tokens=one.tokens)))

    asks = some_asks(chain_model, 2)
    run(FaultyChain(chain_folder, exchanged, stages=STAGES), asks)
    for ask in asks:
        assert_wrong_from(0, agreements(chain_model, ask))


@pytest.mark.parametrize("stage", [0, 1])
def test_two_requests_whose_cross_blocks_are_exchanged_on_one_stage_are_both_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel, stage: int
) -> None:
    def exchange(chain: FaultyChain) -> None:
        one, other = (chain.places(stage, 0, handle, 4, 8, of_source=True) for handle in (0, 1))
        for layer in chain.stages[stage][0].cache.layers:
            of_one, of_other = one.read(layer), other.read(layer)
            one.write(layer, of_other)
            other.write(layer, of_one)

    asks = some_asks(chain_model, 2)
    run(FaultyChain(chain_folder, at_step(FAULTY_STEP, exchange), stages=STAGES), asks)
    for ask in asks:
        assert_wrong_from(FIRST_WRONG, agreements(chain_model, ask))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_stale_cross_block_makes_all_tokens_after_it_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel, stage: int, block: int
) -> None:
    """The block keeps what an earlier request left there, as if the second one's write had been lost."""
    before: list[torch.Tensor] = []
    is_second = False

    def fault(chain: FaultyChain, step: Step) -> Step:
        cache = chain.stages[stage][0].cache
        if is_second and step.number == 1:
            before.extend(layer.clone() for layer in cache.layers)
        if is_second and step.number == FAULTY_STEP:
            assert cache.source_tables is not None
            line = chain.stages[stage][0]._requests.by_handle[0].line
            place = int(cache.source_tables[line, block])
            for layer, old in zip(cache.layers, before, strict=True):
                assert old[place].any(), "nothing was left there"
                layer[place] = old[place]
        return step

    earlier, asks = some_asks(chain_model, 3), some_asks(chain_model, 1)
    chain = FaultyChain(chain_folder, fault, stages=STAGES, slots=144)
    serve(chain, earlier, max_batch_size=3)
    assert all(all(agreements(chain_model, ask)) for ask in earlier)
    is_second = True
    run(chain, asks)
    assert_wrong_from(FIRST_WRONG, agreements(chain_model, asks[0]))


def run_again(_: FaultyChain, step: Step) -> Step:
    """The faulty step has the source row of request 0 once more."""
    if step.number != FAULTY_STEP:
        return step
    return replace(step, rows=(Row(0, 0, SOURCE_LENGTH, sample=False, part=Part.SOURCE), *step.rows))


def test_a_source_row_run_again_into_its_own_blocks_changes_nothing(
    chain_folder: Path, chain_model: Seq2SeqChainModel
) -> None:
    asks = some_asks(chain_model, 2)
    run(FaultyChain(chain_folder, run_again, stages=STAGES), asks)
    assert all(all(agreements(chain_model, ask)) for ask in asks)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("victim", "of_source"),
    [
        pytest.param(1, True, id="the source of its neighbour"),
        pytest.param(1, False, id="the target of its neighbour"),
        pytest.param(0, False, id="its own target"),
    ],
)
def test_a_source_row_run_again_into_other_blocks_makes_their_owner_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel, stage: int, victim: int, of_source: bool
) -> None:
    def fault(chain: FaultyChain, step: Step) -> Step:
        if step.number == FAULTY_STEP:
            both: Any = chain.stages[stage][0]._both
            places = chain.places(stage, 0, victim, 0, SOURCE_LENGTH, of_source=of_source)
            both._place = lambda _: places.blocks * both._cache.block_tokens + places.offsets
        return run_again(chain, step)

    asks = some_asks(chain_model, 2)
    run(FaultyChain(chain_folder, fault, stages=STAGES), asks)
    assert_wrong_from(FIRST_WRONG, agreements(chain_model, asks[victim]))
    assert all(agreements(chain_model, asks[1 - victim]))


def test_an_encoder_layer_that_runs_twice_makes_all_tokens_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel
) -> None:
    chain = Chain(chain_folder, stages=STAGES)
    encoder = chain.stages[0][0]._model.encoder
    assert encoder is not None
    encoder.layers.append(encoder.layers[-1])
    both: Any = chain.stages[0][0]._both
    original = both._encoder.prepare

    def with_a_cache_more(sources: Any) -> Any:
        prepared = original(sources)
        prepared.context.caches = [*prepared.context.caches, prepared.context.caches[-1]]
        return prepared

    both._encoder.prepare = with_a_cache_more
    asks = some_asks(chain_model, 1)
    run(chain, asks)
    assert_wrong_from(0, agreements(chain_model, asks[0]))


class LateMemory:
    """A stage that gets the encoder output of an earlier step, once there was one."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._earlier: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, prepared: PreparedStep, hidden: torch.Tensor) -> StepOutput:
        if count := getattr(prepared, "source_tokens", 0):
            memory = hidden[:count].clone()
            if self._earlier is not None:
                hidden = torch.cat((self._earlier, hidden[count:]))
            self._earlier = memory
        return self._stage.forward(prepared, hidden)


def test_the_encoder_output_of_another_step_makes_all_tokens_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel
) -> None:
    chain = Chain(chain_folder, stages=STAGES)
    late: Any = LateMemory(chain.stages[1][0])
    chain.stages[1] = [late]
    asks = some_asks(chain_model, 2)
    asks[1].arrival = 4
    run(chain, asks)
    assert all(agreements(chain_model, asks[0]))
    assert_wrong_from(0, agreements(chain_model, asks[1]))


@pytest.mark.parametrize(
    "spoil_source",
    [
        pytest.param(lambda source: source[1:], id="first token missing"),
        pytest.param(lambda source: [*source[:4], *source[5:]], id="a token missing"),
        pytest.param(lambda source: source[:-1], id="last token missing"),
        pytest.param(lambda source: [*source, source[-1]], id="last token twice"),
        pytest.param(lambda source: [*source[:4], source[5], source[4], *source[6:]], id="two tokens exchanged"),
        pytest.param(lambda source: [*source, *source], id="whole source twice"),
    ],
)
def test_a_wrong_source_makes_all_tokens_wrong(
    chain_folder: Path, chain_model: Seq2SeqChainModel, spoil_source: Callable[[list[int]], list[int]]
) -> None:
    ask = some_asks(chain_model, 1)[0]
    wanted = expected(chain_model, ask)
    ask.prompt = spoil_source(ask.prompt)
    run(Chain(chain_folder, stages=STAGES), [ask])
    assert_wrong_from(0, equal_tokens(ask.output, wanted))


@pytest.mark.parametrize(
    ("spoil_prefix", "spoil_log"),
    [
        pytest.param(lambda prefix: prefix[:1], list, id="prefix lost"),
        pytest.param(lambda prefix: prefix[:-1], list, id="a token of the prefix lost"),
        pytest.param(lambda prefix: prefix[1:], list, id="start token lost"),
        pytest.param(tuple, lambda _: [], id="log lost"),
        pytest.param(tuple, lambda log: log[:-1], id="last token of the log lost"),
        pytest.param(tuple, lambda log: log[:4] + log[5:], id="a token of the log lost"),
        pytest.param(tuple, lambda log: [*log, log[-1]], id="last token twice"),
        pytest.param(lambda prefix: (*prefix, *prefix[1:]), list, id="prefix twice"),
    ],
)
def test_a_claim_that_continues_from_a_wrong_target_makes_all_tokens_after_it_wrong(
    chain_folder: Path,
    chain_model: Seq2SeqChainModel,
    spoil_prefix: Callable[[tuple[int, ...]], tuple[int, ...]],
    spoil_log: Callable[[list[int]], list[int]],
) -> None:
    ask = some_asks(chain_model, 1)[0]
    wanted = expected(chain_model, ask)
    log = wanted[:FIRST_WRONG]
    ask.decoder_prefix, ask.log = spoil_prefix(ask.decoder_prefix), spoil_log(log)
    run(Chain(chain_folder, stages=STAGES), [ask])
    # What the client has is the true log, and after it what the stages drew.
    seen = (log + ask.output[len(ask.log) :])[:NEW_TOKENS]
    assert_wrong_from(FIRST_WRONG, equal_tokens(seen + [-1] * (NEW_TOKENS - len(seen)), wanted))


def test_each_of_many_random_faults_in_cross_blocks_changes_a_token_within_two(
    chain_folder: Path, chain_model: Seq2SeqChainModel
) -> None:
    draw = random.Random(8)
    asks = some_asks(chain_model, 60)

    def one_random_value(kept: torch.Tensor) -> None:
        kept[0, draw.choice((2, 3)), draw.randrange(1, 4)] += draw.choice((-3, -1, 1, 2, 100))

    def spoil_each(chain: FaultyChain) -> None:
        for handle in range(len(asks)):
            stage, position = draw.randrange(STAGES), draw.randrange(SOURCE_LENGTH)
            chain.spoil(one_random_value, stage=stage, handle=handle, position=position, of_source=True)

    run(FaultyChain(chain_folder, at_step(FAULTY_STEP, spoil_each), stages=STAGES, slots=60 * 44), asks)
    agrees = [agreements(chain_model, ask) for ask in asks]
    assert all(all(one[:FIRST_WRONG]) for one in agrees)
    assert not any(all(one[FIRST_WRONG : FIRST_WRONG + 2]) for one in agrees)
