"""Finds the point with the least latency among those that have nearly all of a throughput.

Branch and bound (branch_and_bound.py) ends with the most throughput, whatever latency that takes. Under a loose bound
this is the upper corner of the space: batches so large that a part of them would do. So a second search follows the
first one, by the same algorithm on the mirrored problem: the least latency at a bound on throughput. Each variable is
negated, so that again a larger value means more of what is wanted, and more of what is bounded.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from orca.planner.search.branch_and_bound import Perform, Performance, Point, SearchBlock, Tolerance, search

SPARED_SHARE = 0.01
"""Share of the best throughput that a plan may lack for less latency. Two steps give it up, each up to STEP_SHARE."""

STEP_SHARE = SPARED_SHARE / 2
"""Share of it for each step: the search by formulas, then the choice among schedules that were simulated."""

WORTH_SHARE = 0.1
"""Share of latency that a step must save for that. A bound under which less can be saved is tight."""

NEGLIGIBLE_SHARE = 0.02
"""Share of latency that is not looked for: blocks that could save less than this are dropped."""

T = TypeVar("T")


def least_latency(lower: Point, best: Point, perform: Perform, *, throughput: float) -> Point | None:
    """Return the point from `lower` to `best` with the least latency that has so much throughput.

    Args:
        perform: pure; its latency is infinite at points that must not be found.
        best: has so much throughput.
    Returns: None if no point saves WORTH_SHARE of the latency of `best`.
    """

    def mirrored(point: Point) -> Performance:
        figures = perform(_negated(point))
        if not (0.0 < figures.latency < inf and figures.throughput > 0.0):
            return Performance(inf, 0.0)
        return Performance(throughput / figures.throughput, 1 / figures.latency)

    space, tolerance = SearchBlock(_negated(best), _negated(lower)), Tolerance(throughput=-NEGLIGIBLE_SHARE)
    worth = mirrored(space.lower).throughput / (1 - WORTH_SHARE)
    found = search(space, mirrored, latency_bound=1.0, tolerance=tolerance, throughput_floor=worth)
    return None if found.best is None else _negated(found.best)


def preferred(items: Sequence[T], throughput: Callable[[T], float], latency: Callable[[T], float]) -> T:
    """Return the item with the most throughput, or the one with the least latency of those that lack at most
    STEP_SHARE of it, if that saves WORTH_SHARE.
    """
    best = max(items, key=throughput)
    near = [item for item in items if throughput(item) >= (1 - STEP_SHARE) * throughput(best)]
    least = min(near, key=latency)
    return least if latency(least) <= (1 - WORTH_SHARE) * latency(best) else best


def _negated(point: Point) -> Point:
    return tuple(-value for value in point)
