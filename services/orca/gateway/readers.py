"""Reader entries of all open connections, renewed by one task that also carries out what is due in the pool.

A disconnect takes out its own entry, nothing else: the pool's sweep ends a request that nobody reads (protocol: sweep).
"""

import asyncio
import logging
from collections import deque

from orca.core.batches import batches
from orca.core.errors import PoolUnavailable
from orca.pool.api import Pool

log = logging.getLogger(__name__)

RENEW_MAX = 256
"""Entries that one call renews: Redis and this process turn to others in between."""


_RENEWALS_A_LEASE = 3


class Readers:
    """The (parent, reader) entries of this process. `run` is one task of the process.

    Args: lease_s: how long an entry lives that is not renewed.
    """

    def __init__(self, pool: Pool, round_seconds: float, *, lease_s: float) -> None:
        self._pool = pool
        self._round_seconds = round_seconds
        # Open entries, by the round that renews them: the next one's come first.
        turns = max(1, int(lease_s / _RENEWALS_A_LEASE / round_seconds))
        self._turns: deque[set[tuple[str, str]]] = deque(set() for _ in range(turns))
        self._detaching: set[asyncio.Task[None]] = set()

    def add(self, parent: str, reader: str) -> None:
        """Renew an entry from now on; the pool has it already, with a full lease."""
        self._turns[-1].add((parent, reader))

    def remove(self, parent: str, reader: str, *, has_ended: bool = False) -> None:
        """Take an entry out of the pool, in the background. If that fails it lapses, being renewed no more.

        Args: has_ended: so do those of ended calls, which nobody waits for: the pool keeps such calls for longer.
        """
        for turn in self._turns:
            turn.discard((parent, reader))
        if not has_ended:
            task = asyncio.create_task(self._detach(parent, reader))
            self._detaching.add(task)
            task.add_done_callback(self._detaching.discard)

    async def run(self) -> None:
        """Until cancelled: renew those whose turn it is and sweep, once a round."""
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
        turn = self._turns[0]
        self._turns.rotate(-1)
        for entries in batches(list(turn), RENEW_MAX):
            await self._pool.renew(entries)

    async def settle(self) -> None:
        """Wait until entries that were removed are out of the pool."""
        await asyncio.gather(*self._detaching)

    async def _detach(self, parent: str, reader: str) -> None:
        try:
            await self._pool.detach(parent, reader)
        except PoolUnavailable:
            log.info("reader entry left to lapse", extra={"request_id": parent})
