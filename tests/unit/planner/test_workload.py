"""A workload has the moments and percentiles of its source, whatever that is."""

from math import sqrt
from random import Random
from statistics import fmean, pstdev

import pytest

from orca.core.domain.errors import SettingError
from orca.planner.workload.length_parts import PartsByLength
from orca.planner.workload.lengths import Range, TruncatedNormal, mean_of, parse_lengths
from orca.planner.workload.tasks import (
    PAPER_P99,
    TASKS,
    TOLERANCE,
    Moments,
    fit_truncated,
    task_lengths,
    task_lines,
    task_workload,
)
from orca.planner.workload.trace import TraceSpec, generate
from orca.planner.workload.workload import PAIRS, Workload, parse_workload


@pytest.mark.parametrize("text", ["7", "3:6", "1:320:128:68", "5:9:5:0.001"])
def test_the_shares_of_lengths_are_those_that_are_drawn(text: str) -> None:
    lengths, numbers = parse_lengths(text), Random(1)
    drawn = [lengths.draw(numbers) for _ in range(4000)]
    shares = lengths.pmf()
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(length * share for length, share in shares.items()) == pytest.approx(fmean(drawn), rel=0.03)
    for low, high in ((1, 4), (4, 6), (90, 180)):
        expected = sum(share for length, share in shares.items() if low <= length <= high)
        assert sum(low <= length <= high for length in drawn) / 4000 == pytest.approx(expected, abs=0.03)


def test_more_lengths_than_a_table_holds_are_represented_by_some_of_them() -> None:
    for lengths in (Range(1, 1_000_000), TruncatedNormal(mean=5e5, deviation=2e5, low=1, high=1_000_000)):
        shares = lengths.pmf()
        assert 2000 < len(shares) <= 4096
        assert sum(shares.values()) == pytest.approx(1)
        assert sum(length * share for length, share in shares.items()) == pytest.approx(5e5, rel=0.001)


@pytest.mark.parametrize("text", ["7", "3:6", "1:320:128:68"])
def test_quantiles_cover_all_lengths_in_order(text: str) -> None:
    lengths = parse_lengths(text)
    found = [lengths.quantile((number + 0.5) / 1000) for number in range(1000)]
    assert found == sorted(found)
    assert lengths.low <= found[0] <= found[-1] <= lengths.high
    assert fmean(found) == pytest.approx(mean_of(lengths), rel=0.01)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_outputs_of_a_task_have_the_moments_of_the_table(task: str, scale: float) -> None:
    workload, row = task_workload(task, scale), TASKS[task].outputs
    assert workload.outputs.mean == pytest.approx(row.mean * scale, rel=TOLERANCE)
    assert workload.outputs.deviation == pytest.approx(row.deviation * scale, rel=TOLERANCE)


def test_the_outputs_have_the_99th_percentiles_of_the_table() -> None:
    found = {task: task_workload(task).outputs.percentile(99) for task in TASKS}
    assert found == {"S": 63, "T": 292, "G": 417, "C1": 136, "C2": 579}
    assert [task for task in TASKS if found[task] != PAPER_P99[task]] == ["C1"], "which the paper gives as 137"


@pytest.mark.parametrize("task", TASKS)
def test_the_inputs_have_the_moments_of_the_table_where_they_can(task: str) -> None:
    prompts, row = task_lengths(task)[0], TASKS[task].inputs
    if TASKS[task].are_inputs_parent:
        assert row.deviation > row.uniform_deviation
        assert (prompts.mean, prompts.deviation) == (row.mean, row.deviation)
        assert any("cannot be a moment" in line for line in task_lines(task))
    else:
        shares = prompts.pmf()
        mean = sum(length * share for length, share in shares.items())
        deviation = sqrt(sum((length - mean) ** 2 * share for length, share in shares.items()))
        assert (mean, deviation) == pytest.approx((row.mean, row.deviation), rel=TOLERANCE)
    assert "moments after truncation" in task_lines(task)[0]


@pytest.mark.parametrize("moments", [Moments(256, 252, 512), Moments(128, 81, 256), Moments(500, 100, 512)])
def test_moments_that_no_lengths_have_are_refused(moments: Moments) -> None:
    with pytest.raises(ValueError, match=f"on 1 to {moments.high} has the mean {moments.mean}"):
        fit_truncated(moments)


@pytest.mark.parametrize(("task", "scale", "complaint"), [("X", 1.0, "S, T, G, C1, C2, not 'X'"), ("S", 0.01, "0.01")])
def test_an_unknown_task_or_scale_is_refused(task: str, scale: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        task_workload(task, scale)


@pytest.mark.parametrize(("percent", "length"), [(50, 2), (50.1, 3), (99, 4), (75, 3), (25, 1)])
def test_a_percentile_is_the_smallest_length_with_that_share(percent: float, length: int) -> None:
    assert Workload.of_lengths(Range(1, 1), Range(1, 4)).outputs.percentile(percent) == length


def test_counted_bins_spread_evenly() -> None:
    cells = [(Range(1, 1), Range(10, 19), 3.0), (Range(101, 200), Range(20, 20), 1.0), (Range(5, 6), Range(7, 7), 0.0)]
    workload = Workload.of_cells(cells, source="the pool", answers=4, cut_share=0.25)
    assert workload.outputs.mean == pytest.approx(0.75 * 14.5 + 0.25 * 20)
    assert workload.prompts.mean == pytest.approx(0.75 * 1 + 0.25 * 150.5, rel=0.01)
    assert dict(zip(workload.outputs.lengths, workload.mean_prompts, strict=True))[20] == pytest.approx(150.5, rel=0.01)
    assert workload.mean_prompts[0] == 1
    assert (workload.longest, workload.outputs.low, workload.outputs.high) == (220, 10, 20)
    spread = sqrt(0.75 * 99 / 12 + 0.75 * 0.25 * 5.5**2) * sqrt(0.25 * 9999 / 12 + 0.75 * 0.25 * 149.5**2)
    assert workload.correlation == pytest.approx(0.75 * 0.25 * 5.5 * 149.5 / spread, rel=0.01)
    assert "cut by max_tokens: 25.0%" in workload.lines()[-1]


def test_the_last_bin_ends_at_the_longest_length() -> None:
    cells = [(Range(8, 15), Range(1024, 1151), 1.0)]
    assert Workload.of_cells(cells, source="the pool", length_max=1100).outputs.high <= 1100


def test_pairs_represent_the_joint_distribution() -> None:
    cells = [(Range(prompt, prompt + 9), Range(2 * prompt, 2 * prompt + 19), 1.0) for prompt in range(1, 200, 10)]
    for workload in (Workload.of_cells(cells, source="x"), task_workload("T"), parse_workload("3/4")):
        prompts, outputs = zip(*workload.pairs, strict=True)
        assert len(prompts) == PAIRS
        assert fmean(prompts) == pytest.approx(workload.prompts.mean, rel=0.01)
        assert fmean(outputs) == pytest.approx(workload.outputs.mean, rel=0.01)
        products = fmean(prompt * output for prompt, output in workload.pairs) - fmean(prompts) * fmean(outputs)
        expected = workload.correlation * workload.prompts.deviation * workload.outputs.deviation
        assert products == pytest.approx(expected, abs=0.03 * pstdev(prompts) * pstdev(outputs) + 1e-9)


def test_strata_are_the_means_of_equal_shares() -> None:
    prompts = Workload.of_lengths(Range(1, 8), Range(1, 1)).prompts
    assert prompts.strata(4) == pytest.approx((1.5, 3.5, 5.5, 7.5))
    assert prompts.strata(3) == pytest.approx(((1 + 2 + 3 * 2 / 3) * 3 / 8, 4.5, (7 + 8 + 6 * 2 / 3) * 3 / 8))


def test_a_trace_draws_the_pairs_of_a_workload() -> None:
    workload = Workload.of_cells([(Range(5, 5), Range(7, 7), 3.0), (Range(9, 9), Range(2, 2), 1.0)], source="two")
    trace = generate(TraceSpec.of_workload(workload, requests=4000, seed=3))
    pairs = [(request.prompt_tokens, request.new_tokens) for request in trace.requests]
    assert set(pairs) == {(5, 7), (9, 2)}
    assert pairs.count((9, 2)) == pytest.approx(1000, rel=0.1)
    assert str(trace.spec.new_tokens) == "outputs of two"


RARE = Workload.of_cells(
    [(Range(2, 4), Range(1, 9), 96.0), (Range(20, 40), Range(50, 60), 3.0), (Range(300, 500), Range(400, 600), 1.0)],
    source="",
)
"""Long requests are rare, and decide a percentile."""


def test_strata_have_the_rare_requests_as_often_as_the_workload() -> None:
    spec = TraceSpec.of_workload(RARE, requests=1000, seed=3, stratum=100)
    requests = generate(spec).requests
    for first in range(0, 1000, 100):
        block = sorted(request.new_tokens for request in requests[first : first + 100])
        assert (block[95] <= 9, 50 <= block[96] <= block[98] <= 60, block[99] >= 400) == (True, True, True)
    places = [request.index % 100 for request in requests if request.new_tokens >= 400]
    assert len(set(places)) > 5, "the order within a stratum is random"
    assert all((request.new_tokens >= 400) == (request.prompt_tokens >= 300) for request in requests)


def test_strata_spread_prompts_too_and_independently() -> None:
    stated = parse_workload("1:100/1:100")
    parts = PartsByLength(stated.parts)
    pairs = parts.stratified(100, Random(1))
    assert sorted(prompt for prompt, _ in pairs) == sorted(output for _, output in pairs) == list(range(1, 101))
    mean = fmean(prompt * output for prompt, output in pairs)
    assert mean == pytest.approx(50.5**2, rel=0.1)
    assert pairs != parts.stratified(100, Random(2))


def test_a_workload_that_the_model_does_not_allow_is_refused() -> None:
    workload = parse_workload("1:100/5:28")
    workload.check_fits(128)
    with pytest.raises(SettingError, match=r"1:100|U\(1,100\) in.*up to 128 tokens.*allows 127"):
        workload.check_fits(127)
    with pytest.raises(SettingError, match="up to 129 tokens"):
        workload.check_fits(128, is_encoder_decoder=True)


@pytest.mark.parametrize("text", ["5", "5/", "/5", "5/6/7", "0/3"])
def test_a_stated_workload_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lengths"):
        parse_workload(text)


def test_a_workload_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        Workload.of_cells([], source="empty")
    with pytest.raises(ValueError, match="above 0 requests/s"):
        Workload.of_lengths(Range(1, 1), Range(1, 1), rate=0.0)
