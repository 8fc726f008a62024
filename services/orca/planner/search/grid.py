"""Search on a grid, for goals at an arrival rate.

At a rate latency is not monotone: a smaller batch has shorter steps, but a longer queue, and below some size it has no
end. Then no corner bounds the points of a block, and branch and bound would drop good ones. So a grid with growing
steps is evaluated, and finer ones around its best points.
"""

from itertools import product

from orca.planner.search.branch_and_bound import Found, Perform, Performance, Point, SearchBlock

GROWTH = 1.5
"""Ratio of two neighbours on the first grid. Figures change by less than this ratio from one to the next."""

REFINED = 3
"""Best points of the first grid around which finer steps are tried."""


def grid_search(space: SearchBlock, perform: Perform, *, latency_bound: float) -> Found:
    """Find a point of `space` with much throughput whose latency is at most the bound. Args: as of `search`."""
    evaluated: dict[Point, Performance] = {}

    def evaluate(axes: list[list[int]]) -> None:
        for point in product(*axes):
            if point not in evaluated:
                evaluated[point] = perform(point)

    ends = list(zip(space.lower, space.upper, strict=True))
    evaluate([grid_values(low, high) for low, high in ends])
    found = Found(best=None, evaluated=evaluated)
    for best in found.ranking(latency_bound)[:REFINED]:
        evaluate([_around(value, low, high) for value, (low, high) in zip(best, ends, strict=True)])
    ranking = found.ranking(latency_bound)
    return Found(best=ranking[0] if ranking else None, evaluated=evaluated)


def grid_values(low: int, high: int, growth: float = GROWTH) -> list[int]:
    """Return values from `low` to `high`, both included, whose distance grows with their size.

    Args: growth: ratio of two neighbours.
    """
    if high < 0:
        return [-value for value in reversed(grid_values(-high, -low, growth))]
    values, value = [], float(max(low, 1))
    if low < 1:
        values.append(low)
    while value < high:
        values.append(round(value))
        value = max(value * growth, value + 1)
    return sorted({*values, high})


def _around(value: int, low: int, high: int) -> list[int]:
    """Return some values between the neighbours of a value on the grid."""
    step = max(1, round(abs(value) * (GROWTH - 1) / 4))
    return sorted({min(max(value + number * step, low), high) for number in (-2, -1, 0, 1, 2)})
