"""Traces have the paper's distributions and are the same for the same seed."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, fmean, pstdev

import pytest

from orca.planner.workload.lengths import DEVIATION_MAX, Lengths, Range, TruncatedNormal, parse_lengths
from orca.planner.workload.trace import PRESETS, TraceSpec, generate


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
    trace = generate(spec(prompt_tokens=parse_lengths("32"), new_tokens=parse_lengths("16")))
    assert {(request.prompt_tokens, request.new_tokens) for request in trace.requests} == {(32, 16)}
    assert trace.max_total_tokens == 48


def test_prompts_are_fixed_by_the_seed_and_differ_between_requests() -> None:
    trace = generate(spec(requests=3))
    assert trace.prompt(1, 100) == trace.prompt(1, 100)
    assert trace.prompt(0, 100)[:20] != trace.prompt(1, 100)[:20]
    assert len(trace.prompt(2, 100)) == trace.requests[2].prompt_tokens
    assert max(trace.prompt(2, 100)) < 100


@pytest.mark.parametrize("text", ["0:5", "7:3", "0", "-1"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a range of lengths needs 1 <= low <= high, not"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", "x", "5:x", ":5", "5:", "5:6:", "1.5", "1e3", "1::5:2", "1:9:x:2", "9" * 5000])
def test_lengths_that_are_no_numbers_are_refused_as_a_whole(text: str) -> None:
    with pytest.raises(ValueError, match=f"^lengths are N, N:M or N:M:MEAN:SD, in numbers, not '{text}'$"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["2147483648", "1:2147483648", f"1:{'9' * 400}:5:1"])
def test_lengths_that_no_model_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a length is at most 2,147,483,647 tokens, not [0-9]+$"):
        parse_lengths(text)


def lengths_of(distribution: Lengths, *, seed: int = 7) -> list[int]:
    return [request.new_tokens for request in generate(spec(new_tokens=distribution, seed=seed)).requests]


def test_normal_lengths_have_their_mean_and_deviation_where_the_ends_cut_off_little() -> None:
    lengths = lengths_of(TruncatedNormal(mean=200, deviation=30, low=1, high=400))
    assert fmean(lengths) == pytest.approx(200, abs=2.0)  # 4000 lengths: the mean deviates by 30 / 63
    assert pstdev(lengths) == pytest.approx(30, rel=0.05)
    # Two thirds of a normal distribution lie within one deviation; of a uniform one with this deviation, 58 %.
    assert sum(170 < length < 230 for length in lengths) / len(lengths) == pytest.approx(0.675, abs=0.03)


def test_normal_lengths_are_cut_off_at_both_ends_and_not_moved_there() -> None:
    # Table 3 of ExeGPT, the inputs of summarization: a deviation as large as the mean.
    low, high, mean, deviation = 1, 512, 256.0, 252.0
    lengths = lengths_of(TruncatedNormal(mean=mean, deviation=deviation, low=low, high=high))
    assert low <= min(lengths) <= 5
    assert high - 5 <= max(lengths) <= high
    # The deviation of a normal distribution that is cut off at both sides at the same distance.
    normal, end = NormalDist(), (high - mean) / deviation
    left = normal.cdf(end) - normal.cdf(-end)
    assert fmean(lengths) == pytest.approx(mean, rel=0.03)
    assert pstdev(lengths) == pytest.approx(deviation * sqrt(1 - 2 * end * normal.pdf(end) / left), rel=0.03)
    assert sum(length in (low, high) for length in lengths) < 40, "what is cut off is drawn again, not set to the ends"


def test_both_ends_of_normal_lengths_are_included() -> None:
    lengths = lengths_of(TruncatedNormal(mean=4, deviation=DEVIATION_MAX, low=3, high=6))
    for length in (3, 4, 5, 6):  # the top of so wide a normal distribution is level
        assert sum(each == length for each in lengths) == pytest.approx(1000, rel=0.12)


@pytest.mark.parametrize(
    ("text", "only"), [("5:5:5:100", 5), ("1:900:7:1e-300", 7), ("3:900:3:1e-9", 3), ("1:900:900:1e-9", 900)]
)
def test_normal_lengths_without_a_choice_are_all_the_same(text: str, only: int) -> None:
    assert set(lengths_of(parse_lengths(text))) == {only}


def test_normal_lengths_depend_on_the_seed_only() -> None:
    distribution = parse_lengths("1:320:128:68")
    assert distribution == TruncatedNormal(mean=128, deviation=68, low=1, high=320)
    assert lengths_of(distribution) == lengths_of(distribution)
    assert lengths_of(distribution) != lengths_of(distribution, seed=8)
    assert lengths_of(distribution)[:8] == [254, 5, 68, 200, 63, 215, 118, 161], "another machine drew these"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0:9:5:2", "1 <= low <= high, not 0..9"),
        ("9:3:5:2", "1 <= low <= high, not 9..3"),
        ("1:9:0.5:2", "from 1 to 9 must be one of them, not 0.5"),
        ("1:9:10:2", "from 1 to 9 must be one of them, not 10"),
        ("1:9:nan:2", "must be one of them, not nan"),
        ("1:9:5:0", "above 0 and at most 1,000,000, not 0"),
        ("1:9:5:-1", "not -1"),
        ("1:9:5:inf", "not inf"),
        ("1:9:5:nan", "not nan"),
        ("1:9:5", "N, N:M or N:M:MEAN:SD, in numbers, not '1:9:5'"),
        ("1:9:5:2:1", "N, N:M or N:M:MEAN:SD, in numbers, not '1:9:5:2:1'"),
    ],
)
def test_an_invalid_normal_distribution_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_lengths(text)


def test_distributions_are_shown_with_their_parameters() -> None:
    assert [str(parse_lengths(text)) for text in ("32", "32:512", "1:320:128:67.5")] == [
        "32",
        "U(32,512)",
        "N(128,67.5;1,320)",
    ]


@pytest.mark.parametrize("changes", [{"requests": 0}, {"rate": 0.0}, {"rate": -1.0}, {"stratum": 0}, {"stratum": 9}])
def test_an_impossible_trace_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least one|above 0|need pairs"):
        spec(**changes)
