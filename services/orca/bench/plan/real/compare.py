"""Compares the plans of one model and task with what else was measured under the same bounds.

A survey runs every setting once: the baselines, and the grid. It decides the bounds, and which settings each plan is
compared with. These and the plans then take turns in some rounds with other requests. Ratios are formed in a round, so
a setting that was the best of the survey by luck has no advantage.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic

from orca.bench.exegpt.gains import BOUNDS
from orca.bench.plan.real.case import RealCase
from orca.bench.plan.real.kept import KeptRuns, RunKey
from orca.bench.plan.real.run import RealFigures, requests_of, run_setting
from orca.bench.plan.real.setting import RealSetting
from orca.bench.plan.real.survey import (
    baseline_batches,
    bounds_of,
    default_iteration,
    default_sizes,
    grid_settings,
    request_level,
)
from orca.planner.search.plan import PlannedFigures

PLAN, GRID, BASELINE, DEFAULT = "plan", "best of the grid", "request_level", "default iteration"
SYSTEMS = (PLAN, GRID, BASELINE, DEFAULT)

Run = Callable[[RealCase, RealSetting, int], RealFigures]
"""Measures a setting with the requests of a seed."""


@dataclass(slots=True)
class RealRuns:
    """Measures settings, or takes them from the kept runs."""

    kept: KeptRuns
    folder: Path
    answers: int  # of the steady state of a run
    report: Callable[[str], None]
    measured: int = 0
    seconds: float = 0.0  # of these runs together

    def __call__(self, case: RealCase, setting: RealSetting, seed: int) -> RealFigures:
        """Measure a setting. Raises: OrcaError as `run_setting` does."""
        requests = requests_of(setting, self.answers)
        key = RunKey(model=case.name, task=case.task, options=tuple(setting.words()), requests=requests, seed=seed)
        figures = self.kept.find(key)
        if figures is None:
            begin_s = monotonic()
            figures = run_setting(case, setting, requests=requests, seed=seed, folder=self.folder)
            self.kept.add(key, figures)
            self.measured += 1
            self.seconds += monotonic() - begin_s
        self.report(
            f"{case.name}, {case.task}, {setting.text}: {figures.throughput:.3g} requests/s, {figures.latency_s:.3g} s"
        )
        return figures


@dataclass(frozen=True, slots=True)
class StrategyBest:
    """The setting of a strategy with the most throughput of all that were measured and meet the bound."""

    setting: RealSetting
    figures: RealFigures  # medians of its rounds; the survey's if it was in none


@dataclass(slots=True)
class BoundRuns:
    """The measurements under one bound."""

    model: str
    task: str
    bound: str  # one of BOUNDS
    bound_s: float
    plan: str
    predicted: PlannedFigures
    is_promised: bool  # the plan meets the bound in simulation
    settings: dict[str, RealSetting]  # by system; those of which no setting meets the bound are missing
    runs: dict[str, list[RealFigures]] = field(default_factory=dict)  # by system, one of each round
    best: list[StrategyBest] = field(default_factory=list)  # of each strategy that meets the bound, the winner first

    def ratios(self, system: str) -> list[float]:
        """Return the throughput of the plan over that of another system, in each round."""
        others = self.runs.get(system, [])
        return [own.throughput / other.throughput for own, other in zip(self.runs[PLAN], others, strict=bool(others))]

    @property
    def met(self) -> list[bool]:
        """Return of each round whether the plan meets the bound."""
        return [run.latency_s <= self.bound_s for run in self.runs[PLAN]]

    @property
    def winner(self) -> str:
        return self.best[0].setting.strategy if self.best else "none"

    @property
    def reason(self) -> str:
        """Return why the winner has more throughput than the next strategy, by their figures."""
        if len(self.best) < 2:
            return "no other strategy meets the bound" if self.best else "no strategy meets the bound"
        own, other = self.best[0], self.best[1]
        ratio = own.figures.throughput / other.figures.throughput
        return (
            f"{ratio:.2f}x {other.setting.strategy}: a step has {own.figures.step_rows:.1f} requests in"
            f" {own.figures.step_ms:.0f} ms, not {other.figures.step_rows:.1f} in {other.figures.step_ms:.0f} ms, and a"
            f" stage is idle {own.figures.idle:.0%} of the time, not {other.figures.idle:.0%}"
        )


def compare_case(case: RealCase, run: Run, *, grid: int, rounds: int, report: Callable[[str], None]) -> list[BoundRuns]:
    """Measure one model and task. Args: grid: of `grid_settings`. Raises: OrcaError as `run` does."""
    survey: dict[RealSetting, RealFigures] = {}
    baseline = {batch: request_level(case, batch) for batch in baseline_batches(case)}
    defaults = [default_iteration(case, size) for size in default_sizes(case)]
    for setting in (*baseline.values(), *defaults, *grid_settings(case, grid)):
        if setting not in survey:
            survey[setting] = run(case, setting, 0)
    bounds = bounds_of({batch: survey[setting].latency_s for batch, setting in baseline.items()}, case.most)
    results = []
    for name, bound_s in zip(BOUNDS, bounds, strict=True):
        result = _planned(case, name, bound_s, report)
        for system, settings in ((GRID, list(survey)), (BASELINE, list(baseline.values())), (DEFAULT, defaults)):
            if (best := _best(settings, survey, bound_s)) is not None:
                result.settings[system] = best
        results.append(result)
    runs = _rounds(case, run, (setting for result in results for setting in result.settings.values()), rounds)
    known = survey | {setting: _median(figures) for setting, figures in runs.items()}
    for result in results:
        result.runs = {system: runs[setting] for system, setting in result.settings.items()}
        result.best = _of_strategies(known, result.bound_s)
    return results


def _planned(case: RealCase, bound: str, bound_s: float, report: Callable[[str], None]) -> BoundRuns:
    plan = case.plan(bound_s, lambda text: None)  # noqa: ARG005
    report(f"{case.name}, {case.task}, bound {bound} ({bound_s:.3g} s): {plan.describe()}")
    figures = plan.schedule.simulated
    assert figures is not None, "a plan has figures"
    return BoundRuns(
        model=case.name,
        task=case.task,
        bound=bound,
        bound_s=bound_s,
        plan=plan.schedule.describe(),
        predicted=figures,
        is_promised=plan.is_met,
        settings={PLAN: case.planned(plan)},
    )


def _best(
    settings: Iterable[RealSetting], figures: Mapping[RealSetting, RealFigures], bound_s: float
) -> RealSetting | None:
    """Return the setting with the most throughput within a bound; None if there is none."""
    meeting = [setting for setting in settings if figures[setting].latency_s <= bound_s]
    return max(meeting, key=lambda setting: figures[setting].throughput, default=None)


def _rounds(
    case: RealCase, run: Run, settings: Iterable[RealSetting], rounds: int
) -> dict[RealSetting, list[RealFigures]]:
    """Run all settings in turn, every other round in the opposite order."""
    found: dict[RealSetting, list[RealFigures]] = {setting: [] for setting in settings}
    for number in range(rounds):
        for setting in list(found)[:: 1 if number % 2 == 0 else -1]:
            found[setting].append(run(case, setting, number + 1))
    return found


def _median(runs: Sequence[RealFigures]) -> RealFigures:
    return RealFigures(
        requests=sum(run.requests for run in runs),
        throughput=median(run.throughput for run in runs),
        latency_s=median(run.latency_s for run in runs),
        step_ms=median(run.step_ms for run in runs),
        step_rows=median(run.step_rows for run in runs),
        idle=median(run.idle for run in runs),
    )


def _of_strategies(figures: Mapping[RealSetting, RealFigures], bound_s: float) -> list[StrategyBest]:
    found = []
    for strategy in dict.fromkeys(setting.strategy for setting in figures):
        own = [setting for setting in figures if setting.strategy == strategy]
        if (best := _best(own, figures, bound_s)) is not None:
            found.append(StrategyBest(best, figures[best]))
    return sorted(found, key=lambda each: -each.figures.throughput)
