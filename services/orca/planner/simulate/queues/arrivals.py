"""The time that a request waits before its first step, at a given arrival rate, and the latency from its submission."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, inf, log, sqrt

from orca.planner.simulate.estimate import Scenario
from orca.planner.workload.workload import Marginal

BEYOND = 0.5826
"""The mean overshoot of a random walk, in standard deviations of its step: a step counts whole customers."""

QUEUE_POINTS = 5
"""Points that represent the time in a queue."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The time before the first step, in microseconds: a uniform part, and at times one in a queue."""

    turn: float  # the request's turn comes after a time between 0 and this
    turn_share: float  # share of the requests that wait for their turn; the others find an idle group
    queued: float = 0.0  # mean time in the queue of those that queue: exponentially distributed
    queued_share: float = 0.0  # share of the requests that queue as well

    @staticmethod
    def for_cycle(cycle_us: float, *, entering: float, variance: float, places: float) -> "Waiting":
        """Return the waiting time where requests enter once in a cycle.

        Arrivals above the places wait for the next cycle: a random walk with a drift, whose height is exponentially
        distributed.

        Args:
            entering: requests that arrive in a cycle on average.
            variance: of the same.
            places: requests that may enter in one.
        """
        spare = max(places - entering, 1e-9)
        decay = 2 * spare / max(variance, 1e-9)
        share = exp(-decay * BEYOND * sqrt(variance))
        return Waiting(cycle_us, 1 - exp(-entering), cycle_us / decay / places, min(share, 1.0))

    def points(self) -> list[tuple[float, float]]:
        """Return times in the queue and their shares."""
        if not self.queued_share or not self.queued:
            return [(0.0, 1.0)]
        found = [(0.0, 1 - self.queued_share)]
        share = self.queued_share / QUEUE_POINTS
        return found + [(-self.queued * log(1 - (place + 0.5) / QUEUE_POINTS), share) for place in range(QUEUE_POINTS)]


@dataclass(frozen=True, slots=True)
class Case:
    """Some of the requests, which find the group at the same load."""

    share: float
    latency: Callable[[int], float]  # microseconds from the first step, by output tokens
    waiting: Waiting


def latency_at_rate(scenario: Scenario, cases: Sequence[Case]) -> float:
    """Return the percentile over all answers of waiting time and latency together, in microseconds."""
    if any(case.waiting.queued == inf for case in cases):
        return inf
    points = sorted(
        (case.latency(length) + queued, case.share * share * queued_share, case.waiting.turn, case.waiting.turn_share)
        for case in cases
        for length, share in length_points(scenario.workload.outputs)
        for queued, queued_share in case.waiting.points()
    )
    wanted = scenario.percent / 100
    low, high = points[0][0], points[-1][0] + max(point[2] for point in points)
    starts = [point[0] for point in points]
    for _ in range(14):
        middle = (low + high) / 2
        below = 0.0
        for time, share, turn, turn_share in points[: bisect_left(starts, middle)]:
            below += share if middle - time >= turn else share * (1 - turn_share * (1 - (middle - time) / turn))
        if below < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@lru_cache(maxsize=256)
def length_points(lengths: Marginal, count: int = 24) -> tuple[tuple[int, float], ...]:
    """Return some lengths and their shares: quantiles, half of them above the 90th percentile."""
    half = count // 2
    edges = [place / half * 0.9 for place in range(half)] + [0.9 + place / half * 0.1 for place in range(half + 1)]
    found: dict[int, float] = {}
    for low, high in pairwise(edges):
        length = lengths.quantile((low + high) / 2)
        found[length] = found.get(length, 0.0) + high - low
    return tuple(found.items())
