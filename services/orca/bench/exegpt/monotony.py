"""Table 5: the share of the points at which a control variable is not monotone.

One variable rises while the other one keeps its value. A point is not monotone if its latency is below that of a point
before it by more than the tolerance, or its throughput. The tolerance is a share of the bound that 70 % of the
baseline's latencies meet, or of the throughput before it. Points that do not fit into memory do not count.
"""

from collections.abc import Callable, Iterator, Sequence

from orca.bench.exegpt.faster_transformer import FasterTransformer
from orca.bench.exegpt.rows import PaperRow
from orca.bench.exegpt.schedules import Schedules, ThinnedSpace
from orca.bench.exegpt.setups import GPT_39B, OPT_13B, T5_11B, Setup, workload_of
from orca.planner.search.branch_and_bound import Performance
from orca.planner.search.strategies import STRATEGIES

SETUPS, TASKS = (GPT_39B, OPT_13B, T5_11B), ("S", "T")
TOLERANCES = (0.02, 0.05, 0.1)
VARIABLES = ("B_E", "N_D")
GOAL_TOLERANCE, GOAL_PERCENT = 0.05, 5.0

OTHERS = 8
"""Most values of the variable that does not change."""

FORMULAS = {"orca": "RRA", "paper": "RRA, formulas of the paper"}
"""Names of schedules.SYSTEMS."""

PAPER = {
    ("S", 0.02): ((0.6, 2.3), (0.0, 0.0)),
    ("S", 0.05): ((0.6, 0.3), (0.0, 0.0)),
    ("S", 0.1): ((0.3, 0.0), (0.0, 0.0)),
    ("T", 0.02): ((0.2, 0.1), (0.0, 0.0)),
    ("T", 0.05): ((0.2, 0.0), (0.0, 0.0)),
    ("T", 0.1): ((0.2, 0.0), (0.0, 0.0)),
}
"""Shares of B_E and of N_D in per cent, each for latency and throughput; the model is GPT-3 39B."""

Line = Sequence[Performance]
"""Points along which one variable rises."""


def table5_rows(report: Callable[[str], None]) -> list[PaperRow]:
    """Return the shares of all models, tasks, tolerances and variables."""
    return [
        row
        for setup in SETUPS
        for task in TASKS
        for formula in FORMULAS
        for row in _setting_rows(setup, task, formula, report)
    ]


def _setting_rows(setup: Setup, task: str, formula: str, report: Callable[[str], None]) -> Iterator[PaperRow]:
    bound_s = FasterTransformer(setup, workload_of(task)).bounds()[2]
    lines = grid_lines(setup, task, formula)
    report(f"{setup}, {task}, formulas of {formula}: {sum(len(line) for both in lines for line in both):,} points")
    for tolerance in TOLERANCES:
        for number, variable in enumerate(VARIABLES):
            found = not_monotone(lines[number], latency=tolerance * bound_s, throughput=tolerance)
            for place, quantity in enumerate(("latency", "throughput")):
                paper = PAPER[task, tolerance][number][place] if setup == GPT_39B else None
                yield PaperRow(
                    what="Points that are not monotone",
                    unit="%",
                    settings={
                        "model": str(setup),
                        "task": task,
                        "formula": formula,
                        "tolerance": f"{tolerance:.0%}",
                        "variable": variable,
                        "quantity": quantity,
                    },
                    ours=found[place],
                    paper=paper,
                    goal=(0.0, GOAL_PERCENT) if tolerance == GOAL_TOLERANCE else None,
                )


def grid_lines(setup: Setup, task: str, formula: str, others: int = OTHERS) -> tuple[list[Line], list[Line]]:
    """Return the lines along which B_E rises by one, and those along which N_D falls by one.

    The layout is that of the baseline. Args: others: most values of the variable that does not change.
    """
    schedules = Schedules(setup, workload_of(task), degrees=[setup.largest_degree])
    perform = schedules.perform(FORMULAS[formula], 0)
    [space] = schedules.spaces(STRATEGIES["rra"], 0)
    (low, fewest), (high, most) = space.lower, space.upper
    batches, steps = ThinnedSpace.of(space, others).values
    rising = [[perform((batch, step)) for batch in range(low, high + 1)] for step in steps]
    falling = [[perform((batch, step)) for step in range(fewest, most + 1)] for batch in batches]
    return [_fitting(line) for line in rising], [_fitting(line) for line in falling]


def _fitting(line: Line) -> Line:
    return [point for point in line if point.latency != float("inf")]


def not_monotone(lines: Sequence[Line], *, latency: float, throughput: float) -> tuple[float, float]:
    """Return the per cent of the points whose latency is not monotone, and whose throughput.

    Args: latency: tolerance in seconds; throughput: as a share.
    """
    late = slow = count = 0
    for line in lines:
        most_s = most = 0.0
        for point in line:
            late += point.latency < most_s - latency
            slow += point.throughput < most * (1 - throughput)
            most_s, most = max(most_s, point.latency), max(most, point.throughput)
        count += len(line)
    return 100 * late / max(count, 1), 100 * slow / max(count, 1)
