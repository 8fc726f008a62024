"""Divides a space in which larger values may bring less throughput, for branch and bound.

The algorithm relies on throughput that rises with each variable. Real costs have an end of that: a batch beyond the
cache of a processor takes longer for each request. Then the upper corner bounds no throughput, and under a loose bound
it would be the answer though a smaller batch is faster. So some points on the way down from that corner are evaluated
first. If one of them is faster, the space is divided into blocks from one power of two to the next, and each bounds its
own points much better. The peak may still lie within a block, so steps from the best point lead to it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

from orca.planner.search.branch_and_bound import Found, Perform, Performance, Point, SearchBlock, Tolerance, search
from orca.planner.search.grid import grid_values

GIVEN_UP_SHARE = 0.8
"""Soundings end where throughput has fallen below this share of the most that they have found."""


def sounded_search(
    space: SearchBlock, perform: Perform, *, latency_bound: float, tolerance: Tolerance, throughput_floor: float = 0.0
) -> Found:
    """Find a point of `space` with much throughput whose latency is at most the bound. Args: as of `search`.

    Where throughput rises with each variable, the result is that of `search`.
    """
    evaluated: dict[Point, Performance] = {}

    def known(point: Point) -> Performance:
        if point not in evaluated:
            evaluated[point] = perform(point)
        return evaluated[point]

    blocks = divided(space, lambda point: known(point).throughput, tolerance=tolerance.throughput)
    found = search(
        space,
        known,
        latency_bound=latency_bound,
        tolerance=tolerance,
        throughput_floor=throughput_floor,
        blocks=blocks,
    )
    if len(blocks) == 1 or found.best is None:
        return found
    return Found(best=_climbed(found.best, space, known, latency_bound), evaluated=evaluated)


def divided(space: SearchBlock, throughput: Callable[[Point], float], *, tolerance: float) -> Sequence[SearchBlock]:
    """Return blocks that make up the space, those with larger values first: the space itself if none is faster below.

    Args:
        throughput: of a point, whatever its latency.
        tolerance: share of the throughput by which points may differ from monotone ones.
    """
    axes = [_octaves(low, high) for low, high in zip(space.lower, space.upper, strict=True)]  # the highest first
    corner = throughput(space.upper)
    long = [variable for variable, axis in enumerate(axes) if len(axis) > 1]
    ways = [long, *([variable] for variable in long)] if len(long) > 1 else [long]
    if max((_most_on_the_way(axes, way, throughput) for way in ways if way), default=corner) <= corner * (
        1 + tolerance
    ):
        return [space]
    return [SearchBlock(tuple(low for low, _ in ends), tuple(high for _, high in ends)) for ends in product(*axes)]


def _most_on_the_way(
    axes: Sequence[Sequence[tuple[int, int]]], variables: Sequence[int], throughput: Callable[[Point], float]
) -> float:
    """Return the most throughput where only these variables fall from their highest values, one octave at a time."""
    most = 0.0
    for step in range(max(len(axes[variable]) for variable in variables)):
        places = [min(step, len(axis) - 1) if at in variables else 0 for at, axis in enumerate(axes)]
        found = throughput(tuple(axis[place][1] for axis, place in zip(axes, places, strict=True)))
        most = max(most, found)
        if found < GIVEN_UP_SHARE * most:
            break
    return most


def _climbed(start: Point, space: SearchBlock, perform: Perform, bound: float) -> Point:
    """Return a point from which no step of one variable brings more throughput under the bound."""
    at, steps = start, [max(abs(value) // 2, 1) for value in start]
    while True:
        meeting = [point for point in _neighbours(at, steps, space) if perform(point).meets(bound)]
        better = max(meeting, key=lambda point: perform(point).throughput, default=at)
        if perform(better).throughput > perform(at).throughput:
            at = better
        elif max(steps) == 1:
            return at
        else:
            steps = [max(step // 2, 1) for step in steps]


def _neighbours(at: Point, steps: Sequence[int], space: SearchBlock) -> Iterator[Point]:
    for variable, (low, high) in enumerate(zip(space.lower, space.upper, strict=True)):
        for step in (steps[variable], -steps[variable]):
            yield (*at[:variable], min(max(at[variable] + step, low), high), *at[variable + 1 :])


def _octaves(low: int, high: int) -> list[tuple[int, int]]:
    """Divide values into ranges from one power of two to the next, both ends included; the highest first."""
    ends = grid_values(low, high, growth=2.0)
    return [(before + 1, end) for before, end in pairwise([low - 1, *ends])][::-1]
