"""Counts of what waits for claims by an order, for those who estimate how long a new request would wait."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from orca.pool.order.order_class import DeadlineKind, OrderClass
from orca.pool.order.order_rules import ClaimOrder, OrderRules

DUE_MS = tuple(500 * 2**octave for octave in range(12))
"""Times from now within which deadlines are counted: half a second to 17 minutes."""


ASSUMED_ORDER = ClaimOrder(rules=OrderRules(), free_prompt_tokens=1, total_prompt_tokens=1)
"""The order of groups of which no claim is known: default rules, and `max_tokens` as the length of an output."""


class ClassWorth(NamedTuple):
    """The worth of a class to an order of claims."""

    utility: float
    density: float  # utility per cost


@dataclass(frozen=True, kw_only=True)  # without slots, for its cache
class OrderStats:
    """The requests of the current revision that wait for claims by another order than arrival."""

    # Class -> waiting requests; a class without any is left out. None while claims build the index: then it does not
    # count all of them.
    classes: Mapping[OrderClass, int] | None
    due: tuple[int, ...]  # for each of DUE_MS: requests of the pool, also running ones, with a deadline within it
    # The fastest step that any group of the revision has seen. 0 while one of its groups has not seen enough steps: it
    # may be faster.
    least_step_ms: float
    # The last claim by an order of the first such group by name, for its rules and estimates. None while all of these
    # groups are of the release before.
    order: ClaimOrder | None = None

    @property
    def assumed(self) -> ClaimOrder:
        """The order that estimates go by."""
        return self.order or ASSUMED_ORDER

    @cached_property  # every call to a gateway asks for it
    def worths(self) -> tuple[tuple[ClassWorth, int], ...]:
        """The worth of each class, and its waiting requests; nothing while these are not counted."""
        return tuple((self.worth_of(of), count) for of, count in (self.classes or {}).items())

    @property
    def without_deadline(self) -> int:
        """The waiting requests without a deadline; 0 while they are not counted."""
        return sum(count for of, count in (self.classes or {}).items() if of.kind is DeadlineKind.NONE)

    def worth_of(self, of: OrderClass) -> ClassWorth:
        """Return the worth of a class, whether any request of it waits or not."""
        return ClassWorth(self.assumed.utility(of), self.assumed.density(of))

    def due_within(self, within_ms: float) -> int:
        """Count the requests with a deadline within a time from now, rounded down to one of DUE_MS."""
        within = bisect_right(DUE_MS, within_ms)
        return self.due[within - 1] if within else 0


def lua() -> str:
    """Return the constants for the head of each script."""
    return f"local DUE_MS = {{ {', '.join(map(str, DUE_MS))} }}\n"
