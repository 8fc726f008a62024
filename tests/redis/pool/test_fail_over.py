"""A fail-over that kills nobody: the old master follows the new one, keeps its clients, and the address leads on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from orca.core.domain.errors import PoolUnavailable
from orca.core.process.ports import free_port
from orca.pool.records import Claimed
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from support.pool.beds import RedisBed, add_user, entry, started, submission, until_followed, with_settings
from support.pool.kinds import KINDS, redis_binary
from support.waiting import until

CONNECTIONS = 4
"""Connections of each kind in this pool, or fewer: as many concurrent calls use all of them."""


@dataclass
class Pair:
    """A pool whose address leads to one of two servers."""

    bed: RedisBed
    address: Path
    main: EmbeddedRedis
    main_port: int
    other: EmbeddedRedis
    other_port: int

    async def follow(self) -> None:
        """The second server has all that the first one has, and what comes."""
        await self._order(self.other, "REPLICAOF", "127.0.0.1", self.main_port)
        await until_followed(self.bed.redis)

    async def fail_over(self) -> None:
        """Fail over after the replica has all that was written. Without a replica a write may be lost with the first
        server.
        """
        async with Redis.from_url(self.main.url) as main, Redis.from_url(self.other.url) as other:

            async def has_all() -> bool:
                here, there = await main.info("replication"), await other.info("replication")
                return bool(there["slave_repl_offset"] == here["master_repl_offset"])

            await until(has_all, limit_s=60)
        await self._order(self.other, "REPLICAOF", "NO", "ONE")
        await self._order(self.main, "REPLICAOF", "127.0.0.1", self.other_port)

    def lead_on(self) -> None:
        new = self.address.with_suffix(".new")
        new.symlink_to(self.other.url.removeprefix("unix://"))
        new.replace(self.address)

    @staticmethod
    async def _order(server: EmbeddedRedis, *words: object) -> None:
        async with Redis.from_url(server.url) as redis:
            await redis.execute_command(*words)


@pytest.fixture(params=[(kind, replicas) for kind in KINDS[1:] for replicas in (0, 1)], ids=str)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    kind, replicas = request.param
    ports = free_port(), free_port()
    at_once = "--repl-diskless-sync-delay", "0", "--appendonly", "no"
    with (
        EmbeddedRedis(tmp_path / "a", binary=redis_binary(kind), options=("--port", str(ports[0]), *at_once)) as main,
        EmbeddedRedis(tmp_path / "b", binary=redis_binary(kind), options=("--port", str(ports[1]), *at_once)) as other,
    ):
        address = tmp_path / "address.sock"
        address.symlink_to(main.url.removeprefix("unix://"))
        settings = with_settings(
            replicas=replicas, connections_max=CONNECTIONS, call_timeout_ms=2000, accepts_loss=True
        )
        bed = RedisBed(f"unix://{address}", settings)
        add_user(other.url, bed.deployment)
        made = Pair(bed, address, main, ports[0], other, ports[1])
        await made.follow()
        yield made
        await bed.close()


async def with_all_connections(call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(*(call() for _ in range(CONNECTIONS)))


async def a_process_at_work(pair: Pair) -> Claimed:
    """A request with a token, in a pool all of whose connections lead to the first server."""
    pool = pair.bed.pool
    _, owned = await started(pair.bed, "a")
    await pool.commit([entry(owned["a.0"], 0, 5)])
    for call in (lambda: pool.status("a.0"), lambda: pool.read("a.0", 0), lambda: pool.read_many({"a.0": 0})):
        await with_all_connections(call)
    await with_all_connections(lambda: pool.read_many({"a.0": 0}, for_all=True))
    return owned["a.0"]


async def test_one_refused_write_leads_every_connection_to_the_new_master(pair: Pair) -> None:
    one, pool = await a_process_at_work(pair), pair.bed.pool
    await pair.fail_over()
    pair.lead_on()
    with pytest.raises(PoolUnavailable, match="READONLY"):
        await pool.commit([entry(one, 1, 6)])
    await pool.commit([entry(one, 1, 6)])
    for read in (lambda: pool.read("a.0", 0), lambda: pool.read_many({"a.0": 0}, for_all=True)):
        await with_all_connections(read)
    assert [token.id for token in (await pool.read("a.0", 0)).tokens] == [5, 6]
    statuses = await asyncio.gather(*(pool.status("a.0") for _ in range(CONNECTIONS)))
    assert {status.tokens for status in statuses} == {2}


async def test_a_reading_client_moves_to_the_new_master_by_its_server_check(pair: Pair) -> None:
    """Reads of a demoted server look right, and may never change again."""
    one, pool = await a_process_at_work(pair), pair.bed.pool
    await pair.fail_over()
    pair.lead_on()
    elsewhere = RedisPool(pair.bed.url, pair.bed.deployment, pair.bed.settings)
    await elsewhere.commit([entry(one, 1, 6)])
    await elsewhere.close()
    with pytest.raises(PoolUnavailable, match="is a replica"):
        await pool.sweep()
    await pool.sweep()
    assert (await pool.status("a.0")).tokens == 2


async def test_nothing_breaks_while_the_address_still_resolves_to_the_demoted_server(pair: Pair) -> None:
    one, pool = await a_process_at_work(pair), pair.bed.pool
    await pair.fail_over()
    for _ in range(3):
        for call in (pool.commit([entry(one, 1, 6)]), pool.submit(submission("b")), pool.sweep()):
            with pytest.raises(PoolUnavailable):
                await call
    pair.lead_on()
    await pool.commit([entry(one, 1, 6)])
    assert (await pool.status("a.0")).tokens == 2
