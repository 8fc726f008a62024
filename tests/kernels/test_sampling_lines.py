"""The lines that sampling reads on a device, and the reference of sampling beside hand-computed figures and the stage's
sampler."""

import math

import pytest
import torch

from orca.core.domain.request import SamplingParams
from orca.kernels.contract.sampling_lines import IN_PROMPT, IntColumn, LineSettings, SamplingLines
from orca.kernels.contract.sampling_reference import ReferenceDraw, adjusted_logits, sample_reference, uniform
from orca.worker.stage.host_sampler import Draw, SamplingState, sample
from orca.worker.stage.random_numbers import uniforms
from orca.worker.stage.sampling import line_settings
from support.kernels.sampling_rows import CASES, EOS, every_case, lines_of, random_logits

CPU = torch.device("cpu")
PENALISED = LineSettings(frequency_penalty=0.5)


def reference_row(logits: list[float], settings: LineSettings, index: int = 0) -> ReferenceDraw:
    state = SamplingLines(1, len(logits), CPU)
    state.put(0, settings)
    [row] = sample_reference(torch.tensor([logits]), torch.tensor([0]), torch.tensor([index]), state)
    assert row is not None
    return row


@pytest.mark.parametrize("case", CASES)
def test_the_reference_samples_the_same_tokens_as_the_stage(case: str) -> None:
    rows, output = 40, (4, 4, 9)
    logits = random_logits(rows, 37, seed=len(case))
    cases = [SamplingParams(**({"seed": seed} | CASES[case])) for seed in range(rows)]
    for index, tokens in ((0, ()), (3, output)):
        states = [SamplingState.start(each, (3, 3, 5, *tokens), 3, EOS) for each in cases]
        lines = lines_of(cases, 37, CPU, tokens)
        drawn = sample_reference(logits, torch.arange(rows), torch.full((rows,), index), lines)
        expected = sample(logits, [Draw(each, index) for each in states]).tokens
        assert [row and row.token for row in drawn] == expected


def test_the_reference_of_four_tokens_equals_a_hand_computation() -> None:
    logits = [math.log(share) for share in (0.1, 0.5, 0.15, 0.25)]
    shares = {
        LineSettings(): [0.1, 0.5, 0.15, 0.25],
        LineSettings(top_k=2): [0.0, 2 / 3, 0.0, 1 / 3],
        LineSettings(top_p=0.8): [0.0, 5 / 9, 1.5 / 9, 2.5 / 9],
        LineSettings(top_k=2, top_p=0.6): [0.0, 1.0, 0.0, 0.0],
        LineSettings(min_p=0.4): [0.0, 2 / 3, 0.0, 1 / 3],
        LineSettings(temperature=0.5): [1 / 34.5, 25 / 34.5, 2.25 / 34.5, 6.25 / 34.5],
        LineSettings(temperature=0.0): [0.0, 1.0, 0.0, 0.0],
        LineSettings(min_tokens=1, masked=(1,)): [0.2, 0.0, 0.3, 0.5],
        LineSettings(logit_bias=((0, math.log(6.0)),)): [0.4, 1 / 3, 0.1, 1 / 6],
    }
    for settings, expected in shares.items():
        row = reference_row(logits, settings)
        probabilities = row.cumulated.diff(prepend=torch.zeros(1))
        assert probabilities.tolist() == pytest.approx(expected, abs=1e-7), settings
        assert row.logprob == pytest.approx(logits[row.token], abs=1e-7)


def test_the_reference_of_penalties_equals_a_hand_computation() -> None:
    settings = LineSettings(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    state = SamplingLines(1, 5, CPU)
    state.put(0, settings, prompt=(0, 1), output=(1, 2, 2))
    values = adjusted_logits(torch.tensor([4.0, -4.0, 4.0, 4.0, -4.0]), 0, 3, state)
    assert values.tolist() == [2.0, -8.0 - 0.25 - 0.5, 2.0 - 0.25 - 1.0, 4.0, -4.0]


def test_a_row_allows_only_tokens_that_rounding_could_have_sampled() -> None:
    cumulated = torch.tensor([0.3, 0.5, 0.5, 1.0], dtype=torch.float64)
    row = ReferenceDraw(1, 0.0, 0.30001, cumulated > 0, cumulated, 1.0)
    assert [row.allows(token, 1e-4) for token in range(4)] == [True, True, False, False]
    assert [row.allows(token, 1e-6) for token in range(4)] == [False, True, False, False]


def test_random_numbers_are_those_of_the_stage() -> None:
    pairs = [(0, 0), (7, 1), ((1 << 63) - 1, (1 << 63) - 1), (1 << 32, 1 << 33), (0xFFFFFFFF, 12)]
    assert [uniform(*pair) for pair in pairs] == uniforms(*zip(*pairs, strict=True)).tolist()


def test_a_growing_table_keeps_its_lines_and_reports_that_it_moved() -> None:
    state = lines_of(every_case(), 40, CPU)
    names = ("numbers", "integers", "bias_tokens", "bias", "masked", "last_tokens")
    before, generation = {name: getattr(state, name).clone() for name in names}, state.generation
    state.grow(100)
    assert state.generation > generation
    for name, table in before.items():
        grown = getattr(state, name)
        assert len(grown) == 100, name
        assert torch.equal(grown[: len(table)], table), name
        assert not grown[len(table) :].any(), name


def test_growing_for_biases_and_masked_tokens_keeps_the_other_lines() -> None:
    state = SamplingLines(2, 1000, CPU)
    state.put(0, LineSettings(logit_bias=((3, 1.0),), masked=(7,)))
    generation = state.generation
    many = [(token, float(token)) for token in range(300)]
    state.put(1, LineSettings(logit_bias=many, masked=range(80)))
    assert state.generation > generation
    assert (state.bias_tokens[0, 0], state.bias[0, 0], state.masked[0, 0]) == (3, 1.0, 7)
    assert list(zip(state.bias_tokens[1, :300].tolist(), state.bias[1, :300].tolist(), strict=True)) == many
    assert state.masked[1, :80].tolist() == list(range(80))


def test_a_replaced_line_grows_nothing() -> None:
    state = SamplingLines(3, 50, CPU)
    for turn in range(10):
        state.put(turn % 3, PENALISED, prompt=(turn,), output=(turn, turn))
    generation = state.generation
    for turn in range(10):
        state.put(turn % 3, PENALISED if turn % 2 else LineSettings(), output=(turn,))
        state.drop(turn % 3)
    assert (state.generation, len(state.counts)) == (generation, 16)


def test_counts_belong_to_the_line_that_was_put_last() -> None:
    state = SamplingLines(2, 10, CPU)
    state.put(0, PENALISED, prompt=(1,), output=(2, 2))
    state.drop(0)
    state.put(1, PENALISED, prompt=(4, 5), output=(5, 6))
    assert state.counts[0].tolist() == [0, 0, 0, 0, IN_PROMPT, IN_PROMPT + 1, 1, 0, 0, 0]


def test_a_line_without_a_penalty_counts_nothing() -> None:
    state = SamplingLines(1, 10, CPU)
    state.put(0, line_settings(SamplingParams(), EOS), prompt=(1,), output=(2,))
    assert not state.counts.any()


@pytest.mark.parametrize("case", CASES)
def test_a_token_that_must_not_be_drawn_has_no_chance_on_a_device_either(case: str) -> None:
    logits = random_logits(40, 37, seed=len(case))
    logits[:, 5] += 20
    state = SamplingLines(40, 37, CPU)
    cases = [SamplingParams(**({"seed": seed} | CASES[case])) for seed in range(40)]
    for line, each in enumerate(cases):
        state.put(line, line_settings(each, EOS, never=(5, 0)), (3, 3), ())
    drawn = sample_reference(logits, torch.arange(40), torch.zeros(40, dtype=torch.int64), state)
    draws = [Draw(SamplingState.start(each, (3, 3), 2, EOS, never=(5, 0)), 0) for each in cases]
    tokens = [row and row.token for row in drawn]
    assert 5 not in tokens
    assert tokens == sample(logits, draws).tokens


def test_growing_for_penalised_lines_keeps_their_counts() -> None:
    state = SamplingLines(40, 50, CPU)
    generation, rows = state.generation, len(state.counts)
    for line in range(40):
        state.put(line, PENALISED, prompt=(line,), output=(49,))
    assert state.generation > generation
    assert len(state.counts) > 40 > rows
    held = (state.integers[:, IntColumn.COUNT_ROW] - 1).tolist()
    assert len(set(held)) == 40
    for line, row in enumerate(held):
        assert state.counts[row].nonzero().flatten().tolist() == [line, 49]
