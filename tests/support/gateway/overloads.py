"""The counts of a full queue, as a gateway has them that has polled the pool for some time."""

from orca.gateway.limits.overload import Overload
from orca.pool.memory.pool import MemoryPool
from orca.pool.order.order_class import OrderClass
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.order.order_stats import DUE_MS, OrderStats
from support.gateway.scripted_pool import ScriptedPool, stats


class Clock:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def overload_of(pool: MemoryPool, clock: Clock | None = None) -> Overload:
    """Return the overload of a gateway that knows nothing yet."""
    return Overload(pool, clock or Clock(), connections_max=100)


def by_order(
    classes: dict[OrderClass, int] | None, *due: int, least_step_ms: float = 0.0, order: ClaimOrder | None = None
) -> OrderStats:
    """Return counts by order.

    Args:
        classes: None while the index is built.
        due: requests with a deadline within each of the first DUE_MS, then no more.
        order: None if no claim is known.
    """
    counts = (*due, *(due[-1:] or (0,)) * (len(DUE_MS) - len(due)))
    return OrderStats(classes=classes, due=counts, least_step_ms=least_step_ms, order=order)


async def observed(
    *, seconds: float, queued: int, ends_per_second: float, late_share: float = 0.0, by_order: OrderStats | None = None
) -> Overload:
    """Return the overload of a gateway that has polled the pool for that many seconds.

    Args: late_share: of the ends, those of requests whose deadline came while they waited.
    """
    pool, clock = ScriptedPool(stats()), Clock()
    overload = overload_of(pool, clock)
    while clock.now_s < seconds:
        clock.now_s += 0.5
        ended = round(clock.now_s * ends_per_second)
        late = round(ended * late_share)
        pool.told = stats(queued=queued, queued_max=10**6, ended_ever=ended, unserved_ever=late, by_order=by_order)
        await overload.check()
    return overload
