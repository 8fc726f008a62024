"""The start window of a waiting request, as a claim sees it."""

from orca.core.domain.request import Request
from orca.pool.order.order_class import OrderClass, class_of, kind_in_force
from orca.pool.order.order_rules import ClaimOrder


def waiting_class(request: Request, tokens: int) -> OrderClass:
    """Return the order class of a waiting request. Args: tokens: that it has from earlier claims."""
    return class_of(request, kind_in_force(request, deadline_in_force(request, tokens)), tokens)


def deadline_in_force(request: Request, tokens: int) -> int | None:
    """Return the deadline of a request that has so many tokens, by the pool's wall clock; None if it has none."""
    return request.deadline_wall_ms if tokens else request.first_deadline_wall_ms


def starts_by_ms(request: Request, tokens: int, order: ClaimOrder, now_ms: int) -> float:
    """Return the end of the start window of a waiting request, or of its patience; wall clock of the pool.

    A soft goal counts while the window that it gives is open. Args: order: of a claim at `now_ms`.
    """
    of, deadline_ms = waiting_class(request, tokens), deadline_in_force(request, tokens)
    if deadline_ms is not None:
        return deadline_ms - order.estimates.own_ms(of)
    by_goal_ms = request.submitted_ms + order.window_ms(of)
    return by_goal_ms if by_goal_ms >= now_ms else request.submitted_ms + order.rules.patience_ms
