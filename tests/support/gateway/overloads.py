"""The counts of a full queue, as a gateway has them that has polled the pool for some time."""

from orca.gateway.limits.overload import Overload
from orca.pool.memory.pool import MemoryPool
from support.gateway.scripted_pool import ScriptedPool, stats


class Clock:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def overload_of(pool: MemoryPool, clock: Clock | None = None) -> Overload:
    """Return the overload of a gateway that knows nothing yet."""
    return Overload(pool, clock or Clock(), connections_max=100)


async def observed(*, seconds: float, queued: int, ends_per_second: float) -> Overload:
    """Return the overload of a gateway that has polled the pool for that many seconds."""
    pool, clock = ScriptedPool(stats()), Clock()
    overload = overload_of(pool, clock)
    while clock.now_s < seconds:
        clock.now_s += 0.5
        pool.told = stats(queued=queued, queued_max=10**6, ended_ever=round(clock.now_s * ends_per_second))
        await overload.check()
    return overload
