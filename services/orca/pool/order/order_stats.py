"""Counts of what waits for claims by an order, for those who estimate how long a new request would wait."""

from collections.abc import Mapping
from dataclasses import dataclass

from orca.pool.order.order_class import OrderClass
from orca.pool.order.order_rules import ClaimOrder

DUE_MS = tuple(500 * 2**octave for octave in range(12))
"""Times from now within which deadlines are counted: half a second to 17 minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderStats:
    """The requests of the current revision that wait for claims by another order than arrival."""

    classes: Mapping[OrderClass, int]  # class -> waiting requests; a class without any is left out
    due: tuple[int, ...]  # for each of DUE_MS: requests of the pool, also running ones, with a deadline within it
    # The fastest step that any group of the revision has seen. 0 while one of its groups has not seen enough steps: it
    # may be faster.
    least_step_ms: float
    # The last claim by an order of the first such group by name, for its rules and estimates. None while all of these
    # groups are of the release before.
    order: ClaimOrder | None = None


def lua() -> str:
    """Return the constants for the head of each script."""
    return f"local DUE_MS = {{ {', '.join(map(str, DUE_MS))} }}\n"
