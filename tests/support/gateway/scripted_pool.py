"""A pool whose counts the test sets."""

import asyncio
from typing import Any

from orca.core.domain.request import SCHEMA
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import PoolStats


def stats(*, queued: int = 0, ended_ever: int = 0, queued_max: int = 100, **fields: Any) -> PoolStats:
    """Return counts of a pool, with defaults for all that a test does not name."""
    rest = {"owned": 0, "ended": 0, "queued_prompt_tokens": 0, "oldest_wait_ms": 0, "bytes_reserved": 0, "bytes_max": 1}
    rest |= {
        "revision": None,
        "generation": None,
        "wall_ms": 0,
        "replaced_revisions": (),
        "replaced_unfinished": 0,
        "promised_slots": None,
        "block_tokens": None,
        "offered_slots": None,
        "groups": (),
        "groups_formed": (),
        "groups_in_force": (),
        "schema": SCHEMA,
        "newer_records": 0,
        "unserved_ever": 0,
        "by_order": None,
    }
    rest |= {"queued_prompt_tokens_max": 100}
    return PoolStats(**{**rest, **fields}, queued=queued, ended_ever=ended_ever, queued_max=queued_max)


class ScriptedPool(MemoryPool):
    """Stands in for a pool: `stats` returns, or raises, what the test has set, when the test allows it."""

    def __init__(self, told: PoolStats | Exception) -> None:
        super().__init__(self)
        self.told = told
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def wall_ms(self) -> int:
        return 0

    async def stats(self) -> PoolStats:
        self.asked += 1
        await self.may_answer.wait()
        if isinstance(self.told, Exception):
            raise self.told
        return self.told
