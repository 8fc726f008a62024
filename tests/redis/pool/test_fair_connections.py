"""Calls take turns for few connections: none is passed over, and what serves all clients waits for none of them."""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvloop
from redis.asyncio import Connection, Redis
from redis.exceptions import NoScriptError

from orca.core.domain.errors import PoolUnavailable
from orca.pool.records import Caller
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.fair_connections import FairConnections
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import CallPurpose, RedisLink, read_info
from orca.pool.redis.pool import RedisPool
from orca.pool.schemas import SCHEMAS
from support.pool.beds import connections, with_settings
from support.waiting import until

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
async def lane_of(redis: EmbeddedRedis, size: int, timeout_s: float = 60) -> AsyncIterator[FairConnections]:
    lane = FairConnections(size, timeout_s, connections(redis.url))
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


@pytest.mark.parametrize("purpose", [CallPurpose.ONE_CLIENT, CallPurpose.READING])
@pytest.mark.parametrize("call", FOR_ALL.values(), ids=FOR_ALL)
async def test_calls_for_all_clients_do_not_wait_for_connections_of_single_clients(
    call: Callable[[RedisPool], Coroutine[Any, Any, Any]],
    purpose: CallPurpose,
    pool: RedisPool,
    own_redis: EmbeddedRedis,
) -> None:
    async with meanwhile(*(pool._link.pipeline(("BLPOP", "nothing", 0), purpose=purpose) for _ in range(50))):
        await until(lambda: are_held(own_redis.url, 2), limit_s=30)
        async with asyncio.timeout(20):
            await call(pool)


async def test_reading_for_one_client_delays_no_other_call(pool: RedisPool, own_redis: EmbeddedRedis) -> None:
    held = (pool._link.pipeline(("BLPOP", "nothing", 0), purpose=CallPurpose.READING) for _ in range(50))
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
        assert await lane.call(("ECHO", "its own")) == [b"its own"]


async def test_a_call_cancelled_on_its_turn_or_before_passes_the_turn_on(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane:
        async with meanwhile(*(lane.call(("BLPOP", "nothing", 0)) for _ in range(3))):
            await until(lambda: are_held(own_redis.url, 1), limit_s=30)
        assert await lane.call(("ECHO", "an answer")) == [b"an answer"]


async def test_the_answer_of_a_cancelled_call_goes_to_no_other_call(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane:
        for moment in range(60):
            if moment % 2:  # so that it connects first
                await lane._idle[0].disconnect()
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


async def test_a_connection_that_was_closed_meanwhile_is_reopened(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane, Redis.from_url(own_redis.url) as redis:
        await lane.call(("CLIENT", "SETNAME", "lane"))
        [client] = [each for each in await redis.client_list() if each["name"] == "lane"]
        await redis.client_kill_filter(_id=client["id"])
        await until(lambda: lane._idle[0].can_read(), limit_s=30)
        assert await lane.call(("ECHO", "an answer")) == [b"an answer"]


async def test_calls_in_flight_fail_when_their_connection_is_closed(own_redis: EmbeddedRedis) -> None:
    async with lane_of(own_redis, 1) as lane:
        call = asyncio.create_task(lane.call(("BLPOP", "nothing", 0)))
        await until(lambda: are_held(own_redis.url, 1), limit_s=30)
    with pytest.raises(PoolUnavailable):
        await call
    with pytest.raises(PoolUnavailable, match="were closed"):
        await lane.call(("PING",))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_that_was_reset_is_one_outage_and_is_reopened(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def reset() -> None:
        writers: list[asyncio.StreamWriter] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            while b"PING" in await reader.read(1024):
                writer.write(b"+PONG\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        lane = FairConnections(1, 20, partial(Connection, port=port, protocol=2, driver_info=None, socket_timeout=None))
        try:
            assert await lane.call(("PING",)) == [b"PONG"]
            # With nothing to linger for the system answers a close with a reset.
            held = writers[0].get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writers[0].transport.abort()
            await until(lambda: lane._idle[0]._reader.exception() is not None, limit_s=30)
            with pytest.raises(PoolUnavailable):
                await lane.call(("PING",))
            assert await lane.call(("PING",)) == [b"PONG"]
        finally:
            await lane.close()
            await until(lambda: all(writer.is_closing() for writer in writers), limit_s=30)
            server.close()
            await asyncio.sleep(0)

    run(reset())


async def test_a_master_that_became_a_replica_is_an_outage(own_redis: EmbeddedRedis, pool: RedisPool) -> None:
    async with Redis.from_url(own_redis.url) as redis:
        await redis.replicaof("127.0.0.1", "1")
        try:
            with pytest.raises(PoolUnavailable):
                await pool.set_revision("r2", 2)
        finally:
            await redis.replicaof("NO", "ONE")
    assert await pool.set_revision("r2", 2) == "r2"


def test_redis_info_is_read_by_name() -> None:
    said = b"# Server\r\nredis_version:7.4\r\nexecutable:/caf\xe9:x\r\nslave0:\r\n\r\n# Memory\r\nmaxmemory:0\r\nlag:-1"
    assert read_info(said) == {
        "redis_version": "7.4",
        "executable": "/caf\ufffd:x",
        "slave0": "",
        "maxmemory": 0,
        "lag": "-1",
    }
