"""`orca bench plan simulate`: the settings, the iteration log, and the arithmetic of the errors."""

import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from orca.bench.plan.iteration_log import read_answers
from orca.bench.plan.simulate_runs import (
    PredictionError,
    RealRun,
    SlowedCost,
    compare,
    figures,
    lines,
    schedules,
)
from orca.bench.plan.until_steady import until_steady
from orca.core.domain.errors import SettingError
from orca.core.domain.step import Epoch, Row, Step
from orca.planner.simulate.steady_state import (
    NoSteadyState,
    TimedAnswer,
    percentile_of_spans,
    saturated_window,
    steady_figures,
)
from orca.scheduler.engines.step_cost import LinearCost


def line(step: int, rows: list[list[object]]) -> bytes:
    return orjson.dumps(
        {
            "epoch": 1,
            "step": step,
            "rows": rows,
            "freed": [],
            "submitted_ns": step * 10**9,
            "returned_ns": (step + 2) * 10**9,
        }
    )


def test_answers_are_read_from_the_steps_of_a_scheduler(tmp_path: Path) -> None:
    log = tmp_path / "scheduler-0.jsonl"
    steps = [
        [["a.0", "initiation", 0, 16]],
        [["a.0", "initiation", 16, 4], ["b.0", "initiation", 0, 3]],
        [["a.0", "increment", 20, 1], ["b.0", "increment", 3, 1]],
        [["a.0", "increment", 21, 1]],
    ]
    log.write_bytes(b"\n".join(line(number, rows) for number, rows in enumerate(steps, start=1)))
    assert read_answers(log) == [TimedAnswer(1.0, 4.0, 6.0, 3), TimedAnswer(2.0, 4.0, 5.0, 2)]
    assert read_answers(log, skip=1) == [TimedAnswer(2.0, 4.0, 5.0, 2)]


def test_a_source_draws_no_token(tmp_path: Path) -> None:
    log = tmp_path / "scheduler-0.jsonl"
    rows: list[list[object]] = [["a.0", "initiation", 0, 9, "source"], ["a.0", "initiation", 0, 1, "target"]]
    log.write_bytes(line(1, rows) + b"\n" + line(2, [["a.0", "increment", 1, 1, "target"]]))
    assert read_answers(log) == [TimedAnswer(1.0, 3.0, 4.0, 2)]


def test_whole_cycles_count() -> None:
    """Ten answers end every four seconds, and ten others enter at once."""
    answers = [TimedAnswer(4.0 * cycle, 4.0 * cycle + 1, 4.0 * cycle + 4, 4) for cycle in range(12) for _ in range(10)]
    assert saturated_window(answers) == (16.0, 44.0)
    found = steady_figures(answers)
    assert found.throughput == pytest.approx(2.5)
    assert (found.sequence_s, found.first_token_s, found.token_s) == (4.0, 1.0, 1.0)
    with pytest.raises(SettingError, match="needs 20: run more requests"):
        steady_figures(answers[:40])


def test_long_answers_count_as_often_as_they_enter() -> None:
    """Two of a hundred answers last 30 s, most of the time that is measured. None of them ends at its begin."""
    answers = [
        TimedAnswer(start, start + 0.1, start + (30.0 if number % 50 == 7 else 1.0), 10)
        for number, start in enumerate(0.1 * number for number in range(600))
    ]
    assert steady_figures(answers, percent=98.5).sequence_s == pytest.approx(30.0)
    assert steady_figures(answers, percent=97).sequence_s == pytest.approx(1.0)


def test_answers_that_last_beyond_the_end_count_as_longer() -> None:
    kinds = [(0.0, 3.0), (0.0, 1.0), (4.0, 9.0), (5.0, 5.5), (6.0, math.inf), (-1.0, 2.0), (8.0, 8.1)]
    spans = 20 * kinds
    # 0.5 and 1 of five, then those that are cut at 2 s: half of the rest has ended at 3 s.
    assert percentile_of_spans(spans, 0.0, 8.0, 40) == 1.0
    assert percentile_of_spans(spans, 0.0, 8.0, 41) == 3.0
    assert percentile_of_spans(spans, 0.0, 8.0, 70) == 3.0
    with pytest.raises(NoSteadyState, match="run more requests"):
        percentile_of_spans(spans, 0.0, 8.0, 71)


def test_a_percentile_is_unknown_where_few_of_the_long_requests_end() -> None:
    """Nineteen of twenty last 20 s and are cut. The one of 9 s that ends is not the percentile of all."""
    spans = [(0.0, 9.0), *[(5.0, 25.0)] * 19]
    for percent in (50, 99):
        with pytest.raises(NoSteadyState):
            percentile_of_spans(spans, 0.0, 10.0, percent)
    assert percentile_of_spans([*spans, *[(0.0, 1.0)] * 180], 0.0, 10.0, 90) == 1.0
    with pytest.raises(NoSteadyState):
        percentile_of_spans([*spans, *[(0.0, 1.0)] * 180], 0.0, 10.0, 99)
    with pytest.raises(NoSteadyState):
        percentile_of_spans([(0.0, 1.0)] * 19, 0.0, 10.0, 50)
    with pytest.raises(NoSteadyState):
        percentile_of_spans([], 0.0, 10.0, 50)


def test_settings_are_half_of_each_strategy_and_the_same_for_a_seed() -> None:
    chosen = schedules(24, 0)
    assert chosen == schedules(24, 0)
    assert len(set(chosen)) == 24
    assert [each.policy for each in chosen].count("rra") == 12
    assert {each.task for each in chosen} == {"S", "T", "C1"}
    assert all(each.cycle is not None for each in chosen if each.policy == "rra")
    assert "--max-batch-tokens" in chosen[0].flags()
    assert "--encode-batch" in chosen[1].flags()


def test_rounds_count_by_the_median_of_their_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round in which the machine was slow is slow in both, and its ratio is like that of the others."""
    turns = iter([(10.0, 1.02, 0.95), (5.0, 1.04, 0.99), (9.0, 0.90, 1.30)])
    profiles: list[int] = []
    # Before and after each profile, then in its run.
    speeds = iter([90.0, 110.0, 80.0, 100.0, 100.0, 100.0, 50.0, 50.0, 47.5])

    def run(*arguments: Any) -> RealRun:
        throughput, ratio, latency_ratio = next(turns)
        return RealRun(
            throughput=throughput,
            latency_s=10 / throughput,
            throughput_ratio=ratio,
            latency_ratio=latency_ratio,
            raw_throughput_ratio=2 * ratio,
            raw_latency_ratio=2 * latency_ratio,
            speed=arguments[-2]() / arguments[-1],
        )

    monkeypatch.setattr("orca.bench.plan.simulate_runs.run_both", run)
    [error] = compare(
        Path("llama"),
        lambda: profiles.append(1),  # type: ignore[arg-type, return-value]
        schedules(1, 0),
        requests=20,
        rounds=3,
        folder=tmp_path,
        report=print,
        measure_speed=lambda: next(speeds),
    )
    assert len(profiles) == 3, "each round has a profile of its own"
    assert (error.throughput, error.latency_s) == (9.0, 10 / 9)
    assert (error.throughput_ratio, error.latency_ratio) == (1.02, 0.99)
    assert (error.raw_throughput_ratio, error.raw_latency_ratio) == (2.04, 1.98)
    assert error.spread == pytest.approx(2.5 / 9)
    assert error.drift == pytest.approx(0.05), "20 %, nothing and 5 % slower than beside the profile"


def test_errors_by_model_and_strategy() -> None:
    one, two = schedules(2, 0)
    errors = [
        PredictionError(
            schedule=schedule,
            model="llama",
            throughput=4.0,
            latency_s=2.0,
            spread=0.03,
            throughput_ratio=throughput,
            latency_ratio=latency,
            raw_throughput_ratio=1.5,
            raw_latency_ratio=0.5,
            drift=0.2,
        )
        for schedule, throughput, latency in ((one, 1.08, 0.95), (one, 0.88, 1.0), (two, 1.0, 1.0))
    ]
    table = lines(errors)
    assert len(table) == 3
    assert table[1].split()[-3:] == ["50.0%", "3.0%", "20.0%"]
    values = {(each.what, each.settings["policy"], each.settings.get("speed")): each.value for each in figures(errors)}
    assert values["Error of simulated throughput, median", "iteration", "of the run"] == pytest.approx(10.0)
    assert values["Error of simulated throughput, median", "iteration", "of the profile"] == pytest.approx(50.0)
    assert values["Simulated p99 latency within 10 %", "rra", "of the run"] == pytest.approx(100.0)
    assert values["Spread of real throughput, median", "iteration", None] == pytest.approx(3.0)
    assert values["Drift of the machine's speed, median", "iteration", None] == pytest.approx(20.0)


def test_a_slower_machine_takes_longer_for_each_step() -> None:
    step = Step(epoch=Epoch(1, "test"), number=1, rows=(Row(handle=1, start=0, count=3, sample=True),))
    assert SlowedCost(LinearCost(step_us=1_000), 0.8).stage_us(step) == 1_250
    assert SlowedCost(LinearCost(step_us=1_000), 1.0).stage_us(step) == 1_000


def test_a_run_gets_as_many_requests_as_its_steady_state_needs() -> None:
    asked: list[int] = []

    def run(requests: int) -> str:
        asked.append(requests)
        if requests < 40:
            raise NoSteadyState("run more requests")
        return "steady"

    assert until_steady(run, 20) == (47, "steady")
    assert asked == [20, 31, 47]
    with pytest.raises(NoSteadyState, match="run more"):
        until_steady(lambda requests: run(requests % 2), 1)
    assert until_steady(run, 50) == (50, "steady")
