"""Reader entries of all open connections, renewed by one task that also carries out what is due in the pool.

A disconnect takes out its own entry, nothing else: the pool's sweep ends a request that nobody reads (protocol: sweep).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import takewhile

from orca.core.domain.errors import PoolUnavailable
from orca.core.process.batches import batches
from orca.pool.api import RequestPool

log = logging.getLogger(__name__)

RENEW_MAX = 256
"""Entries that one call renews: Redis and this process turn to others in between."""
_RENEWALS_A_LEASE = 3
"""Two may fail, or come late, before a client counts as gone."""


class Readers:
    """The (parent, reader) entries of this process. `run` is one task of the process.

    Args: lease_s: how long an entry lives that is not renewed.
    """

    def __init__(self, pool: RequestPool, round_seconds: float, *, lease_s: float) -> None:
        self._pool = pool
        self._round_seconds = round_seconds
        self._rest_s = max(lease_s / _RENEWALS_A_LEASE - round_seconds, 0.0)
        # Open entries and when they were renewed, on the loop's clock; those come first whose turn comes first.
        self._open: dict[tuple[str, str], float] = {}
        self._detaching: set[asyncio.Task[None]] = set()

    def add(self, parent: str, reader: str) -> None:
        """Renew an entry from now on; the pool has it already, with a full lease."""
        self._open[parent, reader] = asyncio.get_running_loop().time()

    def remove(self, parent: str, reader: str, *, lapses: bool = False) -> None:
        """Take an entry out of the pool, in the background. If that fails it lapses, being renewed no more.

        Args: lapses: leave it to that.
        """
        self._open.pop((parent, reader), None)
        if not lapses:
            task = asyncio.create_task(self._detach(parent, reader))
            self._detaching.add(task)
            task.add_done_callback(self._detaching.discard)

    async def run(self) -> None:
        """Until cancelled: renew those whose turn it is, and sweep, once a round each. Neither waits for the other."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._rounds(self._renew, "renewing readers"))
            group.create_task(self._rounds(self._pool.sweep, "sweeping"))

    async def _rounds(self, work: Callable[[], Awaitable[None]], doing: str) -> None:
        was_away = False
        while True:
            try:
                await work()
                was_away = False
            except PoolUnavailable as error:
                if not was_away:
                    log.warning("pool away, no %s: %s", doing, error)
                was_away = True
            except Exception:
                log.exception("a round of %s failed", doing)
            await asyncio.sleep(self._round_seconds)

    async def _renew(self) -> None:
        """Entries whose call fails stay in front: the next round comes for them again."""
        now = asyncio.get_running_loop().time()
        due = list(takewhile(lambda entry: self._open[entry] <= now - self._rest_s, self._open))
        for entries in batches(due, RENEW_MAX):
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
            log.info("reader entry left to lapse", extra={"request_id": parent})
