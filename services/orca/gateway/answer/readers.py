"""Renews the reader entries of all open connections in the pool, and calls the pool's sweep.

A client that disconnects only loses its own entry. The pool's sweep ends a request that nobody reads (protocol: sweep).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import takewhile

from orca.core.domain.errors import PoolUnavailable
from orca.core.process.batched import batched
from orca.pool.api import RequestPool

log = logging.getLogger(__name__)

RENEW_MAX = 256
"""Entries that one call renews: Redis and this process turn to others in between."""
_RENEWALS_A_LEASE = 3
"""Two of them may fail, or come late, before a client counts as gone."""


class Readers:
    """The (parent, reader) entries of this process. `run` is one task of the process.

    Args: lease_s: lifetime of an entry that is not renewed.
    """

    def __init__(self, pool: RequestPool, round_seconds: float, *, lease_s: float) -> None:
        self._pool = pool
        self._round_seconds = round_seconds
        self._rest_s = max(lease_s / _RENEWALS_A_LEASE - round_seconds, 0.0)
        # Open entries and when they were renewed, on the loop's clock, longest ago first.
        self._open: dict[tuple[str, str], float] = {}
        self._detaching: set[asyncio.Task[None]] = set()

    def add(self, parent: str, reader: str) -> None:
        """Renew an entry from now on. The pool has it already, with a full lease."""
        self._open[parent, reader] = asyncio.get_running_loop().time()

    def remove(self, parent: str, reader: str, *, lapses: bool = False) -> None:
        """Remove an entry from the pool in the background. If that fails, its lease ends, because nobody renews it.

        Args: lapses: do not remove it, let its lease end.
        """
        self._open.pop((parent, reader), None)
        if not lapses:
            task = asyncio.create_task(self._detach(parent, reader))
            self._detaching.add(task)
            task.add_done_callback(self._detaching.discard)

    async def run(self) -> None:
        """Renew due entries and sweep until cancelled, each once per round. Neither waits for the other."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._rounds(self._renew, "renewing readers"))
            group.create_task(self._rounds(self._pool.sweep, "sweeping"))

    async def _rounds(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        was_away = False
        while True:
            try:
                await work()
                was_away = False
            except PoolUnavailable as error:
                if not was_away:
                    log.warning("pool away, %s waits: %s", name, error)
                was_away = True
            except Exception:
                log.exception("a round of %s failed", name)
            await asyncio.sleep(self._round_seconds)

    async def _renew(self) -> None:
        """Renew entries that are due. Those whose call fails stay in front, so the next round renews them."""
        now = asyncio.get_running_loop().time()
        due = list(takewhile(lambda entry: self._open[entry] <= now - self._rest_s, self._open))
        for entries in batched(due, RENEW_MAX):
            await self._pool.renew(entries)
            for entry in entries:
                if self._open.pop(entry, None) is not None:  # its client may have left meanwhile
                    self._open[entry] = now

    async def settle(self) -> None:
        """Wait until entries that were removed are out of the pool."""
        await asyncio.gather(*self._detaching)

    async def _detach(self, parent: str, reader: str) -> None:
        try:
            await self._pool.detach(parent, reader)
        except PoolUnavailable:
            log.info("a reader entry could not be removed, its lease will end", extra={"request_id": parent})
