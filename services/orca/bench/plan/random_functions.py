"""Random functions of control variables, monotone or nearly so, for checks of the search against exhaustive search."""

import math
from itertools import product
from random import Random

from orca.planner.search.branch_and_bound import Perform, Performance, Point, SearchBlock

SPACES = (
    SearchBlock((1,), (40,)),
    SearchBlock((1, 1), (12, 9)),
    SearchBlock((0, 3, 1), (6, 7, 5)),
    SearchBlock((5, 5), (5, 30)),
)
"""Spaces of one, two and three variables, and one whose first variable has a single value."""

BOUND_SHARES = (0.1, 0.3, 0.7, 1.0)
"""Bounds are the lowest 10, 30 or 70 % of the latencies, or none (ExeGPT, section 7.1)."""


def every_point(space: SearchBlock) -> list[Point]:
    """Return all points of a space."""
    return list(product(*(range(low, high + 1) for low, high in zip(space.lower, space.upper, strict=True))))


def exhaustive(space: SearchBlock, perform: Perform, bound: float) -> float:
    """Return the most throughput under the bound; -inf if no point meets it."""
    return max(
        (perform(point).throughput for point in every_point(space) if perform(point).latency <= bound),
        default=-math.inf,
    )


def random_costs(seed: int, space: SearchBlock, *, noise: float = 0.0) -> Perform:
    """Return functions that rise with each variable. Args: noise: largest share by which each value is off."""
    numbers = Random(seed)
    weights = [(numbers.random() + 0.1, numbers.random() + 0.1) for _ in space.sides]
    curves = [(_rising(numbers, side), _rising(numbers, side)) for side in space.sides]
    known: dict[Point, Performance] = {}

    def off(point: Point, which: int) -> float:
        return 1 + noise * (2 * Random(repr((seed, point, which))).random() - 1) if noise else 1.0

    def perform(point: Point) -> Performance:
        if point not in known:
            latency = throughput = 0.3
            for low, at, (slow, fast), (late, much) in zip(space.lower, point, weights, curves, strict=True):
                latency += slow * late[at - low]
                throughput += fast * much[at - low]
            known[point] = Performance(latency * off(point, 0), throughput * off(point, 1))
        return known[point]

    return perform


def a_bound(seed: int, space: SearchBlock, perform: Perform) -> float:
    """Return one of BOUND_SHARES of the latencies, in seconds."""
    share = Random(seed).choice(BOUND_SHARES)
    latencies = sorted(perform(point).latency for point in every_point(space))
    return math.inf if share == 1.0 else latencies[int(share * len(latencies))]


def _rising(numbers: Random, steps: int) -> list[float]:
    """Return random rising values from 0 to 1, some of them in a few large jumps."""
    power, total = numbers.choice((1, 3)), 0.0
    values = [0.0]
    for _ in range(steps):
        total += numbers.random() ** power
        values.append(total)
    return [value / total for value in values] if steps else values
