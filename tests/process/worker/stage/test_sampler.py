"""Sampling: each parameter against a plain per-row version, the distribution, and independence of the batch."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Refused, Sampled
from orca.kernels.device import kernels_of
from orca.worker.stage.host_sampler import Draw, SamplingState, logprobs, sample
from orca.worker.stage.random_numbers import uniforms
from orca.worker.stage.sampling import HostSampler, SamplingRow
from orca.worker.stage.step_runner import StepOutput
from support.worker.masks import a_new_request, no_masks

VOCAB = 37


def state(
    params: SamplingParams, prompt: Sequence[int] = (3, 3, 5), output: Sequence[int] = (), eos: Sequence[int] = (1,)
) -> SamplingState:
    return SamplingState.start(params, (*prompt, *output), len(prompt), eos)


def plain_token(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> int:
    """The token that the docstrings of SamplingParams and the sampler describe, one step after the other."""
    values = list(logits)
    for token, bias in params.logit_bias:
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            values[token] = -math.inf
    for token in {*prompt, *output}:
        values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
    for token, count in Counter(output).items():
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.temperature == 0:
        return max(range(len(values)), key=lambda token: (values[token], -token))
    values = [value / params.temperature for value in values]
    kept = set(range(len(values)))
    if params.top_k is not None:
        floor = sorted(values, reverse=True)[min(params.top_k, len(values)) - 1]
        kept = {token for token in kept if values[token] >= floor}
    weights = {token: math.exp(values[token] - max(values)) for token in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, set[int]()
    for token in sorted(kept, key=lambda token: -weights[token]):
        if reached < params.top_p * total:
            nucleus.add(token)
        reached += weights[token]
    kept = {token for token in nucleus if weights[token] >= params.min_p}
    target = uniforms([params.seed], [len(output)])[0] * sum(weights[token] for token in kept)
    for token in sorted(kept):
        target -= weights[token]
        if target < 0:
            return token
    return max(kept)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.9},
    "top-k-1": {"top_k": 1},
    "top-k": {"top_k": 5},
    "top-k-over-vocab": {"top_k": 400},
    "top-p": {"top_p": 0.6},
    "top-p-tiny": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "min-p-1": {"min_p": 1.0},
    "all-cuts": {"top_k": 9, "top_p": 0.7, "min_p": 0.1, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "repetition-below-1": {"repetition_penalty": 0.6, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "rewarded": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    "bias": {"logit_bias": ((2, 4.0), (7, -100.0), (9, 3.5))},
    "min-tokens": {"min_tokens": 3, "stop_token_ids": (2, 4), "logit_bias": ((1, 50.0), (2, 40.0), (4, 40.0))},
    "min-tokens-greedy": {"temperature": 0.0, "min_tokens": 3, "logit_bias": ((1, 50.0),)},
    "everything": {
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((11, 1.0),),
        "min_tokens": 2,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_does_what_the_plain_version_does(case: str) -> None:
    generator = torch.Generator().manual_seed(5)
    draw = random.Random(case)
    for seed in range(40):
        logits = torch.randn(VOCAB, generator=generator) * 2
        output = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 6))]
        params = SamplingParams(seed=seed, **CASES[case])
        token = sample(logits[None], [Draw(state(params, output=output), len(output))]).tokens
        assert token == [plain_token(logits.tolist(), params, (3, 3, 5), output, (1,))]


def test_a_row_gets_the_same_token_alone_and_in_a_batch_of_all_kinds() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(len(CASES), VOCAB, generator=generator) * 2
    draws = [Draw(state(SamplingParams(seed=n, **case), output=(4, 4)), 2) for n, case in enumerate(CASES.values())]
    alone = [sample(logits[n : n + 1], [draw]).tokens[0] for n, draw in enumerate(draws)]
    assert sample(logits, draws).tokens == alone
    shuffled = torch.randperm(len(draws), generator=generator).tolist()
    assert sample(logits[shuffled], [draws[n] for n in shuffled]).tokens == [alone[n] for n in shuffled]


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-12])
def test_the_coldest_temperatures_take_the_largest_logit_and_never_leave_the_vocabulary(temperature: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(7)) * 5
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1)
    assert sample(logits, [Draw(state(params), 0)]).tokens == logits.argmax(dim=-1).tolist()


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    sample(logits, [Draw(state(SamplingParams(**CASES["everything"]), output=(4,)), 1)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("case", ["plain", "top-k", "top-p", "hot"])
def test_drawn_tokens_follow_the_distribution(case: str) -> None:
    logits = torch.linspace(-1.5, 1.5, 12)
    rows = 6000
    params = CASES[case]
    draws = [Draw(state(SamplingParams(seed=seed, **params), eos=()), seed % 7) for seed in range(rows)]
    counts = Counter(sample(logits.expand(rows, -1), draws).tokens)
    weights = (logits / params.get("temperature", 1.0)).double().exp().tolist()
    # The logits rise: what is kept is the last ones. Of top-p the fewest that have its share of the weight together.
    has_share = [sum(weights[-count:]) >= params.get("top_p", 1.0) * sum(weights) for count in range(1, 13)]
    kept = range(12 - min(params.get("top_k", 12), has_share.index(True) + 1), 12)
    scale = rows / sum(weights[token] for token in kept)
    result = stats.chisquare([counts[token] for token in kept], [weights[token] * scale for token in kept])
    assert result.pvalue > 1e-3  # the seeds are fixed: it holds always or never
    assert set(counts) == set(kept)


def test_random_numbers_of_neighbouring_seeds_and_indices_are_uniform_and_unrelated() -> None:
    seeds, indices = zip(*((seed, index) for seed in range(60) for index in range(60)), strict=True)
    numbers = uniforms(seeds, indices).reshape(60, 60)
    assert stats.kstest(numbers.flatten(), "uniform").pvalue > 1e-3
    assert abs(stats.pearsonr(numbers[:-1].flatten(), numbers[1:].flatten()).statistic) < 0.05
    assert abs(stats.pearsonr(numbers[:, :-1].flatten(), numbers[:, 1:].flatten()).statistic) < 0.05


def test_top_p_reaches_beyond_the_candidates_it_tries_first() -> None:
    logits = torch.zeros(1, 3000)  # flat: 0.9 of the weight is 2700 tokens, all equal, so all are kept
    params = SamplingParams(top_p=0.9, seed=1)
    tokens = [sample(logits, [Draw(state(params, eos=()), index)]).tokens[0] for index in range(60)]
    assert len(set(tokens)) > 50


def test_a_random_number_at_the_very_end_still_picks_a_kept_token() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    draws = [Draw(state(SamplingParams(seed=seed), eos=()), 0) for seed in range(300)]
    assert set(sample(logits.expand(300, -1), draws).tokens) == {0, 1}


def test_log_probabilities_are_those_of_the_raw_logits_largest_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    first, second = logprobs(logits, [2, 0], [3, 0])
    scores = logits.log_softmax(-1)
    assert first.logprob == pytest.approx(scores[0, 2].item())
    assert [token for token, _ in first.top] == [1, 2, 0]
    assert [value for _, value in first.top] == pytest.approx(scores[0, [1, 2, 0]].tolist())
    assert (second.token, second.top) == (0, ())


def test_penalties_count_tokens_one_by_one_as_they_would_from_the_start() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1)
    grown = state(params, prompt=(3, 5))
    assert grown.counts is not None
    draw = random.Random(1)
    output = [draw.randrange(200) for _ in range(90)]
    for token in output:
        grown.counts.add(token)
    counts = dict(zip(grown.counts.tokens.tolist(), grown.counts.counts.tolist(), strict=True))
    assert counts == {3: 0, 5: 0} | Counter(output)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 2},
    {"top_p": 0.9},
    {"min_p": 0.1, "temperature": 1e-12},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": ((5, -100.0),)},
    {"repetition_penalty": 1.5, "logit_bias": ((5, -100.0),)},
]


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, math.inf, 2.0, 3.0],
        [1.0, math.nan, 2.0, 3.0],
        [math.nan, 1.0, 2.0, 3.0],
        [1.0, 2.0, 3.0, math.inf],
        [math.inf, 1.0, math.inf, 2.0],
        [math.inf, -math.inf, math.nan, 2.0],
        [math.nan] * 4,
        [math.inf] * 4,
        [-math.inf] * 4,
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("knows_argmax", [False, True])
def test_a_row_that_the_model_computed_wrongly_is_found_and_the_others_have_their_tokens(
    bad: list[float], settings: dict[str, Any], knows_argmax: bool
) -> None:
    """Its token is one of the vocabulary: the stages look up its embedding before anybody knows of the refusal."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1] = -math.inf
    logits[1, 4:8] = torch.tensor(bad)
    draws = [Draw(state(SamplingParams(seed=n, **settings)), 0) for n in range(3)]
    draws[2] = Draw(state(SamplingParams(temperature=0.0)), 0)
    argmax = kernels_of(logits.device).argmax(logits).numpy() if knows_argmax else None
    tokens, no_number = sample(logits, draws, argmax)
    assert no_number == [1]
    assert 0 <= tokens[1] < VOCAB
    assert tokens[::2] == sample(logits[::2].contiguous(), draws[::2]).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_is_not_allowed_spoils_no_row(temperature: float) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, math.inf, -math.inf], [-math.inf, 9.0, -math.inf, 8.0, -math.inf]])
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(3,), top_k=1)
    draws = [Draw(state(params, prompt=()), 1)] * 2
    tokens, no_number = sample(logits, draws)
    assert (tokens[0], no_number) == (2, [1]), "the other row has numbers only where no token is allowed"
    assert sample(logits, [Draw(draws[0].state, 2)] * 2).no_number == [0], "later, the stop token is allowed"


@pytest.mark.parametrize("bias", [(), ((2, 50.0),), ((0, 0.0),)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("knows_argmax", [False, True])
def test_a_token_that_the_model_must_not_draw_is_not_drawn(
    bias: tuple[tuple[int, float], ...], temperature: float, knows_argmax: bool
) -> None:
    """The next best one is drawn, also if the token's own logit is no number. Log probabilities are the model's."""
    logits = torch.tensor([[1.0, 7.0, 9.0, 2.0], [1.0, 0.0, math.nan, 5.0], [1.0, 0.0, 2.0, 5.0]])
    params = SamplingParams(temperature=temperature, top_k=1, logit_bias=bias)
    draws = [Draw(SamplingState.start(params, (), 0, (), never), 0) for never in ((2,), (0, 2), ())]
    argmax = kernels_of(logits.device).argmax(logits).numpy() if knows_argmax else None
    tokens, no_number = sample(logits, draws, argmax)
    assert tokens == [1, 3, 2 if bias == ((2, 50.0),) else 3]
    assert not no_number
    assert logits[0, 2] == 9


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_request_without_a_log_probability_is_refused_if_it_asks_for_one(is_scored: bool) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, 2.0], [1.0, 0.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, logprobs=0 if is_scored else None)
    sampler = HostSampler((1,), (), no_masks(vocab_size=4))
    for line in range(2):
        sampler.start(line, a_new_request(line, params))
    drawn = sampler.sample([SamplingRow(line, line, 0, params) for line in range(2)], StepOutput(logits)).read()
    assert [type(each) for each in drawn] == [Refused if is_scored else Sampled, Sampled]
