"""A long answer of many choices is fetched whole, and while it is, the scheduler's heartbeats come through."""

import asyncio
import contextlib
import time

import pytest
from pool_beds import RedisBed, Scheduler, started

from orca.core.request import End, FinishReason, Token
from orca.gateway.state import read_logs
from orca.pool.api import CommitEntry
from orca.pool.redis_pool import RedisPool

READERS = 8
LATE_S = 1.0  # of a heartbeat: wide, since the processors are shared; the seat's lease is 3 s
TOKENS = 1_000


async def write(bed: RedisBed, choices: int) -> Scheduler:
    scheduler, owned = await started(bed, "a", n=choices, max_new_tokens=TOKENS)
    owned |= await scheduler.take(free_slots=10**6, total_slots=10**6, most=choices)
    tokens = tuple(Token(1_000 + i) for i in range(TOKENS))
    end = End(FinishReason.LENGTH, TOKENS)
    for claimed in owned.values():
        entry = CommitEntry(request_id=claimed.request.id, claim=claimed.claim, index=0, tokens=tokens, end=end)
        await bed.pool.commit([entry])
    return scheduler


async def beat(scheduler: Scheduler, pool: RedisPool, seconds: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await pool.heartbeat(scheduler.caller)
        seconds.append(time.perf_counter() - before)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("choices", [16, pytest.param(128, marks=pytest.mark.prove)])
async def test_a_long_answer_is_fetched_whole_while_heartbeats_come_through(redis_bed: RedisBed, choices: int) -> None:
    scheduler, seconds = await write(redis_bed, choices), []
    requests = (await redis_bed.pool.parent("a")).requests
    beating = asyncio.create_task(beat(scheduler, redis_bed.pool, seconds))
    found = await asyncio.gather(*(read_logs(redis_bed.pool, requests) for _ in range(READERS)))
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    for logs in found:
        assert [len(log.tokens) for log in logs.values()] == [TOKENS] * choices
        assert all(log.end for log in logs.values())
    assert seconds
    assert max(seconds) < LATE_S
