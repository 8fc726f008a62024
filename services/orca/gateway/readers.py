"""Reader entries of all open connections, renewed by one task that also carries out what is due in the pool.

A disconnect takes out its own entry, nothing else: the pool's sweep ends a request that nobody reads (protocol: sweep).
"""

import asyncio
import logging

from orca.core.batches import batches
from orca.core.errors import PoolUnavailable
from orca.pool.api import Pool

log = logging.getLogger(__name__)

RENEW_MAX = 256
"""Entries that one call renews: Redis and this process turn to others in between."""


class Readers:
    """The (parent, reader) entries of this process. `run` is one task of the process."""

    def __init__(self, pool: Pool, round_seconds: float) -> None:
        self._pool = pool
        self._round_seconds = round_seconds
        self._open: set[tuple[str, str]] = set()
        self._detaching: set[asyncio.Task[None]] = set()

    def add(self, parent: str, reader: str) -> None:
        """Renew an entry from now on; the pool has it already."""
        self._open.add((parent, reader))

    def remove(self, parent: str, reader: str) -> None:
        """Take an entry out of the pool, in the background. If that fails it lapses, being renewed no more."""
        self._open.discard((parent, reader))
        task = asyncio.create_task(self._detach(parent, reader))
        self._detaching.add(task)
        task.add_done_callback(self._detaching.discard)

    async def run(self) -> None:
        """Until cancelled: renew and sweep, once a round."""
        was_away = False
        while True:
            try:
                await self._renew()
                await self._pool.sweep()
                was_away = False
            except PoolUnavailable as error:
                if not was_away:
                    log.warning("pool away, readers are not renewed: %s", error)
                was_away = True
            except Exception:
                log.exception("a round of renewing readers failed")
            await asyncio.sleep(self._round_seconds)

    async def _renew(self) -> None:
        for entries in batches(list(self._open), RENEW_MAX):
            await self._pool.renew(entries)

    async def settle(self) -> None:
        """Wait until entries that were removed are out of the pool."""
        await asyncio.gather(*self._detaching)

    async def _detach(self, parent: str, reader: str) -> None:
        try:
            await self._pool.detach(parent, reader)
        except PoolUnavailable:
            log.info("reader entry left to lapse", extra={"request_id": parent})
