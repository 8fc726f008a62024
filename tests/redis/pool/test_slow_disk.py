"""The disk hangs: fsyncs take seconds, and meanwhile Redis keeps in its own memory what it answers."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from orca.core.domain.errors import PoolNotDurable, PoolUnavailable
from orca.pool.records import Claimed, OnDisconnect
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from support.pool.beds import REVISION, RedisBed, entry, started, submission, with_settings
from support.pool.disks import SlowDisk
from support.pool.kinds import KINDS
from support.waiting import until

LIMIT_S = 60.0
ROUND_S = 0.3
HANGS_MS = 4_000  # an fsync: Redis writes after two seconds, whether it has ended or not


Found = tuple[RedisBed, EmbeddedRedis, SlowDisk]


@pytest.fixture(params=KINDS[1:])
async def found(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Found]:
    disk = SlowDisk(tmp_path, request.param)
    with EmbeddedRedis(tmp_path / "redis", binary=disk.binary) as server:
        bed = RedisBed(server.url, with_settings(max_queued=10**6))
        await bed.pool.set_revision(REVISION, 1)
        yield bed, server, disk
        disk.heal()
        await bed.close()


@contextlib.asynccontextmanager
async def rounds(bed: RedisBed) -> AsyncIterator[None]:
    """The sweeps of a gateway go on, whatever its other calls wait for."""

    async def sweep() -> None:
        while True:
            await bed.pool.sweep()
            await asyncio.sleep(ROUND_S)

    task = asyncio.create_task(sweep())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def is_accepted(bed: RedisBed) -> bool:
    try:
        await bed.pool.submit(submission(secrets.token_hex(4)))
    except PoolNotDurable:
        return False
    return True


async def is_refused(bed: RedisBed) -> bool:
    return not await is_accepted(bed)


async def test_new_work_is_refused_while_fsyncs_hang_and_accepted_after_the_disk_recovers(found: Found) -> None:
    bed, _, disk = found
    disk.slow(HANGS_MS)
    async with rounds(bed):
        await until(lambda: is_refused(bed), LIMIT_S)
        disk.heal()
        await until(lambda: is_accepted(bed), LIMIT_S)


async def hang(bed: RedisBed, disk: SlowDisk) -> None:
    """Wait until an fsync is in flight that does not end by itself within a test."""
    disk.slow(10 * HANGS_MS)

    async def is_syncing() -> bool:
        await bed.redis.set("something", "to write")
        return bool((await bed.redis.info("persistence"))["aof_pending_bio_fsync"])

    await until(is_syncing, LIMIT_S)


async def test_writes_during_a_hanging_fsync_are_answered(found: Found) -> None:
    bed, server, disk = found
    await hang(bed, disk)
    # Nobody sweeps here, so the door stays open.
    await bed.pool.submit(submission("a", on_disconnect=OnDisconnect.KEEP))
    assert (await bed.redis.info("persistence"))["aof_pending_bio_fsync"]
    server.kill()
    disk.heal()
    server.restart()
    await bed.redis.connection_pool.disconnect()
    assert await bed.redis.exists(bed.keys.named("req", "a.0"))


TOLD_ON: dict[str, Callable[[RedisPool, Claimed], Awaitable[object]]] = {
    "submit": lambda pool, _: pool.submit(submission(secrets.token_hex(4))),
    "submit again": lambda pool, _: pool.submit(submission("a")),
    "parent": lambda pool, _: pool.parent("a"),
    "conversation": lambda pool, _: pool.conversation("a"),
    "read": lambda pool, _: pool.read("a.0", 0),
    "read_many": lambda pool, _: pool.read_many({"a.0": 0}, for_all=True),
    "status": lambda pool, _: pool.status("a.0"),
    "attach": lambda pool, _: pool.attach("a", "reader"),
    "commit": lambda pool, claimed: pool.commit([entry(claimed, 0, 5)]),
    "cancel": lambda pool, _: pool.cancel("b"),
    "forget": lambda pool, _: pool.forget("b"),
    "set_revision": lambda pool, _: pool.set_revision(REVISION, 1),
    "promise_slots": lambda pool, _: pool.promise_slots(REVISION, 1000),
    "set_promise": lambda pool, _: pool.set_promise(REVISION, 900, expected=1000),
    "larger_requests": lambda pool, _: pool.larger_requests(REVISION, 900),
    "set_schema": lambda pool, _: pool.set_schema(2),
    "keep_result": lambda pool, _: pool.keep_result("job", b"{}"),
}


async def test_no_call_reports_what_redis_does_not_write_in_time(found: Found) -> None:
    bed, _, disk = found
    _, owned = await started(bed, "a")
    hasty = RedisPool(bed.url, bed.deployment, dataclasses.replace(bed.settings, call_timeout_ms=300))
    await hang(bed, disk)
    for call in TOLD_ON.values():
        # Now and then it comes in time: Redis writes every two seconds.
        await until(lambda: is_not_written(call(hasty, owned["a.0"])), LIMIT_S)  # noqa: B023 - used in this turn only
    await hasty.close()


async def is_not_written(call: Awaitable[object]) -> bool:
    try:
        await call
    except PoolUnavailable as error:
        return "append-only file in time" in str(error)
    return False


async def test_a_deployment_that_accepts_loss_waits_for_no_disk(found: Found) -> None:
    bed, _, disk = found
    careless = RedisPool(bed.url, bed.deployment, dataclasses.replace(bed.settings, accepts_loss=True))
    await hang(bed, disk)

    # Nobody else writes: behind an answer that was waited for, nothing is held back.
    async def is_answered_before_it_is_written() -> bool:
        await careless.submit(submission(secrets.token_hex(4)))
        return bool((await bed.redis.info("persistence"))["aof_buffer_length"])

    await until(is_answered_before_it_is_written, LIMIT_S)
    await careless.close()
