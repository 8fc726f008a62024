"""Redis killed with -9 under load and started again: no submit and no commit that was acknowledged is missing."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pool_beds import REVISION, Scheduler, entry, submission, whole_log, with_settings
from pool_kinds import KINDS, redis_binary

from orca.core.errors import PoolUnavailable
from orca.pool.api import CommitAnswer, OnDisconnect
from orca.pool.embedded import EmbeddedRedis
from orca.pool.redis_pool import RedisPool

KILLS = 3
REQUESTS = 4


@dataclass
class Acknowledged:
    submitted: list[str] = field(default_factory=list)
    committed: int = 0  # tokens of each request that a commit said were applied


class PoolOnly:
    """What a Scheduler of pool_beds needs of a bed."""

    def __init__(self, pool: RedisPool) -> None:
        self.pool = pool


@pytest.fixture(params=[(kind, fsync) for kind in KINDS[1:] for fsync in ("everysec", "always")], ids="-".join)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    kind, fsync = request.param
    with EmbeddedRedis(tmp_path, binary=redis_binary(kind), fsync=fsync) as server:
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


async def test_nothing_acknowledged_is_lost_by_kills(server: EmbeddedRedis) -> None:
    # Calls under the kills give up soon; what is asked before and behind them has time on a busy machine too.
    pool, seen = RedisPool(server.url, "d", with_settings(call_timeout_ms=500)), Acknowledged()
    patient = RedisPool(server.url, "d", with_settings(call_timeout_ms=20_000))
    await patient.set_revision(REVISION, 1)
    for number in range(REQUESTS):
        await patient.submit(submission(f"r{number}", max_new_tokens=10**6, on_disconnect=OnDisconnect.KEEP))
    scheduler = Scheduler(PoolOnly(patient))
    await scheduler.enter()
    load = [asyncio.create_task(commit_on(pool, scheduler, seen)), asyncio.create_task(submit_on(pool, seen))]
    for _ in range(KILLS):
        reached = seen.committed + 50
        async with asyncio.timeout(30):
            while seen.committed < reached:
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in load)
        server.kill()
        await asyncio.to_thread(server.restart)
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    for number in range(REQUESTS):
        tokens = [token.id for token in await whole_log(patient, f"r{number}.0")]
        assert len(tokens) >= seen.committed
        assert tokens == list(range(len(tokens)))
    assert len(seen.submitted) > KILLS
    for request_id in seen.submitted:
        await patient.status(request_id)
    await pool.close()
    await patient.close()
