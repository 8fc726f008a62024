"""The turn of a waiting request as its owner sees it: the order of claims, its start window, and what is ahead of it.

All is an estimate from the pool's latest counts, at the time of the pool when it counted. The rules and run times are
those of one group's last claim. docs/how-to/deadlines.md has the rule of each reason for the number ahead.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from orca.gateway.limits.turns import requests_ahead
from orca.pool.order.order_class import DeadlineKind, OrderClass
from orca.pool.order.order_rules import ClaimOrder, Order
from orca.pool.order.order_stats import OrderStats
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


def waiting_turn(status: RequestStatus, stats: PoolStats | None) -> WaitingTurn | None:
    """Return the turn of a request; None if it does not wait, or too little is known."""
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
    starts_by = starts_by_ms(status.request, status.tokens, order, stats.wall_ms)
    of = waiting_class(status.request, status.tokens)
    reason = _reason(of, status, order, starts_by, stats.wall_ms)
    # While claims build the index, from the oldest request on, they know of no others.
    is_built = stats.by_order.classes is not None
    stats = _without_one(stats, of)
    ahead = _ahead(reason, of, older, stats, starts_by) if is_built else older
    shown = reason if is_served else WaitReason.NO_GROUP
    return WaitingTurn(order.rules.order, shown, max(0, min(stats.queued, ahead)), int(starts_by))


def _without_one(stats: PoolStats, of: OrderClass) -> PoolStats:
    """Return the counts of the others: without one request of a class."""
    by_order = stats.by_order
    assert by_order is not None
    classes = None if by_order.classes is None else dict(by_order.classes)
    if classes is not None and of in classes:
        classes[of] -= 1
    return replace(stats, queued=max(0, stats.queued - 1), by_order=replace(by_order, classes=classes))


def _reason(of: OrderClass, status: RequestStatus, order: ClaimOrder, starts_by: float, now_ms: int) -> WaitReason:
    """Return the reason where a group serves. Args: starts_by: end of the start window or patience."""
    if of.kind is DeadlineKind.NONE:
        patience_ends_ms = status.request.submitted_ms + order.rules.patience_ms
        return WaitReason.PATIENCE_PASSED if now_ms >= patience_ends_ms else WaitReason.NO_DEADLINE
    return WaitReason.WINDOW_OVER if now_ms > starts_by else WaitReason.IN_WINDOW


def _ahead(reason: WaitReason, of: OrderClass, older: int, stats: PoolStats, starts_by: float) -> int:
    """Return the requests ahead. Args: of: its class; older: waiting requests that came before it; stats: of others."""
    by_order = stats.by_order
    assert by_order is not None
    without_deadline = by_order.without_deadline
    if reason is WaitReason.PATIENCE_PASSED:
        return min(older, without_deadline)
    if reason is WaitReason.WINDOW_OVER:
        return stats.queued - _surely_behind(of, stats, by_order)
    deadline_ms = starts_by - stats.wall_ms + by_order.assumed.estimates.own_ms(of)
    if stats.oldest_wait_ms < by_order.assumed.rules.patience_ms:
        return requests_ahead(of, deadline_ms, stats)
    # The counts do not tell whose patience has passed. It may be that of all without a deadline.
    rest = replace(stats, by_order=replace(by_order, classes=_timed(by_order)))
    return without_deadline + requests_ahead(of, deadline_ms, rest)


def _surely_behind(of: OrderClass, stats: PoolStats, by_order: OrderStats) -> int:
    """Count the waiting requests that surely come after a late one of a class: late ones of less utility per cost.

    The deadlines that count are too near for each class of less utility per cost. Some of them may be those of running
    requests, of replaced revisions, or of the other classes.
    """
    own = by_order.worth_of(of)
    timed = _timed(by_order)
    lesser = {each: count for each, count in timed.items() if by_order.worth_of(each).density < own.density}
    near = by_order.due_within(min(map(by_order.assumed.estimates.own_ms, lesser), default=0.0))
    # A request that this release cannot read is in no class.
    unknown = max(0, stats.queued - sum((by_order.classes or {}).values()))
    others = stats.owned + stats.replaced_unfinished + unknown + sum(timed.values()) - sum(lesser.values())
    return min(sum(lesser.values()), max(0, near - others))


def _timed(by_order: OrderStats) -> dict[OrderClass, int]:
    """Return the waiting requests with a deadline, by class."""
    return {of: count for of, count in (by_order.classes or {}).items() if of.kind is not DeadlineKind.NONE}
