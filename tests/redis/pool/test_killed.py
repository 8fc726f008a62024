"""Redis killed with -9 under load and started again: nothing that was acknowledged, or shown to a reader, is lost."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from orca.core.domain.errors import PoolUnavailable, UnknownRequest
from orca.pool.records import CommitAnswer, OnDisconnect
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from support.pool.beds import REVISION, Scheduler, entry, submission, whole_log, with_settings
from support.pool.disks import SlowDisk
from support.pool.kinds import KINDS, redis_binary
from support.waiting import until

KILLS = 3
REQUESTS = 4
FSYNC_MS = 400  # of the slow disk, once a second


@dataclass
class Acknowledged:
    submitted: list[str] = field(default_factory=list)
    committed: int = 0  # tokens of each request that a commit said were applied
    shown: int = 0  # tokens of the first request that a reader was given

    @property
    def answers(self) -> int:
        return len(self.submitted) + self.committed + self.shown


class PoolOnly:
    """The parts of a bed that a Scheduler of beds.py needs."""

    def __init__(self, pool: RedisPool) -> None:
        self.pool = pool


@pytest.fixture(
    params=[
        "everysec",
        "always",
        "everysec, slow disk",
        pytest.param("everysec, slow disk, rewriting", marks=pytest.mark.prove),
    ]
)
def disk(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def is_slow(disk: str) -> bool:
    return "slow disk" in disk


@pytest.fixture
def is_rewriting(disk: str) -> bool:
    return disk.endswith("rewriting")


@pytest.fixture(params=KINDS[1:])
def server(request: pytest.FixtureRequest, tmp_path: Path, disk: str, is_slow: bool) -> Iterator[EmbeddedRedis]:
    binary, fsync = redis_binary(request.param), disk.partition(",")[0]
    if is_slow:
        slow = SlowDisk(tmp_path, request.param)
        slow.slow(FSYNC_MS)
        binary = slow.binary
    with EmbeddedRedis(tmp_path / "redis", binary=binary, fsync=fsync) as server:
        yield server


async def submit_on(pool: RedisPool, seen: Acknowledged) -> None:
    for number in itertools.count():
        with contextlib.suppress(PoolUnavailable):
            await pool.submit(submission(f"later{number}", on_disconnect=OnDisconnect.KEEP))
            seen.submitted.append(f"later{number}.0")


async def commit_on(pool: RedisPool, scheduler: Scheduler, seen: Acknowledged) -> None:
    """One token a step to each request; a step without an answer is sent again, as the scheduler does."""
    owned = (await scheduler.take(free_slots=10**9, total_slots=10**9, most=REQUESTS)).values()
    assert len(owned) == REQUESTS
    index = 0
    while True:
        with contextlib.suppress(PoolUnavailable):
            answers = await pool.commit([entry(claimed, index, index) for claimed in owned])
            assert set(answers) <= {CommitAnswer.APPLIED, CommitAnswer.ALREADY_THERE}
            index += 1
            seen.committed = index


async def read_on(pool: RedisPool, seen: Acknowledged) -> None:
    while True:
        with contextlib.suppress(PoolUnavailable):
            seen.shown += len((await pool.read("r0.0", seen.shown)).tokens)


async def rewrite_on(server: EmbeddedRedis) -> None:
    """One rewrite of the append-only file behind the other."""
    async with Redis.from_url(server.url, socket_timeout=20) as redis:
        while True:
            # Away, or at it already.
            with contextlib.suppress(RedisError):
                await redis.bgrewriteaof()
            await asyncio.sleep(0.05)


async def wait_until_answers_are_at_stake(server: EmbeddedRedis, seen: Acknowledged, is_rewriting: bool) -> None:
    """An fsync is under way, and calls have had time to be answered meanwhile, if they are answered at all.

    Args: is_rewriting: a rewrite has ended before.
    """
    async with Redis.from_url(server.url) as redis:

        async def is_syncing() -> bool:
            info = await redis.info("persistence")
            return info["aof_pending_bio_fsync"] and (info["aof_last_rewrite_time_sec"] >= 0 or not is_rewriting)

        await until(is_syncing, limit_s=60)
    before = seen.answers
    with contextlib.suppress(TimeoutError):
        await until(lambda: seen.answers > before + 50, limit_s=FSYNC_MS / 2000)


@contextlib.asynccontextmanager
async def load(
    server: EmbeddedRedis, patient: RedisPool, seen: Acknowledged, is_rewriting: bool
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Submits, commits and reads without a pause; they give up soon under the kills, and none may end by itself."""
    pool = RedisPool(server.url, "d", with_settings(call_timeout_ms=500, max_queued=10**6))
    scheduler = Scheduler(PoolOnly(patient))
    await scheduler.enter()
    parts = [commit_on(pool, scheduler, seen), submit_on(pool, seen), read_on(pool, seen)]
    if is_rewriting:
        parts.append(rewrite_on(server))
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()
    assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == []


async def lost_of(patient: RedisPool, seen: Acknowledged) -> dict[str, int]:
    """Return the entries that were seen and are missing now, by kind."""
    lengths = []
    for number in range(REQUESTS):
        tokens = [token.id for token in await whole_log(patient, f"r{number}.0")]
        assert tokens == list(range(len(tokens)))
        lengths.append(len(tokens))
    found = await asyncio.gather(*map(patient.status, seen.submitted), return_exceptions=True)
    return {
        "submits": sum(isinstance(status, UnknownRequest) for status in found),
        "tokens": sum(max(0, seen.committed - length) for length in lengths),
        "tokens shown": max(0, seen.shown - lengths[0]),
    }


async def test_kills_lose_nothing_that_was_acknowledged(
    server: EmbeddedRedis, is_slow: bool, is_rewriting: bool
) -> None:
    # What is asked before and behind the kills has time on a busy machine too.
    patient, seen = RedisPool(server.url, "d", with_settings(call_timeout_ms=20_000)), Acknowledged()
    await patient.set_revision(REVISION, 1)
    for number in range(REQUESTS):
        await patient.submit(submission(f"r{number}", max_new_tokens=10**6, on_disconnect=OnDisconnect.KEEP))
    async with load(server, patient, seen, is_rewriting) as tasks:
        for _ in range(KILLS):
            reached = seen.committed + 50
            await until(lambda: seen.committed >= reached or any(task.done() for task in tasks), limit_s=60)  # noqa: B023
            if is_slow:
                await wait_until_answers_are_at_stake(server, seen, is_rewriting)
            server.kill()
            await asyncio.to_thread(server.restart)
    assert min(len(seen.submitted), seen.shown) > KILLS
    assert await lost_of(patient, seen) == {"submits": 0, "tokens": 0, "tokens shown": 0}
    await patient.close()
