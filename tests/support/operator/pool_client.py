"""Does in the pool of a shop what its gateways and schedulers would."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from orca.core.domain.request import Request, SamplingParams
from orca.pool.api import RequestPool
from orca.pool.records import Caller, OnDisconnect, PoolStats, Submission
from orca.pool.redis.pool import RedisPool
from support.waiting import PATIENT_POOL

T = TypeVar("T")


class PoolClient:
    """Each call on a connection of its own."""

    def __init__(self, login: Mapping[str, str], namespace: str, folder: Path, name: str = "shop") -> None:
        """Args: login: URL, user and password. folder: for the password."""
        file = folder / "password"
        file.write_text(login["password"])
        self._url, self._word = login["url"], f"{namespace}/{name}"
        # So that the next sweep forgets what has ended.
        self._settings = replace(
            PATIENT_POOL, user=login["user"], password_file=str(file), retention_ms=1, retention_least_ms=1
        )

    def do(self, work: Callable[[RequestPool], Awaitable[T]]) -> T:
        async def connected() -> T:
            pool = RedisPool(self._url, self._word, self._settings)
            try:
                return await work(pool)
            finally:
                await pool.close()

        return asyncio.run(connected())

    @property
    def stats(self) -> PoolStats:
        return self.do(lambda pool: pool.stats())

    def form(self, revision: str, generation: int, slots: int = 100) -> int:
        """Report a formed group, as a scheduler does. Returns: the promise in force."""
        promised = self.do(lambda pool: pool.promise_slots(revision, slots))
        assert self.do(lambda pool: pool.set_revision(revision, generation)) == revision
        return promised

    def serve(self, revision: str, slots: int) -> None:
        """Report a serving group, as a scheduler does, for as long as its lease."""
        caller = Caller(group="test-group", process="test-process", revision=revision)

        async def say(pool: RequestPool) -> None:
            await pool.enter(caller, 1, reported_epoch=0)
            await pool.heartbeat(caller, offered_slots=slots)

        self.do(say)

    def submit(self, parent: str, revision: str, need: int = 2, deadline_ms: int | None = None) -> None:
        """A request that keeps waiting, until its deadline if it has one. Args: need: slots, two at least."""
        request = Request(
            parent=parent,
            choice=0,
            revision=revision,
            prompt=(1,),
            max_new_tokens=need - 1,
            sampling=SamplingParams(),
            deadline_ms=deadline_ms,
        )
        wanted = Submission(parent=parent, requests=(request,), reader="test", on_disconnect=OnDisconnect.KEEP)
        self.do(lambda pool: pool.submit(wanted))

    def cancel(self, parent: str) -> None:
        self.do(lambda pool: pool.cancel(parent))
