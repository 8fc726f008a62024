"""A long answer of many choices is fetched whole, and while it is, the scheduler's heartbeats come through."""

import asyncio
import contextlib
from collections.abc import Mapping

import pytest

from orca.core.domain.request import End, FinishReason, Token
from orca.gateway.routes.request_state import read_logs
from orca.pool.contract import READ_TOKENS_MAX
from orca.pool.records import CommitEntry, LogSlice
from orca.pool.redis.pool import RedisPool
from support.pool.beds import RedisBed, Scheduler, started

READERS = 8
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


class Beats:
    """Heartbeats one after the other, without a pause."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.answered = 0

    async def run(self) -> None:
        while True:
            await self._scheduler.heartbeat()
            self.answered += 1


class Reader:
    """The pool as one who fetches a long answer sees it: page by page, each with the heartbeats answered by then."""

    def __init__(self, pool: RedisPool, beats: Beats) -> None:
        self._pool = pool
        self._beats = beats
        self.pages: list[tuple[int, int]] = []  # tokens, heartbeats

    async def read_many(self, starts: Mapping[str, int]) -> dict[str, LogSlice | None]:
        page = await self._pool.read_many(starts)
        self.pages.append((sum(len(part.tokens) for part in page.values() if part), self._beats.answered))
        return page

    @property
    def beats_while_reading(self) -> int:
        return self.pages[-1][1] - self.pages[0][1]


@pytest.mark.parametrize("choices", [16, pytest.param(128, marks=pytest.mark.prove)])
async def test_a_long_answer_is_read_completely_while_heartbeats_pass(redis_bed: RedisBed, choices: int) -> None:
    beats = Beats(await write(redis_bed, choices))
    requests = (await redis_bed.pool.parent("a")).requests
    readers = [Reader(redis_bed.pool, beats) for _ in range(READERS)]
    beating = asyncio.create_task(beats.run())
    found = await asyncio.gather(*(read_logs(reader, requests) for reader in readers))
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    for logs in found:
        assert [len(log.tokens) for log in logs.values()] == [TOKENS] * choices
        assert all(log.end for log in logs.values())
    for reader in readers:
        assert max(tokens for tokens, _ in reader.pages) <= READ_TOKENS_MAX
        # All readers' pages go through few connections: in the time of one of each, several heartbeats come through.
        assert reader.beats_while_reading >= len(reader.pages) > choices * TOKENS // READ_TOKENS_MAX
