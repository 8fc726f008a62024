"""New work is accepted depending on the state of the server."""

from typing import Any, cast

import pytest

from orca.core.domain.errors import PoolNotDurable
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import CallPurpose, RedisLink
from orca.pool.redis.server_check import ServerCheck
from orca.pool.schemas import SCHEMAS
from orca.pool.settings import PoolSettings
from support.pool.beds import SETTINGS

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


async def test_a_hanging_fsync_refuses_new_work_until_it_ends() -> None:
    server = Server()
    await server.look_at(0.0, 0.5, fsync=1)
    assert await server.is_open()
    await server.look_at(1.0, fsync=1)
    assert not await server.is_open()
    await server.look_at(1.5, fsync=0)
    assert await server.is_open()


async def test_short_fsyncs_seen_by_chance_refuse_nothing() -> None:
    server = Server()
    await server.look_at(0.0, fsync=1)
    await server.look_at(0.5, fsync=0)
    await server.look_at(1.0, fsync=1)
    await server.look_at(2.0, 3.0, 4.0, fsync=1)  # a second apart, as fsyncs are
    assert await server.is_open()


async def test_a_deployment_that_accepts_loss_is_not_stopped_by_a_disk() -> None:
    server = Server(PoolSettings(accepts_loss=True))
    await server.look_at(0.0, 0.5, 1.0, fsync=1)
    assert await server.is_open()


async def test_each_reconnect_checks_the_server_and_nothing_else_does() -> None:
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
async def test_a_server_that_no_longer_qualifies_gets_no_new_work(name: str, value: Any) -> None:
    server = Server()
    await server.check.check()
    server.info[name] = value
    await server.check.poll()
    with pytest.raises(PoolNotDurable, match="Redis"):
        await server.check.admit()
