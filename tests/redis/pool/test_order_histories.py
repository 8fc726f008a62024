"""The twin and Redis stay equal over whole histories of waiting requests. A twin without one of its rules does not."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from orca.pool.memory.pool import MemoryPool
from orca.pool.redis.embedded import EmbeddedRedis
from support.pool.beds import RedisBed, with_settings
from support.pool.histories import History
from support.pool.kinds import KINDS
from support.pool.pair import Difference, Pair, SetClock
from support.pool.protocol.order_rules import ORDER_RULES

SETTINGS = with_settings(max_queued=10**6)
STEPS = 300

Check = Callable[..., Awaitable[None]]


@pytest.fixture(params=KINDS[1:])
async def check(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Check]:
    """Runs the history of a seed on a twin of a class and on a Redis of each kind."""
    clock = SetClock(tmp_path, request.param)
    with EmbeddedRedis(tmp_path / "redis", binary=clock.binary, fsync="no") as server:

        async def run(
            seed: int, twin_class: type[MemoryPool] = MemoryPool, *, steps: int = STEPS, crowds: int = 0
        ) -> None:
            bed = RedisBed(server.url, SETTINGS)
            try:
                await History(seed, Pair(twin_class(clock, SETTINGS), bed, clock), crowds=crowds).run(steps)
            finally:
                await bed.redis.flushall()
                await bed.close()

        yield run


async def test_the_twin_and_redis_agree_over_a_history(check: Check) -> None:
    for seed in range(4):
        await check(seed)


async def test_they_agree_where_a_claim_passes_over_as_many_as_it_may(check: Check) -> None:
    await check(0, steps=80, crowds=2)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(100, 1_100, 100))
async def test_they_agree_over_many_histories(check: Check, start: int) -> None:
    for seed in range(start, start + 100):
        await check(seed, crowds=seed % 10 == 0)


async def first_difference(check: Check, twin_class: type[MemoryPool]) -> int | None:
    """Return the seed of the first history in which they differ."""
    for seed in range(100):
        try:
            # An index is built in several claims only where a crowd waits.
            await check(seed, twin_class, crowds=seed % 3 == 2)
        except Difference:
            return seed
    return None


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", ORDER_RULES)
async def test_a_twin_without_a_rule_differs(check: Check, rule: type[MemoryPool]) -> None:
    assert await first_difference(check, rule) is not None
