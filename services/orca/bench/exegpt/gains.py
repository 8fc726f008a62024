"""Figures 6 and 8: the throughput of round-robin allocation under four latency bounds, beside FasterTransformer.

`iteration` with chunks, Orca's default strategy, stands beside both. It did not exist in the paper.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType

from orca.bench.exegpt.faster_transformer import HABITS, FasterTransformer
from orca.bench.exegpt.rows import PaperRow, within
from orca.bench.exegpt.schedules import SYSTEMS, Schedules
from orca.bench.exegpt.setups import PERCENT, PaperFigure, Setup, workload_of
from orca.bench.figures.figure import Setting
from orca.planner.search.goal import PlanGoal
from orca.planner.search.judge import SimulationJudge
from orca.planner.search.planner import Candidate
from orca.planner.workload.workload import Workload
from orca.scheduler.policy.request_level import Habits

BASELINE = "FT"
BOUNDS = ("10 %", "30 %", "70 %", "none")
"""Names of the four bounds."""

PAPER_MEAN, PAPER_MEAN_UNBOUNDED = {"8": 3.2}, {"8": 2.2}
"""Mean gains of RRA over FT (section 7.4). For Figure 6 the paper names the faster of RRA and WAA only."""

GOAL_SHARE = 0.3
LARGEST = ("GPT-3 175B", "G", "10 %")
"""Model, task and bound of the largest gain (section 7.4)."""

TRIES: Mapping[str, Callable[[Setup, Workload], FasterTransformer]] = MappingProxyType(
    {
        "maximum length": FasterTransformer,
        "p99 length": lambda setup, workload: FasterTransformer(setup, workload, has_percentile_bounds=True),
        "maximum length, all habits": lambda setup, workload: FasterTransformer(setup, workload, habits=Habits()),
    }
)
"""Readings of the paper's baseline: the length whose latencies the bounds are selected from, and its habits.

The paper selects bounds by the length of the 99th percentile, and has FT meet them with the maximum length. By our
costs FT then cannot meet some of the tightest bounds at all. So the first reading uses one length for both.
"""

ANSWERS = 300
"""Answers of the steady state that a simulated check is taken over."""


@dataclass(slots=True)
class BoundResult:
    """The schedules of all systems under one bound. None: nothing meets it."""

    setup: Setup
    task: str
    bound: str
    bound_s: float
    throughput: dict[str, float | None] = field(default_factory=dict)  # by system
    chosen: dict[str, Candidate] = field(default_factory=dict)  # the schedules of our systems

    @property
    def settings(self) -> dict[str, Setting]:
        return {"model": str(self.setup), "task": self.task, "bound": self.bound}

    def gain(self, system: str) -> float | None:
        """Return the throughput of a system over that of the baseline."""
        ours, theirs = self.throughput.get(system), self.throughput.get(BASELINE)
        return None if ours is None or theirs is None else ours / theirs


def gain_rows(
    number: str, figure: PaperFigure, report: Callable[[str], None], *, is_simulated: bool = True
) -> list[PaperRow]:
    """Return all throughputs, the mean gains, and simulated checks of one bound of every model and task.

    Args: is_simulated: check a sample of the schedules with the real scheduler on simulated stages.
    """
    report(f"{BASELINE} is request_level, habits: {', '.join(HABITS.in_force())}")
    rows: list[PaperRow] = []
    results: dict[str, list[BoundResult]] = {name: [] for name in TRIES}
    checks: list[PaperRow] = []
    settings = [(setup, task) for setup in figure.setups for task in figure.tasks]
    for place, (setup, task) in enumerate(settings):
        schedules = Schedules(setup, workload_of(task))
        for name, baseline_of in TRIES.items():
            report(f"{setup}, {task}; bounds of the {name}")
            baseline = baseline_of(setup, workload_of(task))
            found = list(_results(baseline, task, schedules, report))
            results[name] += found
            if is_simulated:
                checks += _checks(number, name, baseline, found[place % len(found)], report)
    first = next(iter(TRIES))
    for result in results[first]:
        rows += _throughput_rows(number, result)
    for name, each in results.items():
        rows += summary_rows(number, name, each, has_goals=name == first)
    return [*rows, *checks]


def _results(
    baseline: FasterTransformer, task: str, schedules: Schedules, report: Callable[[str], None]
) -> Iterator[BoundResult]:
    for bound, bound_s in zip(BOUNDS, baseline.bounds(), strict=True):
        result = BoundResult(baseline.setup, task, bound, bound_s)
        best = baseline.best(bound_s)
        result.throughput[BASELINE] = None if best is None else best.throughput
        for system in SYSTEMS:
            candidate = schedules.best(system, bound_s)
            result.throughput[system] = None if candidate is None else candidate.expected.throughput
            if candidate is not None:
                result.chosen[system] = candidate
        yield result
        report(f"  {bound} ({bound_s:.3g} s): {_words(result)}")


def _words(result: BoundResult) -> str:
    words = []
    for system, value in result.throughput.items():
        chosen = result.chosen.get(system)
        text = "not schedulable" if value is None else f"{value:.3g}/s"
        words.append(f"{system} {text}" + (f" ({chosen.describe()})" if chosen else ""))
    return "; ".join(words)


def _throughput_rows(number: str, result: BoundResult) -> list[PaperRow]:
    settings: dict[str, Setting] = {"figure": number, **result.settings}
    rows = []
    if result.bound != BOUNDS[-1]:
        rows.append(PaperRow(what="Latency bound", unit="s", settings=settings, ours=result.bound_s))
    for system, value in result.throughput.items():
        if value is not None:
            rows.append(
                PaperRow(what="Throughput", unit="requests/s", settings={**settings, "system": system}, ours=value)
            )
    return rows


def summary_rows(
    number: str, bounds_of: str, results: Sequence[BoundResult], *, has_goals: bool = True
) -> list[PaperRow]:
    """Return mean, lowest and highest gains of each system, and for Figure 8 the place of the largest one.

    Args: bounds_of: one of TRIES.
    """
    rows: list[PaperRow] = []
    for system in SYSTEMS:
        settings: dict[str, Setting] = {"figure": number, "bounds_of": bounds_of, "system": system}
        gains = [gain for result in results if (gain := result.gain(system)) is not None]
        unbounded = [gain for result in results if result.bound == BOUNDS[-1] and (gain := result.gain(system))]
        is_rra = system == "RRA"
        mean = PAPER_MEAN.get(number) if is_rra else None
        for what, value, paper in (
            ("Mean gain over FT", fmean(gains), mean),
            (
                "Mean gain over FT without a bound",
                fmean(unbounded),
                PAPER_MEAN_UNBOUNDED.get(number) if is_rra else None,
            ),
            ("Least gain over FT", min(gains), 1.1 if mean else None),
            ("Largest gain over FT", max(gains), 15.2 if mean else None),
        ):
            goal = (
                within(paper, GOAL_SHARE) if has_goals and paper is not None and what == "Mean gain over FT" else None
            )
            rows.append(PaperRow(what=what, unit="x", settings=settings, ours=value, paper=paper, goal=goal))
        for what, name in (("Bounds that no schedule meets", system), ("Bounds that FT does not meet", BASELINE)):
            missing = sum(result.throughput.get(name) is None for result in results)
            rows.append(PaperRow(what=what, unit="bounds", settings=settings, ours=missing))
    if number == "8":
        rows.append(_rank_row(bounds_of, results, has_goal=has_goals))
    return rows


def _rank_row(bounds_of: str, results: Sequence[BoundResult], *, has_goal: bool) -> PaperRow:
    """Return the rank of the gain that is the paper's largest. The paper does not name the cluster of its 175B."""
    ranked = sorted(results, key=lambda result: -(result.gain("RRA") or 0.0))
    model, task, bound = LARGEST
    rank = 1 + next(
        place
        for place, result in enumerate(ranked)
        if (result.setup.model_name, result.task, result.bound) == (model, task, bound)
    )
    return PaperRow(
        what="Rank of the gain at 175B, G, tightest bound",
        unit="of all",
        settings={"figure": "8", "bounds_of": bounds_of, "system": "RRA"},
        ours=rank,
        paper=1,
        goal=(1, 1) if has_goal else None,
    )


def _checks(
    number: str, bounds_of: str, baseline: FasterTransformer, result: BoundResult, report: Callable[[str], None]
) -> list[PaperRow]:
    """Return how far the real scheduler on simulated stages is from the formulas, in per cent.

    The baseline is checked in each reading that has habits of its own, our systems in the first reading.
    """
    rows: list[PaperRow] = []
    if baseline.has_percentile_bounds:
        return rows
    settings: dict[str, Setting] = {"figure": number, "bounds_of": bounds_of, **result.settings}
    best = baseline.best(result.bound_s)
    if best is not None and not baseline.setup.is_encoder_decoder:
        simulated = baseline.simulated(best.batch)
        rows.append(_check_row("throughput", {**settings, "system": BASELINE}, simulated / best.throughput))
    if baseline.habits != HABITS:
        return rows
    judge = SimulationJudge(goal=PlanGoal(latency_ms=1000 * result.bound_s, percentile=PERCENT), answers=ANSWERS)
    for system in ("RRA", "iteration"):
        candidate = result.chosen.get(system)
        if candidate is None:
            continue
        figures = judge(candidate)
        if figures is None:
            continue
        expected, own = candidate.expected, {**settings, "system": system}
        rows.append(_check_row("throughput", own, figures.throughput / expected.throughput))
        rows.append(_check_row("latency", own, figures.latency_s / expected.latency_s))
        report(
            f"{system} simulated: {figures.throughput:.3g}/s and {figures.latency_s:.3g} s, "
            f"by formulas {expected.throughput:.3g}/s and {expected.latency_s:.3g} s"
        )
    return rows


def _check_row(what: str, settings: dict[str, Setting], ratio: float) -> PaperRow:
    what = f"Simulated {what} against the formulas"
    return PaperRow(what=what, unit="%", settings=settings, ours=100 * (ratio - 1))
