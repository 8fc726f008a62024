"""Runs the same requests under every order of claims, at loads that are multiples of a measured capacity."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from orca.bench.deadlines.choices import OrderChoice
from orca.bench.deadlines.engines import OrderedRuns
from orca.bench.deadlines.score import DeadlineScore, capacity_per_s, score
from orca.bench.deadlines.workload import (
    DeadlineMix,
    OwnTime,
    deadline_trace,
    own_time,
    saturated_trace,
    solo_traces,
)
from orca.planner.workload.trace import Trace
from orca.pool.order.order_rules import Order

SOLO_REPEATS = 3

Report = Callable[[str], None]
"""Takes a line of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The runs of a comparison: every order at every load, once per seed."""

    mix: DeadlineMix
    choices: Sequence[OrderChoice]
    loads: Sequence[float]  # multiples of the capacity
    requests: int  # that arrive at load 1; at other loads, as many as arrive in the same time
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Capacity and own times of an engine, measured under order arrival in the round of a seed."""

    seed: int
    capacity_per_s: float
    own: OwnTime


@dataclass(frozen=True, slots=True)
class OrderScore:
    """The figures of one order at one load in the round of one seed."""

    choice: OrderChoice
    load: float
    seed: int
    score: DeadlineScore


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of one engine."""

    surveyed: Sequence[Surveyed]
    scores: Sequence[OrderScore]

    def of(self, choice: OrderChoice, load: float) -> list[DeadlineScore]:
        """Return the figures of an order at a load, by rising seeds."""
        return [each.score for each in self.scores if (each.choice, each.load) == (choice, load)]


def compare(runs: OrderedRuns, plan: ComparisonPlan, report: Report, *, jobs: int = 1) -> Comparison:
    """Make all runs.

    Args: jobs: processes that simulate; 1 runs everything in this process, as a real engine needs it.
    Raises: OrcaError if a run fails or is too short.
    """
    surveyed, scores = [], []
    for seed in plan.seeds:
        found = survey(runs, plan.mix, requests=plan.requests, seed=seed)
        surveyed.append(found)
        report(f"seed {seed}: {found.capacity_per_s:.3g} requests/s, {1000 * found.own.step_s:.3g} ms per token alone")
        if jobs == 1:
            for choice in plan.choices:
                scores += measure(runs, plan, found, choice, plan.loads)
                report(f"seed {seed}, {choice.name}: {len(plan.loads)} loads done")
    if jobs > 1:
        scores = _in_processes(runs, plan, surveyed, report, jobs)
    return Comparison(surveyed, scores)


def survey(runs: OrderedRuns, mix: DeadlineMix, *, requests: int, seed: int) -> Surveyed:
    """Measure capacity and own times under order arrival. Raises: OrcaError."""
    short, long = solo_traces(mix)
    saturated = saturated_trace(mix, requests=requests, seed=seed)
    traces = [*(short, long) * SOLO_REPEATS, saturated]
    *solo, whole = runs.run(OrderChoice(order=Order.ARRIVAL), traces)
    own = own_time([each for [each] in solo[::2]], [each for [each] in solo[1::2]])
    return Surveyed(seed, capacity_per_s(whole), own)


def trace_at(plan: ComparisonPlan, found: Surveyed, load: float) -> Trace:
    """Return the requests of the round of a seed at a load."""
    return deadline_trace(
        plan.mix,
        found.own,
        requests=max(1, round(plan.requests * load)),
        rate=load * found.capacity_per_s,
        seed=found.seed,
    )


def measure(
    runs: OrderedRuns, plan: ComparisonPlan, found: Surveyed, choice: OrderChoice, loads: Iterable[float]
) -> list[OrderScore]:
    """Run one order at some loads in the round of a seed. Raises: OrcaError."""
    chosen = list(loads)
    traces = [trace_at(plan, found, load) for load in chosen]
    outcomes = runs.run(choice, traces)
    return [
        OrderScore(choice, load, found.seed, score(trace, each))
        for load, trace, each in zip(chosen, traces, outcomes, strict=True)
    ]


def _in_processes(
    runs: OrderedRuns, plan: ComparisonPlan, surveyed: Sequence[Surveyed], report: Report, jobs: int
) -> list[OrderScore]:
    # A fresh process each: a fork would copy the threads of this one as they stand.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
        futures = [
            processes.submit(measure, runs, plan, found, choice, [load])
            for found in surveyed
            for choice in plan.choices
            for load in plan.loads
        ]
        scores = []
        for number, future in enumerate(futures, start=1):
            scores += future.result()
            report(f"{number} of {len(futures)} runs done")
        return scores
