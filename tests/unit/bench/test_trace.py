"""Traces have the paper's distributions and are the same for the same seed."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from orca.bench.trace import PRESETS, Range, TraceSpec, generate


def spec(**changes: object) -> TraceSpec:
    prompt_tokens, new_tokens = PRESETS["paper"]
    base = TraceSpec(requests=4000, prompt_tokens=prompt_tokens, new_tokens=new_tokens, rate=5.0, seed=7)
    return replace(base, **changes)


def test_lengths_are_uniform_with_both_ends_included() -> None:
    requests = generate(spec(prompt_tokens=Range(3, 6))).requests
    for length in (3, 4, 5, 6):
        assert sum(request.prompt_tokens == length for request in requests) == pytest.approx(1000, rel=0.12)
    news = [request.new_tokens for request in requests]
    assert (min(news), max(news)) == (1, 128)
    assert fmean(news) == pytest.approx(64.5, rel=0.03)


def test_prompt_and_new_lengths_are_independent() -> None:
    requests = generate(spec()).requests
    prompts, news = [r.prompt_tokens for r in requests], [r.new_tokens for r in requests]
    covariance = fmean(p * n for p, n in zip(prompts, news, strict=True)) - fmean(prompts) * fmean(news)
    assert abs(covariance / (pstdev(prompts) * pstdev(news))) < 0.05


def test_arrivals_are_a_poisson_process_of_the_given_rate() -> None:
    arrivals = [0.0, *(request.arrival_s for request in generate(spec()).requests)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    # Gaps of a Poisson process are exponential: their mean equals their deviation, and 1/e of them exceed it.
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, rel=0.05)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another_one() -> None:
    assert generate(spec()) == generate(spec())
    assert generate(spec()).requests != generate(spec(seed=8)).requests


def test_another_rate_keeps_the_requests_and_scales_their_arrivals() -> None:
    slow, fast = generate(spec(requests=50)), generate(spec(requests=50, rate=50.0))
    for before, after in zip(slow.requests, fast.requests, strict=True):
        assert (before.prompt_tokens, before.new_tokens) == (after.prompt_tokens, after.new_tokens)
        assert before.arrival_s == pytest.approx(10 * after.arrival_s)


def test_without_a_rate_all_requests_arrive_at_the_start() -> None:
    assert {request.arrival_s for request in generate(spec(rate=None)).requests} == {0.0}


def test_a_homogeneous_trace_has_one_length() -> None:
    trace = generate(spec(prompt_tokens=Range.parse("32"), new_tokens=Range.parse("16")))
    assert {(request.prompt_tokens, request.new_tokens) for request in trace.requests} == {(32, 16)}
    assert trace.max_total_tokens == 48


def test_prompts_are_fixed_by_the_seed_and_differ_between_requests() -> None:
    trace = generate(spec(requests=3))
    assert trace.prompt(1, 100) == trace.prompt(1, 100)
    assert trace.prompt(0, 100)[:20] != trace.prompt(1, 100)[:20]
    assert len(trace.prompt(2, 100)) == trace.requests[2].prompt_tokens
    assert max(trace.prompt(2, 100)) < 100


@pytest.mark.parametrize("text", ["0:5", "7:3", "0", "x"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid literal"):
        Range.parse(text)


@pytest.mark.parametrize("changes", [{"requests": 0}, {"rate": 0.0}, {"rate": -1.0}])
def test_an_impossible_trace_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least one|above 0"):
        spec(**changes)
