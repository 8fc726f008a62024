"""Calls take turns for few connections: none is passed over, and what serves all clients waits for none of them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from pool_beds import with_settings
from redis.asyncio import Redis
from redis.exceptions import NoScriptError
from waiting import until

from orca.core.errors import PoolUnavailable
from orca.pool.api import Caller
from orca.pool.embedded import EmbeddedRedis
from orca.pool.keys import Keys
from orca.pool.redis_link import Lane, Purpose, RedisLink
from orca.pool.redis_pool import RedisPool
from orca.pool.schemas import SCHEMAS

FOR_ALL: dict[str, Callable[[RedisPool], Coroutine[Any, Any, Any]]] = {
    "read": lambda pool: pool.read_many({"a.0": 0}, for_all=True),
    "renew": lambda pool: pool.renew([("a", "reader")]),
    "heartbeat": lambda pool: pool.heartbeat(CALLER),
    "sweep": lambda pool: pool.sweep(),
    "report": lambda pool: pool.report("part"),
}
CALLER = Caller(group="g1", process="p1", revision="r1")
SETTINGS = with_settings(connections_max=2, call_timeout_ms=60_000)


@pytest.fixture
async def link(own_redis: EmbeddedRedis) -> AsyncIterator[RedisLink]:
    """Two connections for the calls of clients, in a pool that nothing was written to."""
    link = RedisLink(own_redis.url, Keys("d"), SETTINGS, SCHEMAS)
    yield link
    await link.close()


@pytest.fixture
async def pool(own_redis: EmbeddedRedis) -> AsyncIterator[RedisPool]:
    """Two connections for the calls of clients, and a group with its seat."""
    pool = RedisPool(own_redis.url, "d", SETTINGS)
    await pool.enter(CALLER, 1, reported_epoch=0)
    yield pool
    await pool.close()


@contextlib.asynccontextmanager
async def lane_of(redis: EmbeddedRedis, size: int, timeout_s: float = 60) -> AsyncIterator[Lane]:
    lane = Lane(size, timeout_s, RedisLink(redis.url, Keys("d"), SETTINGS, SCHEMAS).connection)
    try:
        yield lane
    finally:
        await lane.close()


@contextlib.asynccontextmanager
async def meanwhile(*calls: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def are_held(url: str, connections: int) -> bool:
    async with Redis.from_url(url) as redis:
        return bool((await redis.info("clients"))["blocked_clients"] == connections)


@pytest.mark.parametrize("purpose", [Purpose.CLIENT, Purpose.READING])
@pytest.mark.parametrize("call", FOR_ALL.values(), ids=FOR_ALL)
async def test_what_serves_all_clients_does_not_wait_for_their_connections(
    call: Callable[[RedisPool], Coroutine[Any, Any, Any]], purpose: Purpose, pool: RedisPool, own_redis: EmbeddedRedis
) -> None:
    async with meanwhile(*(pool._link.pipeline(("BLPOP", "nothing", 0), purpose=purpose) for _ in range(50))):
        await until(lambda: are_held(own_redis.url, 2), limit_s=30)
        async with asyncio.timeout(20):
            await call(pool)


async def test_reading_for_one_client_holds_up_no_other_call(pool: RedisPool, own_redis: EmbeddedRedis) -> None:
    held = (pool._link.pipeline(("BLPOP", "nothing", 0), purpose=Purpose.READING) for _ in range(50))
    async with meanwhile(*held, pool.read_many({"a.0": 0}, for_all=False)):
        await until(lambda: are_held(own_redis.url, 2), limit_s=30)
        async with asyncio.timeout(20):
            await pool.cancel("a")
            await pool.stats()


async def test_busy_callers_are_served_in_turn(link: RedisLink) -> None:
    served = Counter(dict.fromkeys(range(20), 0))

    async def call_and_call(caller: int) -> None:
        while True:
            await link.run("cancel", "a")
            served[caller] += 1

    async with meanwhile(*(call_and_call(caller) for caller in served)):
        await until(lambda: served.total() >= 400, limit_s=30)
        assert max(served.values()) - min(served.values()) <= 2


async def test_a_call_without_a_turn_in_time_is_an_outage_to_its_caller(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane, meanwhile(lane.call(("BLPOP", "nothing", 0))):
        await until(lambda: are_held(own_redis.url, 1), limit_s=30)
        lane._timeout_s = 0.05
        with pytest.raises(PoolUnavailable, match="none of 1 connections"):
            await lane.call(("PING",))


async def test_a_call_without_an_answer_in_time_is_an_outage_to_its_caller(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1, timeout_s=0.5) as lane:
        with pytest.raises(PoolUnavailable, match="no answer in time"):
            await lane.call(("BLPOP", "nothing", 0))


async def test_a_call_cancelled_on_its_turn_or_before_passes_the_turn_on(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane:
        async with meanwhile(*(lane.call(("BLPOP", "nothing", 0)) for _ in range(3))):
            await until(lambda: are_held(own_redis.url, 1), limit_s=30)
        assert await lane.call(("ECHO", "an answer")) == [b"an answer"]


async def test_a_call_cancelled_at_any_moment_leaves_its_answer_to_nobody(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane:
        for moment in range(40):
            call = asyncio.create_task(lane.call(("ECHO", "for nobody"), ("ECHO", "for nobody either")))
            for _ in range(moment // 2):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await lane.call(("ECHO", str(moment))) == [str(moment).encode()]


async def test_an_error_among_answers_is_raised_and_the_next_call_gets_its_own(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane:
        with pytest.raises(NoScriptError):
            await lane.call(("ECHO", "before"), ("EVALSHA", "0" * 40, 0), ("ECHO", "behind"))
        assert await lane.call(("ECHO", "next"), ("ECHO", "after")) == [b"next", b"after"]


async def test_a_connection_that_was_closed_meanwhile_is_made_anew(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane, Redis.from_url(own_redis.url) as redis:
        await lane.call(("CLIENT", "SETNAME", "lane"))
        [client] = [each for each in await redis.client_list() if each["name"] == "lane"]
        await redis.client_kill_filter(_id=client["id"])
        await until(lambda: lane._idle[0].can_read(), limit_s=30)
        assert await lane.call(("ECHO", "an answer")) == [b"an answer"]
