"""The turn of a new request where groups claim by another order than arrival (pool/order).

It is an estimate for admission alone, by the counts of the pool. Where these leave something open, it takes what lets
the request run sooner. A request that is accepted and late costs little, because a claim ends it. One that is refused
is lost. The rules and run times of the groups are not known here: it assumes their defaults, and counts `max_tokens` as
the length of an output.
"""

from bisect import bisect_right
from functools import lru_cache

from orca.core.domain.request import Request
from orca.pool.order.order_class import DeadlineKind, OrderClass, fewest_tokens
from orca.pool.order.order_rules import ClaimOrder, OrderRules
from orca.pool.order.order_stats import DUE_MS
from orca.pool.records import PoolStats

_ORDER = ClaimOrder(rules=OrderRules(), free_prompt_tokens=1, total_prompt_tokens=1)


def requests_ahead(of: OrderClass, deadline_ms: float, stats: PoolStats) -> int:
    """Estimate how many requests are served before one that comes now.

    A share of each step, eta, goes by utility per token, and the rest of it by deadline. So the request has two ways to
    its turn, and takes the shorter one. While those ahead of it on this way are served, others are served on the other.

    Args:
        of: its class.
        deadline_ms: the soonest one, from now.
    Returns: at most all that wait, and that is the number where claims go by arrival.
    """
    if stats.by_order is None:
        return stats.queued
    utility, density = _worth(of)
    denser, utilities = 0, 0.0
    for other, count in stats.by_order.classes.items():
        other_utility, other_density = _worth(other)
        if other_density >= density:
            denser += count
            utilities += count * other_utility
    rules = _ORDER.rules
    # A request with less utility than this does not go by its deadline.
    goes_by_deadline = utility * denser >= (1 - rules.eta) * utilities
    ahead = denser / rules.eta
    if goes_by_deadline:
        ahead = min(ahead, _sooner(deadline_ms, stats) / (1 - rules.eta))
    return min(stats.queued, round(ahead))


def least_run_ms(request: Request, kind: DeadlineKind, least_step_ms: float) -> float:
    """Return the time that a request needs in an idle engine at least, until its end or until its first token.

    The claim uses the same bound (Drop.CERTAIN). Args: least_step_ms: the fastest step seen, 0 if unknown.
    """
    return least_step_ms * (1 if kind is DeadlineKind.FIRST_TOKEN else fewest_tokens(request))


def _sooner(deadline_ms: float, stats: PoolStats) -> int:
    """Count the waiting requests with a sooner deadline, and those without one, whatever their goals are.

    After their patience they go first, and no goal makes them go later than that.
    """
    assert stats.by_order is not None
    within = bisect_right(DUE_MS, deadline_ms)
    due = stats.by_order.due[within - 1] if within else 0
    patient = sum(count for of, count in stats.by_order.classes.items() if of.kind is DeadlineKind.NONE)
    # The counts by deadline include running requests. These may all have one that is sooner.
    return patient + max(0, due - stats.owned)


@lru_cache(maxsize=4096)
def _worth(of: OrderClass) -> tuple[float, float]:
    """Return the utility of a class, and its utility per token."""
    return _ORDER.utility(of), _ORDER.density(of)
