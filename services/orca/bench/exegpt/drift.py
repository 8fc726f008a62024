"""Figure 11 for round-robin allocation: output lengths that differ from the planned ones.

OPT 13B on four A40, task T, the bound that 30 % of the baseline's latencies meet. The schedule that was planned for
Table 3 runs on changed lengths, beside the schedule that is planned for them. Both are simulated exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from orca.bench.exegpt.faster_transformer import FasterTransformer
from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.schedules import Schedules
from orca.bench.exegpt.setups import OPT_13B, PERCENT, workload_of
from orca.bench.figures.figure import Setting
from orca.planner.search.judge import simulation_of
from orca.planner.search.planner import Candidate
from orca.planner.simulate.exact import ExactFigures, measure_exact
from orca.planner.workload.tasks import TASKS, Moments, task_lengths
from orca.planner.workload.trace import TraceSpec, generate
from orca.planner.workload.workload import Marginal, Workload

TASK = "T"
FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
QUANTITIES = ("mean", "standard deviation")

PAPER = {"mean": (28.0, 12.6), "standard deviation": (11.0, 17.0)}
"""Largest differences of throughput and of latency under RRA in per cent (section 7.6)."""

GOAL_POINTS = 5.0
REQUESTS = 2_400


@dataclass(frozen=True, slots=True)
class Change:
    """A changed statistic of the output lengths, and the figures of both schedules."""

    quantity: str
    factor: float
    kept: ExactFigures  # of the schedule that was planned for the task
    planned: ExactFigures  # of the schedule that is planned for these lengths

    @property
    def throughput_percent(self) -> float:
        return 100 * abs(self.kept.throughput / self.planned.throughput - 1)

    @property
    def latency_percent(self) -> float:
        return 100 * abs(self.kept.sequence_s / self.planned.sequence_s - 1)


def changed_workload(quantity: str, factor: float) -> Workload:
    """Return the task with one changed moment of its outputs."""
    row = TASKS[TASK]
    moments = row.outputs
    if quantity == "mean":
        moments = Moments(moments.mean * factor, moments.deviation, moments.high)
    else:
        moments = Moments(moments.mean, moments.deviation * factor, moments.high)
    prompts, _ = task_lengths(TASK)
    outputs = lengths_with(moments)
    return Workload.of_lengths(prompts, outputs, source=f"task {TASK}, {quantity} x {factor:g}")


def lengths_with(moments: Moments) -> Marginal:
    """Return the truncated normal lengths with these moments, also if the mean of the parent is outside the range.

    Shares are proportional to exp(a x + b x^2). Newton's method finds the a and b of the wanted mean and square. The
    lengths are scaled to 0 to 1. Raises: ValueError if it finds none.
    """
    lengths = range(1, moments.high + 1)
    wanted = moments.mean / moments.high, (moments.mean**2 + moments.deviation**2) / moments.high**2
    linear = square = 0.0
    for _ in range(200):
        weights = [exp(linear * x / moments.high + square * (x / moments.high) ** 2) for x in lengths]
        total = sum(weights)
        powers = [
            sum(weight * (x / moments.high) ** power for weight, x in zip(weights, lengths, strict=True)) / total
            for power in range(5)
        ]
        missing = wanted[0] - powers[1], wanted[1] - powers[2]
        if max(map(abs, missing)) < 1e-7:
            return Marginal.of(dict(zip(lengths, weights, strict=True)), f"lengths of {moments}")
        of_mean, of_both, of_square = (
            powers[2] - powers[1] ** 2,
            powers[3] - powers[1] * powers[2],
            powers[4] - powers[2] ** 2,
        )
        determinant = of_mean * of_square - of_both**2
        steps = (
            (missing[0] * of_square - missing[1] * of_both) / determinant,
            (missing[1] * of_mean - missing[0] * of_both) / determinant,
        )
        damping = min(1.0, 5 / max(map(abs, steps)))
        linear, square = linear + damping * steps[0], square + damping * steps[1]
    raise ValueError(f"no lengths from 1 to {moments.high} have these moments: {moments}")


def figure11_rows(report: Callable[[str], None], requests: int = REQUESTS) -> list[PaperRow]:
    """Return the figures of both schedules for each change, and the largest differences."""
    bound_s = FasterTransformer(OPT_13B, workload_of(TASK)).bounds()[1]
    planned = _plan(workload_of(TASK), bound_s)
    report(f"bound {bound_s:.3g} s: {planned.describe()}")
    rows: list[PaperRow] = []
    for quantity in QUANTITIES:
        changes = []
        for factor in FACTORS:
            changes.append(_change(quantity, factor, planned, bound_s, requests, report))
            rows += _change_rows(changes[-1])
        for what, paper, values in (
            ("Largest difference of throughput", PAPER[quantity][0], [each.throughput_percent for each in changes]),
            ("Largest difference of latency", PAPER[quantity][1], [each.latency_percent for each in changes]),
        ):
            rows.append(
                PaperRow(
                    what=what,
                    unit="%",
                    settings={"changed": quantity},
                    ours=max(values),
                    paper=paper,
                    goal=(0.0, paper + GOAL_POINTS) if quantity == "mean" else None,
                )
            )
    return rows


def _change(
    quantity: str, factor: float, planned: Candidate, bound_s: float, requests: int, report: Callable[[str], None]
) -> Change:
    workload = changed_workload(quantity, factor)
    again = _plan(workload, bound_s)
    change = Change(quantity, factor, _measure(planned, workload, requests), _measure(again, workload, requests))
    report(
        f"{quantity} x {factor:g}: kept {change.kept.throughput:.3g}/s, {change.kept.sequence_s:.3g} s; "
        f"{again.describe()}: {change.planned.throughput:.3g}/s, {change.planned.sequence_s:.3g} s"
    )
    return change


def _plan(workload: Workload, bound_s: float) -> Candidate:
    found = Schedules(OPT_13B, workload).best("RRA", bound_s)
    assert found is not None, "the bound of the baseline can be met"
    return found


def _measure(candidate: Candidate, workload: Workload, requests: int) -> ExactFigures:
    """Run the controls of a schedule on other lengths than those that it was planned for."""
    bounds = candidate.bounds
    trace = generate(TraceSpec.of_workload(workload, requests=requests))
    simulation = simulation_of(candidate, bounds)
    return measure_exact(simulation, "rra", bounds.max_batch_size, trace, percent=PERCENT)


def _change_rows(change: Change) -> list[PaperRow]:
    rows = []
    for schedule, figures in (("planned before", change.kept), ("planned again", change.planned)):
        settings: dict[str, Setting] = {"changed": change.quantity, "factor": change.factor, "schedule": schedule}
        rows.append(
            PaperRow(
                what="Throughput with changed lengths", unit="requests/s", settings=settings, ours=figures.throughput
            )
        )
        rows.append(
            PaperRow(what="p99 latency with changed lengths", unit="s", settings=settings, ours=figures.sequence_s)
        )
    return rows
