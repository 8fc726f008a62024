"""The planner's search against exhaustive search: on random functions, and in the scenarios of the ExeGPT paper."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orca.bench.exegpt.faster_transformer import FasterTransformer
from orca.bench.exegpt.gains import BOUNDS
from orca.bench.exegpt.schedules import Schedules, ThinnedSpace
from orca.bench.exegpt.setups import FIGURES, Setup, workload_of
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.plan.random_functions import SPACES, a_bound, exhaustive, random_costs
from orca.planner.search.branch_and_bound import Tolerance
from orca.planner.search.planner import TOLERANCE
from orca.planner.search.soundings import sounded_search
from orca.planner.search.strategies import STRATEGIES

FUNCTIONS = 1000
NOISES = (0.0, 0.02)
"""Largest shares by which the values of random functions are off; above 0 the functions are not monotone."""

GRID = 24
"""Most values of a variable on the thinned grid of exhaustive search."""

GOAL_SHARE, GOAL_S, GOAL_DEVICES = 0.05, 60.0, 16
SYSTEM = "RRA"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionResult:
    """The search on one random function."""

    noise: float
    shortfall: float  # share of the best throughput that is missing; 1 if nothing was found although a point meets
    tolerance: float  # shortfall that is allowed: neighbours may be off in opposite directions
    breaks_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """The search in one scenario of the paper, over all layouts."""

    setup: Setup
    task: str
    bound: str
    evaluated: int
    points: int
    seconds: float  # of processor time
    found: float  # requests per second
    exhaustive: float  # the most on the thinned grid; -inf if no point of it meets the bound

    @property
    def share(self) -> float:
        return self.evaluated / self.points

    @property
    def shortfall(self) -> float:
        """Return the share of the grid's best throughput that is missing; below 0 if the search has found more."""
        if self.exhaustive == -math.inf:
            return 0.0
        return 1 - self.found / self.exhaustive


def check_functions(count: int = FUNCTIONS) -> list[FunctionResult]:
    """Search so many random functions, the same number in each space and with each noise."""
    kinds = [(space, noise) for space in SPACES for noise in NOISES]
    results = []
    for number in range(count):
        space, noise = kinds[number % len(kinds)]
        seed = number // len(kinds)
        perform = random_costs(seed, space, noise=noise)
        bound = a_bound(seed, space, perform)
        tolerance = 2 * noise / (1 - noise)
        allowed = Tolerance(throughput=tolerance, latency=tolerance)
        found = sounded_search(space, perform, latency_bound=bound, tolerance=allowed)
        best = exhaustive(space, perform, bound)
        missing = 0.0 if best == -math.inf else 1.0
        breaks = False
        if found.best is not None:
            figures = perform(found.best)
            missing, breaks = 1 - figures.throughput / best, figures.latency > bound
        results.append(FunctionResult(noise=noise, shortfall=missing, tolerance=tolerance, breaks_bound=breaks))
    return results


def scenarios() -> list[tuple[Setup, str]]:
    """Return models and tasks of Figures 6 and 8; what is in both comes once."""
    pairs = [(setup, task) for figure in FIGURES.values() for setup in figure.setups for task in figure.tasks]
    return list(dict.fromkeys(pairs))


def check_scenarios(chosen: Sequence[tuple[Setup, str]]) -> Iterator[ScenarioResult]:
    """Search each scenario under one of the four bounds, in turn, on the full grid of (B_E, N_D)."""
    for number, (setup, task) in enumerate(chosen):
        place = number % len(BOUNDS)
        bound_s = FasterTransformer(setup, workload_of(task)).bounds()[place]
        yield check_scenario(setup, task, BOUNDS[place], bound_s)


def check_scenario(setup: Setup, task: str, bound: str, bound_s: float, *, grid: int = GRID) -> ScenarioResult:
    """Search one scenario, and compare with every point of a thinned grid."""
    schedules = Schedules(setup, workload_of(task), values=None)
    start_s = time.process_time()
    best = schedules.best(SYSTEM, bound_s)
    seconds = time.process_time() - start_s
    evaluated, points, most = schedules.evaluated, 0, -math.inf
    for number in range(len(schedules.layouts)):
        perform = schedules.perform(SYSTEM, number)
        for space in schedules.spaces(STRATEGIES["rra"], number):
            points += space.points
            batches, steps = ThinnedSpace.of(space, grid).values
            figures = [perform((batch, step)) for batch in batches for step in steps]
            # A point that does not fit has no finite latency.
            meeting = [each.throughput for each in figures if each.latency <= bound_s and each.latency < math.inf]
            most = max([most, *meeting])
    return ScenarioResult(
        setup=setup,
        task=task,
        bound=bound,
        evaluated=evaluated,
        points=points,
        seconds=seconds,
        found=0.0 if best is None else best.expected.throughput,
        exhaustive=most,
    )


def function_lines(results: Sequence[FunctionResult]) -> list[str]:
    """Return what the random functions show."""
    lines = []
    for noise in NOISES:
        own = [each for each in results if each.noise == noise]
        worst = max(each.shortfall for each in own)
        good = sum(each.shortfall <= each.tolerance + 1e-12 and not each.breaks_bound for each in own)
        lines.append(
            f"{len(own)} random functions, values off by up to {noise:.0%}: {good} within the tolerance of "
            f"{own[0].tolerance:.1%}, largest shortfall {worst:.2%}"
        )
    return lines


def scenario_lines(results: Sequence[ScenarioResult]) -> list[str]:
    """Return a table of the scenarios, and the goals."""
    head = f"{'model':<24}{'task':<5}{'bound':<7}{'points':>10}{'evaluated':>10}{'share':>8}{'CPU s':>8}"
    lines = [f"{head}{'found':>8}{'grid':>8}{'short':>8}"]
    lines += [
        f"{each.setup!s:<24}{each.task:<5}{each.bound:<7}{each.points:>10,}{each.evaluated:>10,}{each.share:>8.2%}"
        f"{each.seconds:>8.1f}{each.found:>8.3g}{each.exhaustive:>8.3g}{each.shortfall:>8.2%}"
        for each in results
    ]
    within = sum(each.shortfall <= TOLERANCE.throughput for each in results)
    few = sum(each.share <= GOAL_SHARE for each in results)
    small = [each for each in results if each.setup.devices <= GOAL_DEVICES]
    quick = sum(each.seconds <= GOAL_S for each in small)
    lines.append(f"within the tolerance of {TOLERANCE.throughput:.0%}: {within} of {len(results)}")
    lines.append(f"at most {GOAL_SHARE:.0%} of the points evaluated: {few} of {len(results)}")
    lines.append(f"at most {GOAL_S:.0f} s of one core, up to {GOAL_DEVICES} devices: {quick} of {len(small)}")
    return lines


def to_json(functions: Sequence[FunctionResult], found: Sequence[ScenarioResult]) -> dict[str, Any]:
    """Return all results as plain data."""
    return {
        "functions": [{"noise": each.noise, "shortfall": each.shortfall} for each in functions],
        "scenarios": [
            {
                "model": str(each.setup),
                "task": each.task,
                "bound": each.bound,
                "evaluated": each.evaluated,
                "points": each.points,
                "seconds": each.seconds,
                "found": each.found,
                "exhaustive": None if each.exhaustive == -math.inf else each.exhaustive,
            }
            for each in found
        ],
    }


def figures(functions: Sequence[FunctionResult], found: Sequence[ScenarioResult]) -> list[Measured]:
    """Return the figures of the page."""
    rows = []
    for noise in NOISES:
        own = [each for each in functions if each.noise == noise]
        if own:
            settings: dict[str, Setting] = {"off_by": f"{noise:.0%}", "functions": len(own)}
            worst = max(max(each.shortfall for each in own), 0.0)
            rows.append(measured("Largest shortfall on random functions", worst, "%", settings, scale=100, runs=1))
    for each in found:
        scenario: dict[str, Setting] = {"model": str(each.setup), "task": each.task, "bound": each.bound}
        rows.append(measured("Points evaluated", each.share, "%", scenario, scale=100, runs=1))
        rows.append(measured("Shortfall of the search", each.shortfall, "%", scenario, scale=100, runs=1))
        rows.append(measured("Processor time of the search", each.seconds, "s", scenario, runs=1))
    return rows
