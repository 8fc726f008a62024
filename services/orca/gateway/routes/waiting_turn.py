"""The turn of a waiting request as its owner sees it: the order of claims, its start window, and what is ahead of it.

All is an estimate from the pool's latest counts. The rules and run times are those of one group's last claim.
"""

from dataclasses import dataclass
from enum import StrEnum

from orca.gateway.limits.turns import requests_ahead
from orca.pool.order.order_class import DeadlineKind
from orca.pool.order.order_rules import ClaimOrder, Order
from orca.pool.order.start_window import starts_by_ms, waiting_class
from orca.pool.records import PoolStats, RequestStatus


class WaitReason(StrEnum):
    """The rule by which a request waits."""

    NO_GROUP = "no_group"  # no group of its model serves
    BY_ARRIVAL = "by_arrival"  # those that came before it go first
    IN_WINDOW = "in_window"  # it can still meet its deadline: utility and deadline decide
    WINDOW_OVER = "window_over"  # it cannot meet its deadline any more: all that can goes first
    NO_DEADLINE = "no_deadline"  # utility and its soft goal, if it has one, decide until its patience has passed
    PATIENCE_PASSED = "patience_passed"  # only those of them that came before it go first


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    """The turn of a waiting request."""

    order: Order | None  # None while no group claims
    reason: WaitReason
    ahead: int  # estimate of the requests that are claimed before it, at most all others that wait
    starts_by_ms: int | None  # end of its start window or patience, by the pool's wall clock; None by arrival


def waiting_turn(status: RequestStatus, stats: PoolStats | None, now_ms: int) -> WaitingTurn | None:
    """Return the turn of a request; None if it does not wait, or too little is known.

    Args: now_ms: wall clock.
    """
    older = status.older_waiting
    if older is None or stats is None or status.request.revision != stats.revision:
        return None
    is_served = any(group in stats.groups_formed for group in stats.groups_in_force)
    if stats.by_order is None:
        if not is_served:
            return WaitingTurn(None, WaitReason.NO_GROUP, older, None)
        return WaitingTurn(Order.ARRIVAL, WaitReason.BY_ARRIVAL, older, None)
    order = stats.by_order.order
    if order is None:
        return None
    starts_by = starts_by_ms(status.request, status.tokens, order, now_ms)
    reason, ahead = _by_order(status, stats, order, starts_by, now_ms)
    return WaitingTurn(order.rules.order, reason if is_served else WaitReason.NO_GROUP, ahead, int(starts_by))


def _by_order(
    status: RequestStatus, stats: PoolStats, order: ClaimOrder, starts_by: float, now_ms: int
) -> tuple[WaitReason, int]:
    """Return the reason, and the requests ahead. Args: starts_by: end of the start window or patience."""
    of, others = waiting_class(status.request, status.tokens), max(0, stats.queued - 1)
    reason = WaitReason.IN_WINDOW
    if of.kind is DeadlineKind.NONE:
        reason = WaitReason.NO_DEADLINE
        if now_ms >= status.request.submitted_ms + order.rules.patience_ms:
            return WaitReason.PATIENCE_PASSED, min(others, status.older_waiting or 0)
    elif now_ms > starts_by:
        return WaitReason.WINDOW_OVER, others
    deadline_ms = starts_by - now_ms + order.estimates.own_ms(of)
    return reason, min(others, requests_ahead(of, deadline_ms, stats))
