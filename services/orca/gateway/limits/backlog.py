"""The pool's backlog as this process last heard of it, and the rate at which requests end.

The pool is polled at most four times a second, whatever comes in: all who want its counts share one answer.
"""

import asyncio
import collections
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from orca.core.domain.errors import PoolUnavailable
from orca.pool.api import RequestPool
from orca.pool.records import PoolStats

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""Counts older than this are polled again. A call does not wait for an answer that takes longer."""

EMPTY_SECONDS = 10.0
"""No call waits for newer counts if the queue was empty at most this long ago. If the queue has filled up since, the
pool refuses the call itself.
"""

RATE_WINDOW_SECONDS = 30.0
RATE_LEAST_SECONDS = 3.0
RATE_LEAST_ENDS = 10
RATE_GAP_SECONDS = 2.0
"""A rate needs counts over the least time, with at least that many ends in it, and without a longer gap between two."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    ended: int  # requests that have ended so far
    unserved: int  # those of them that ended while they waited


class EndRate:
    """Requests ended per second, measured only while others waited: otherwise the rate is that of the arrivals."""

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque()

    def add(self, at_s: float, stats: PoolStats) -> None:
        samples = self._samples
        if stats.queued == 0 or (samples and at_s - samples[-1].at_s > RATE_GAP_SECONDS):
            samples.clear()
        if stats.queued:
            samples.append(_Sample(at_s, stats.ended_ever, stats.unserved_ever))
        while samples and at_s - samples[0].at_s > RATE_WINDOW_SECONDS:
            samples.popleft()

    @property
    def per_second(self) -> float | None:
        """Requests that leave the pool; None until enough was seen."""
        return self._rate(lambda sample: sample.ended)

    @property
    def served_per_second(self) -> float | None:
        """The same without those that ended while they waited: an order of claims may pass them over."""
        return self._rate(lambda sample: sample.ended - sample.unserved)

    def _rate(self, ends_of: Callable[[_Sample], int]) -> float | None:
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        ends, seconds = ends_of(last) - ends_of(first), last.at_s - first.at_s
        return ends / seconds if seconds >= RATE_LEAST_SECONDS and ends >= RATE_LEAST_ENDS else None


class Backlog:
    """Polls the pool's counts for everyone in this process."""

    def __init__(
        self, pool: RequestPool, clock_s: Callable[[], float], on_counts: Callable[[PoolStats], None] = lambda _: None
    ) -> None:
        """
        Args:
            clock_s: any clock that never goes back, in seconds.
            on_counts: called with the pool's counts after each poll that succeeds.
        """
        self.stats: PoolStats | None = None  # as of the last poll; None if that failed
        self.rate = EndRate()
        self.has_refused = False  # the pool itself has refused a call since the last poll
        self._pool = pool
        self._clock_s = clock_s
        self._on_counts = on_counts
        self._polled_s = -math.inf  # when the last poll ended
        self._poll: asyncio.Task[None] | None = None

    async def counts(self, within_s: float) -> PoolStats | None:
        """Return the pool's counts, at most POLL_SECONDS old, or None if the pool does not answer in time.

        Probes and metrics call this without a key, so the number of callers must not change how often the pool is
        polled.
        """
        self.poll_if_old()
        if self._poll is not None:
            answered, _ = await asyncio.wait((self._poll,), timeout=within_s)
            if not answered:
                return None
        return self.stats

    def poll_if_old(self) -> None:
        """Start a poll if the counts are old and none is under way."""
        if self.age_s > POLL_SECONDS and self._poll is None:
            self._poll = asyncio.create_task(self._poll_pool())

    async def refresh(self) -> bool:
        """Wait for the poll under way if a call needs newer counts, and POLL_SECONDS at most.

        Returns: whether there was anything to wait for.
        """
        if self._poll is None or self.age_s <= POLL_SECONDS or self._was_empty:
            return False
        answered, _ = await asyncio.wait((self._poll,), timeout=POLL_SECONDS)
        if not answered:
            self.stats, self._polled_s = None, self._clock_s()
        return True

    def note_full(self) -> None:
        """Remember that the pool has refused a call for its queue: the counts are older than that."""
        self.has_refused = True

    @property
    def age_s(self) -> float:
        return self._clock_s() - self._polled_s

    @property
    def _was_empty(self) -> bool:
        """True if the queue was empty at the last poll, and that was not long ago."""
        has_waiting = self.stats is None or self.stats.queued > 0 or self.has_refused
        return not has_waiting and self.age_s <= EMPTY_SECONDS

    async def _poll_pool(self) -> None:
        stats = None
        try:
            stats = await self._pool.stats()
            self.rate.add(self._clock_s(), stats)
            self._on_counts(stats)
        except (PoolUnavailable, TimeoutError) as error:
            log.info("the pool does not answer with its counts: %s", error)
        finally:
            # After any failure nothing is known: old counts must not refuse calls for ever.
            self.stats, self.has_refused = stats, False
            self._polled_s, self._poll = self._clock_s(), None
