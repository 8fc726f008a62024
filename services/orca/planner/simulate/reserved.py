"""The KV slots that the requests in flight reserve, with a margin for their spread."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt

from orca.planner.simulate.estimate import Scenario

MARGIN = 3.0
"""Standard deviations above the mean: reservations exceed it in about one step of a thousand."""


@dataclass(frozen=True, slots=True)
class SlotNeed:
    """The reservation of one request in flight."""

    mean: float
    variance: float
    most: int

    def of(self, requests: float) -> int:
        """Return the slots that so many requests in flight need."""
        spread = sqrt(max(requests * self.variance, 0.0))
        return max(ceil(min(requests * self.mean + MARGIN * spread, ceil(requests) * self.most)), self.most)


def slot_need(scenario: Scenario, stay: Callable[[int], float]) -> SlotNeed:
    """Return the slots that a request in flight reserves: those of its whole length.

    A request that stays longer is in flight more often, so each length counts by its stay.

    Args: stay: how long an answer of so many tokens is in flight, in any unit; not 0 for all of them.
    """
    stays = {output: stay(output) for output in {output for output, _ in scenario.pair_slots}}
    total = mean = square = 0.0
    for output, slots in scenario.pair_slots:
        weight = stays[output]
        total += weight
        mean += weight * slots
        square += weight * slots * slots
    mean, square = mean / total, square / total
    return SlotNeed(mean, square - mean * mean, max(slots for _, slots in scenario.pair_slots))


@lru_cache(maxsize=8)
def iteration_need(scenario: Scenario) -> SlotNeed:
    """Return the reservation of a request under `iteration`, where it stays for a step per token."""
    return slot_need(scenario, float)


@lru_cache(maxsize=1024)
def rra_need(scenario: Scenario, decode_steps: int) -> SlotNeed:
    """Return the reservation of a request under `rra`, where it stays for whole phases."""
    return slot_need(scenario, lambda output: max(-(-(output - 1) // decode_steps), 1))
