"""A Redis that changes under a serving pool: configured anew, replaced, or on a disk that hangs."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from pool_beds import REVISION, SETTINGS, RedisBed, add_user, entry, started, submission, with_settings

from orca.core.domain.errors import PoolNotDurable, PoolUnavailable
from orca.pool.records import CommitAnswer
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import CallPurpose, RedisLink
from orca.pool.redis.server_check import ServerCheck
from orca.pool.schemas import SCHEMAS
from orca.pool.settings import PoolSettings

FIT: dict[str, Any] = {
    "redis_version": "7.0.15",
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "maxmemory": 0,
    "aof_pending_bio_fsync": 0,
}


class Server:
    """Stands for the link to a Redis that says of itself what a test tells it to."""

    def __init__(self, settings: PoolSettings = SETTINGS) -> None:
        self.connects = 1
        self.info = dict(FIT)
        self.looks = 0
        self.seconds = 0.0
        self.check = ServerCheck(cast(RedisLink, self), Keys("d"), settings, SCHEMAS, lambda: self.seconds)

    async def pipeline(self, *_commands: object, purpose: CallPurpose) -> list[Any]:
        assert purpose is CallPurpose.ALL_CLIENTS, "a look waits for no client's connection"
        self.looks += 1
        return ["".join(f"{name}:{value}\r\n" for name, value in self.info.items()).encode(), None]

    async def look_at(self, *seconds: float, fsync: int) -> None:
        self.info["aof_pending_bio_fsync"] = fsync
        for self.seconds in seconds:
            await self.check.poll()

    async def is_open(self) -> bool:
        try:
            await self.check.admit()
        except PoolNotDurable:
            return False
        return True


async def test_an_fsync_that_hangs_closes_the_door_until_it_ends() -> None:
    server = Server()
    await server.look_at(0.0, 0.5, fsync=1)
    assert await server.is_open()
    await server.look_at(1.0, fsync=1)
    assert not await server.is_open()
    await server.look_at(1.5, fsync=0)
    assert await server.is_open()


async def test_short_fsyncs_that_looks_meet_by_chance_close_nothing() -> None:
    server = Server()
    await server.look_at(0.0, fsync=1)
    await server.look_at(0.5, fsync=0)
    await server.look_at(1.0, fsync=1)
    await server.look_at(2.0, 3.0, 4.0, fsync=1)  # a second apart, as fsyncs are
    assert await server.is_open()


async def test_who_accepts_loss_is_not_kept_out_by_a_disk() -> None:
    server = Server(PoolSettings(accepts_loss=True))
    await server.look_at(0.0, 0.5, 1.0, fsync=1)
    assert await server.is_open()


async def test_each_reconnect_is_a_look_and_nothing_else_is() -> None:
    server = Server()
    await server.is_open()
    await server.is_open()
    assert server.looks == 1
    server.connects += 1
    server.info["maxmemory_policy"] = "allkeys-lru"
    assert not await server.is_open()
    assert server.looks == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("redis_version", "6.0.9"), ("maxmemory_policy", "allkeys-lru"), ("aof_enabled", 0), ("maxmemory", 1 << 20)],
)
async def test_a_server_that_is_not_fit_any_more_gets_no_new_work(name: str, value: Any) -> None:
    server = Server()
    await server.check.check()
    server.info[name] = value
    await server.check.poll()
    with pytest.raises(PoolNotDurable, match="Redis"):
        await server.check.admit()


@pytest.fixture
async def own_bed(own_redis: EmbeddedRedis) -> AsyncIterator[RedisBed]:
    bed = RedisBed(own_redis.url, with_settings(call_timeout_ms=2000))
    yield bed
    await bed.close()


async def test_a_server_that_is_configured_anew_finishes_what_it_has_and_takes_no_more(own_bed: RedisBed) -> None:
    _, owned = await started(own_bed, "a")
    await own_bed.redis.config_set("appendonly", "no")
    await own_bed.pool.sweep()
    with pytest.raises(PoolNotDurable, match="no append-only file"):
        await own_bed.pool.submit(submission("b"))
    assert await own_bed.pool.commit([entry(owned["a.0"], 0, 5)]) == [CommitAnswer.APPLIED]
    await own_bed.redis.config_set("appendonly", "yes")
    await own_bed.pool.sweep()
    await own_bed.pool.submit(submission("b"))


async def test_a_server_that_came_back_as_another_is_seen_before_new_work_is_accepted(
    own_redis: EmbeddedRedis, own_bed: RedisBed
) -> None:
    await own_bed.pool.set_revision(REVISION, 1)
    await own_bed.pool.submit(submission("a"))
    own_redis.kill()
    own_redis.restart()
    add_user(own_bed.url, own_bed.deployment)
    await own_bed.redis.config_set("maxmemory-policy", "allkeys-lru")
    # The first call may only find that its connection broke.
    with contextlib.suppress(PoolUnavailable):
        await own_bed.pool.submit(submission("b"))
    with pytest.raises(PoolNotDurable, match="allkeys-lru"):
        await own_bed.pool.submit(submission("b"))
