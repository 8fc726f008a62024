"""Finds the fewest devices with which a goal could be met, for a user whose bound is out of reach.

Without an arrival rate, the smallest point of each space has the least latency, so it alone decides. At a rate it
would not serve all requests, so each space is searched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from orca.planner.search.branch_and_bound import Performance, Point, SearchBlock
from orca.planner.search.grid import grid_search
from orca.planner.search.planner import Candidate, Judge, PlacedLayout, PlanProblem, performance_of, spaces_of
from orca.planner.search.strategies import Strategy
from orca.planner.simulate.estimate import Estimate, Scenario

DEVICES_MAX = 32
"""Most devices that are tried."""

DOUBT = 1.1
"""Formulas may be this factor too high about a pressure, so the simulation judges what they put up to it."""


def fewest_devices(
    problem: PlanProblem, layouts_on: Callable[[int], Sequence[PlacedLayout]], judge: Judge, *, above: int
) -> int | None:
    """Return the fewest devices above a number that meet the goal in simulation; None if up to DEVICES_MAX do not.

    Args: layouts_on: returns the layouts that use exactly so many devices.
    """
    for devices in range(above + 1, DEVICES_MAX + 1):
        wider = replace(problem, layouts=layouts_on(devices))
        for candidate in _promising(wider):
            figures = judge(candidate)
            if figures is not None and problem.goal.is_met(figures):
                return devices
    return None


def _promising(problem: PlanProblem) -> Iterator[Candidate]:
    """Yield schedules that may meet the goal: of each strategy and layout the one with the least pressure."""
    for placed in problem.layouts:
        scenario = problem.scenario(placed)
        for strategy in problem.strategies:
            best = min(
                (_calmest(problem, strategy, scenario, placed, space) for space in spaces_of(strategy, scenario)),
                key=lambda found: found[0],
                default=None,
            )
            if best is not None and best[0] <= DOUBT:
                yield best[1]


def _calmest(
    problem: PlanProblem, strategy: Strategy, scenario: Scenario, placed: PlacedLayout, space: SearchBlock
) -> tuple[float, Candidate]:
    """Return the schedule of a space with the least pressure, and this pressure."""
    goal, estimates = problem.goal, dict[Point, Estimate]()

    def perform(point: Point) -> Performance:
        estimates[point] = strategy.estimate(scenario, point, goal.rate)
        return performance_of(goal, estimates[point])

    if goal.rate is None:
        perform(space.lower)
    else:
        grid_search(space, perform, latency_bound=DOUBT)
    point = min(estimates, key=lambda each: performance_of(goal, estimates[each]).latency)
    candidate = Candidate(strategy=strategy, placed=placed, scenario=scenario, point=point, expected=estimates[point])
    return performance_of(goal, estimates[point]).latency, candidate
