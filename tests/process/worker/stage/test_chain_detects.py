"""The chain model detects faults: after a fault in the state of the stages, the tokens differ from the oracle's."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checker.oracles.chain_model import ChainModel, load_chain_model, make_chain_model
from checker.oracles.chain_oracle import expected_tokens
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Step
from orca.worker.stage.stage import Stage
from orca.worker.stage.step_runner import PreparedStep, StepOutput
from support.worker.faulty_chain import Fault, FaultyChain, assert_wrong_from, at_step, equal_tokens
from support.worker.stage_driver import Ask, Chain, serve

VOCAB, PROMPT_LENGTH, NEW_TOKENS = 1000, 9, 25
# Step n draws token n - 1 of each request, so a fault before this step spoils the tokens from FIRST_WRONG on.
FAULTY_STEP = 11
FIRST_WRONG = FAULTY_STEP - 1


class CrossedRows:
    """A stage that takes the activations of a step's rows in the wrong order."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, prepared: PreparedStep, hidden: torch.Tensor) -> StepOutput:
        return self._stage.forward(prepared, hidden.flip(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("chain")
    make_chain_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ChainModel:
    return load_chain_model(folder)


def some_asks(count: int) -> list[Ask]:
    draw = random.Random(count)
    return [
        Ask([draw.randrange(VOCAB) for _ in range(PROMPT_LENGTH)], NEW_TOKENS, SamplingParams(seed=handle))
        for handle in range(count)
    ]


def run(chain: Chain, asks: list[Ask]) -> None:
    """All asks side by side to their end."""
    serve(chain, asks, max_batch_size=len(asks))
    chain.close()


def agreements(model: ChainModel, ask: Ask, output: list[int]) -> list[bool]:
    """Return the positions at which an output equals the oracle's."""
    expected = expected_tokens(model, ask.prompt, NEW_TOKENS, seed=ask.params.seed, temperature=ask.params.temperature)
    return equal_tokens(output, expected)


def at_the_faulty_step(act: Callable[[FaultyChain], object]) -> Fault:
    return at_step(FAULTY_STEP, act)


def one_value(kept: torch.Tensor) -> None:
    kept[0, -1, -1] += 1


def one_key(kept: torch.Tensor) -> None:
    kept[0, 0, 0] = 0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 7, PROMPT_LENGTH + FIRST_WRONG - 2])
@pytest.mark.parametrize("change", [one_value, one_key, torch.Tensor.zero_])
def test_one_number_changed_at_one_position_of_one_stage_changes_all_tokens_after_it(
    folder: Path, model: ChainModel, stage: int, position: int, change: Callable[[torch.Tensor], object]
) -> None:
    fault = at_the_faulty_step(lambda chain: chain.spoil(change, stage=stage, handle=0, position=position))
    asks = some_asks(2)
    run(FaultyChain(folder, fault, stages=3), asks)
    assert_wrong_from(FIRST_WRONG, agreements(model, asks[0], asks[0].output))
    assert all(agreements(model, asks[1], asks[1].output)), "the other request is untouched"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_number_changed_in_the_part_of_one_rank_changes_all_tokens_after_it(
    folder: Path, model: ChainModel, rank: int
) -> None:
    fault = at_the_faulty_step(lambda chain: chain.spoil(one_value, stage=1, handle=0, position=5, rank=rank))
    asks = some_asks(1)
    run(FaultyChain(folder, fault, stages=2, tensor=2), asks)
    assert_wrong_from(FIRST_WRONG, agreements(model, asks[0], asks[0].output))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_requests_whose_blocks_are_exchanged_on_one_stage_are_both_wrong(
    folder: Path, model: ChainModel, stage: int
) -> None:
    def exchange(chain: FaultyChain) -> None:
        cache = chain.stages[stage][0].cache
        one, other = (chain.places(stage, 0, handle, 4, 8) for handle in (0, 1))
        for layer in cache.layers:
            of_one, of_other = one.read(layer), other.read(layer)
            one.write(layer, of_other)
            other.write(layer, of_one)

    asks = some_asks(2)
    run(FaultyChain(folder, at_the_faulty_step(exchange), stages=3), asks)
    for ask in asks:
        assert_wrong_from(FIRST_WRONG, agreements(model, ask, ask.output))


def one_place_late(step: Step) -> Step:
    """The faulty step and those after it, run at the position after the right one."""
    late = int(step.number >= FAULTY_STEP)
    return replace(step, rows=tuple(replace(row, start=row.start + late) for row in step.rows))


@pytest.mark.parametrize("is_repeated", [False, True], ids=["position skipped", "token run twice"])
def test_a_step_run_one_place_late_makes_all_tokens_after_it_wrong(
    folder: Path, model: ChainModel, is_repeated: bool
) -> None:
    def fault(chain: FaultyChain, step: Step) -> Step:
        if is_repeated and step.number == FAULTY_STEP:
            chain.run_as_it_is(step)
        return one_place_late(step)

    asks = some_asks(1)
    asks[0].max_new_tokens += 1  # room for the position too many
    run(FaultyChain(folder, fault, stages=3), asks)
    assert_wrong_from(FIRST_WRONG, agreements(model, asks[0], asks[0].output[:NEW_TOKENS]))


def test_activations_that_reach_the_wrong_rows_make_all_tokens_wrong(folder: Path, model: ChainModel) -> None:
    chain = Chain(folder, stages=3)
    crossed: Any = CrossedRows(chain.stages[1][0])
    chain.stages[1] = [crossed]
    asks = some_asks(2)
    run(chain, asks)
    for ask in asks:
        assert_wrong_from(0, agreements(model, ask, ask.output))


@pytest.mark.parametrize(
    "spoil_log",
    [
        pytest.param(lambda log: log[:4] + log[5:], id="a token left out"),
        pytest.param(lambda log: log[:-1], id="the last token left out"),
        pytest.param(lambda log: [*log, log[-1]], id="the last token twice"),
        pytest.param(lambda log: [*log[:4], log[5], log[4], *log[6:]], id="two tokens exchanged"),
    ],
)
def test_a_restart_from_a_wrong_log_makes_all_tokens_after_it_wrong(
    folder: Path, model: ChainModel, spoil_log: Callable[[list[int]], list[int]]
) -> None:
    ask = some_asks(1)[0]
    log = expected_tokens(model, ask.prompt, FIRST_WRONG, seed=ask.params.seed, temperature=ask.params.temperature)
    ask.log = spoil_log(log)
    run(Chain(folder, stages=3), [ask])
    # What the client has is the true log, and after it what the stages drew.
    seen = (log + ask.output[len(ask.log) :])[:NEW_TOKENS]
    agrees = agreements(model, ask, seen + [-1] * (NEW_TOKENS - len(seen)))
    assert_wrong_from(FIRST_WRONG, agrees)


def test_a_stage_with_the_weights_of_another_revision_makes_all_tokens_wrong(
    folder: Path, model: ChainModel, tmp_path: Path
) -> None:
    make_chain_model(tmp_path, seed=1)
    chain, other = Chain(folder, stages=3), Chain(tmp_path, stages=3)
    chain.stages[1] = other.stages[1]
    asks = some_asks(1)
    run(chain, asks)
    assert_wrong_from(0, agreements(model, asks[0], asks[0].output))


def test_each_of_hundreds_of_random_faults_changes_a_token_within_two(folder: Path, model: ChainModel) -> None:
    draw = random.Random(8)
    asks = some_asks(300)

    def one_random_value(kept: torch.Tensor) -> None:
        kept[0, draw.choice((2, 3)), draw.randrange(4)] += draw.choice((-3, -1, 1, 2, 100))

    def spoil_each(chain: FaultyChain) -> None:
        for handle in range(len(asks)):
            position = draw.randrange(PROMPT_LENGTH + FIRST_WRONG - 1)
            chain.spoil(one_random_value, stage=draw.randrange(3), handle=handle, position=position)

    run(FaultyChain(folder, at_the_faulty_step(spoil_each), stages=3, slots=300 * 36), asks)
    agrees = [agreements(model, ask, ask.output) for ask in asks]
    assert all(all(one[:FIRST_WRONG]) for one in agrees)
    assert not any(all(one[FIRST_WRONG : FIRST_WRONG + 2]) for one in agrees)
    # One in 1000 is expected to hide behind its first token.
    assert sum(one[FIRST_WRONG] for one in agrees) <= 2
