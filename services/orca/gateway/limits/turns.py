"""The turn of a new request where groups claim by another order than arrival (pool/order).

It is an estimate for admission alone, by the counts of the pool. Where these leave something open, it takes what lets
the request run sooner. A request that is accepted and late costs little, because a claim ends it. One that is refused
is lost. The rules and the expectations are those of the last claim of one group.
"""

from orca.core.domain.request import Request
from orca.pool.order.order_class import DeadlineKind, OrderClass, fewest_tokens
from orca.pool.order.order_stats import DUE_MS
from orca.pool.records import PoolStats


def requests_ahead(of: OrderClass, deadline_ms: float, stats: PoolStats) -> int:
    """Estimate how many requests are served before one that comes now.

    A share of each step, eta, goes by utility per cost, and the rest of it by deadline. So the request has two ways to
    its turn, and takes the shorter one. While those ahead of it on this way are served, others are served on the other.
    Under `edf` and `sjf` there is one way.

    Args:
        of: its class.
        deadline_ms: the soonest one, from now.
    Returns: at most all that wait, and that is the number where claims go by arrival. It is 0 while claims build the
        index of an order: nobody knows then what is ahead.
    """
    by_order = stats.by_order
    if by_order is None:
        return stats.queued
    if by_order.classes is None:
        return 0
    own, denser, utilities = by_order.worth_of(of), 0, 0.0
    for worth, count in by_order.worths:
        if worth.density >= own.density:
            denser += count
            utilities += count * worth.utility
    rules = by_order.assumed.rules
    share = rules.utility_share
    # A request with less utility than this does not go by its deadline, unless all do.
    goes_by_deadline = not share or own.utility * denser >= (1 - rules.eta) * utilities
    ways = [denser / share] if share else []
    if share < 1 and goes_by_deadline:
        ways.append(_sooner(deadline_ms, stats) / (1 - share))
    return min(stats.queued, round(min(ways)))


def wait_by_order(ahead: int, served_per_second: float, stats: PoolStats) -> float:
    """Estimate how many seconds a request waits for others that are ahead of it.

    Requests are served until then, or their deadlines end them, whichever comes first. So for each time within which
    deadlines are counted, those that are due have gone by then at the latest, and only others can be ahead.

    Args: served_per_second: above 0.
    """
    assert stats.by_order is not None
    wait_s = ahead / served_per_second
    for within_ms, due in zip(DUE_MS, stats.by_order.due, strict=True):
        # Those that are due may be running requests, or requests of replaced revisions.
        gone = max(0, due - stats.owned - stats.replaced_unfinished)
        left = min(ahead, max(0, stats.queued - gone))
        wait_s = min(wait_s, within_ms / 1000 + left / served_per_second)
    return wait_s


def least_run_ms(request: Request, kind: DeadlineKind, least_step_ms: float) -> float:
    """Return the time that a request needs in an idle engine at least, until its end or until its first token.

    The claim uses the same bound (Drop.CERTAIN). Args: least_step_ms: the fastest step seen, 0 if unknown.
    """
    return least_step_ms * (1 if kind is DeadlineKind.FIRST_TOKEN else fewest_tokens(request))


def _sooner(deadline_ms: float, stats: PoolStats) -> int:
    """Count the waiting requests with a sooner deadline.

    Those without one count as well, whatever their goals are, if the patience of the oldest request ends before the
    deadline: they go first then.
    """
    by_order = stats.by_order
    assert by_order is not None
    is_any_patient = stats.oldest_wait_ms + deadline_ms >= by_order.assumed.rules.patience_ms
    patient = by_order.without_deadline if is_any_patient else 0
    # The counts by deadline include running requests. These may all have one that is sooner.
    return patient + max(0, by_order.due_within(deadline_ms) - stats.owned)
