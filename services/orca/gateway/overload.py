"""What a gateway does when more is asked than can be served: refuse early, cheaply, and say when to come back.

The pool decides who is accepted (`submit`). What is here only saves work: while the queue is known to be full, a call
is refused before its body is read and its prompt encoded. The pool's counts are asked for at most four times a second,
whatever comes in. All times are estimates from the rate at which requests have ended while others waited.
"""

import asyncio
import collections
import hashlib
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from orca.core.errors import Overloaded, PoolFull, PoolUnavailable, QueueFull
from orca.gateway.errors import ApiError
from orca.pool.api import Pool, PoolStats

AGE_MAX_SECONDS = 0.25
"""Counts older than this are asked for anew; an answer that takes longer is not waited for."""

RATE_WINDOW_SECONDS = 30.0
RATE_LEAST_SECONDS = 3.0
RATE_LEAST_ENDS = 10
RATE_GAP_SECONDS = 2.0
"""How much makes a rate: counts of so long a time, at least so many ends in it, and never unobserved for longer."""

ASSUMED_ENDS_PER_SECOND = 10.0
"""Where no rate is known yet, for Retry-After only."""

RETRY_LEAST_SECONDS, RETRY_MOST_SECONDS = 1.0, 60.0
"""The official clients follow a Retry-After up to a minute; a longer one they ignore."""

DEADLINE_MARGIN = 0.5
"""Only a call whose deadline is under this part of the estimated wait is refused: the estimate may be wrong by 2."""


def wait_seconds(waiting: int, ends_per_second: float) -> float:
    """How long a request that comes now waits behind `waiting` others."""
    return waiting / ends_per_second if ends_per_second > 0 else math.inf


def retry_after_seconds(waiting: int, ends_per_second: float | None, word: str) -> float:
    """When a refused call should come back: while half to all of what waits now has been served.

    Args: word: names the call; those refused together come back at different times, the same word at the same.
    Returns: 1 to 60; never less for a longer queue.
    """
    wait_s = wait_seconds(waiting, ends_per_second or ASSUMED_ENDS_PER_SECOND)
    share = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4]) / 2**32
    bounded_s = min(max(wait_s, 2 * RETRY_LEAST_SECONDS), RETRY_MOST_SECONDS)
    return bounded_s * (0.5 + share / 2)


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    ended: int  # requests that have ended so far


class EndRate:
    """Requests ended per second, measured only over times in which others always waited: else it says nothing."""

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque()

    def note(self, at_s: float, stats: PoolStats) -> None:
        samples = self._samples
        if stats.queued == 0 or (samples and at_s - samples[-1].at_s > RATE_GAP_SECONDS):
            samples.clear()
        if stats.queued:
            samples.append(_Sample(at_s, stats.ended_ever))
        while samples and at_s - samples[0].at_s > RATE_WINDOW_SECONDS:
            samples.popleft()

    @property
    def per_second(self) -> float | None:
        """None while too little was seen."""
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        ends, seconds = last.ended - first.ended, last.at_s - first.at_s
        return ends / seconds if seconds >= RATE_LEAST_SECONDS and ends >= RATE_LEAST_ENDS else None


class Overload:
    """The pool's backlog as this process last heard of it."""

    def __init__(self, pool: Pool, clock_s: Callable[[], float]) -> None:
        """Args: clock_s: any clock that never goes back, in seconds."""
        self._pool = pool
        self._clock_s = clock_s
        self._stats: PoolStats | None = None
        self._asked_s = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._rate = EndRate()

    async def check(self, queue_percent: int | None = None) -> None:
        """Before anything is done for a call. Args: queue_percent: of the queue's bounds, where its key has less.

        Raises: QueueFull when the queue is known to be full; a pool that does not answer is left to `submit`.
        """
        stats = await self._recent()
        if stats is None:
            return
        share = (queue_percent or 100) / 100
        if stats.queued >= stats.queued_max * share:
            raise self.refusal(QueueFull(f"{stats.queued} requests wait already"), secrets.token_hex(8))
        if stats.queued_prompt_tokens >= stats.queued_prompt_tokens_max * share:
            message = f"requests with {stats.queued_prompt_tokens} prompt tokens wait already"
            raise self.refusal(QueueFull(message), secrets.token_hex(8))

    def check_deadline(self, deadline_ms: int | None) -> None:
        """Raises: ApiError 429 for a call that would still wait when its deadline comes. Without data none is."""
        rate, stats = self._rate.per_second, self._stats
        if deadline_ms is None or rate is None or stats is None:
            return
        wait_s = wait_seconds(stats.queued, rate)
        if wait_s * DEADLINE_MARGIN * 1000 > deadline_ms:
            message = f"requests wait for about {wait_s:.0f} s at the moment: deadline_ms {deadline_ms} cannot be met"
            retry_after_s = retry_after_seconds(stats.queued, rate, secrets.token_hex(8))
            raise ApiError(
                429,
                message,
                kind="overloaded_error",
                param="deadline_ms",
                code="deadline_unreachable",
                retry_after_s=retry_after_s,
            )

    def refusal(self, error: Overloaded, word: str) -> Overloaded:
        """The pool's refusal of a call, with the time after which it should come back."""
        if self._stats is not None:
            # Bytes are held by what runs as well.
            others = self._stats.owned if isinstance(error, PoolFull) else 0
            error.retry_after_s = retry_after_seconds(self._stats.queued + others, self._rate.per_second, word)
        return error

    def note_full(self) -> None:
        """The queue had no place for one more: what is counted here is behind."""
        if self._stats is not None:
            self._stats = replace(self._stats, queued=max(self._stats.queued, self._stats.queued_max))

    async def _recent(self) -> PoolStats | None:
        """The pool's counts, not older than AGE_MAX_SECONDS; None when it did not give them in time."""
        if self._clock_s() - self._asked_s > AGE_MAX_SECONDS:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            # One question for all that wait, whoever of them leaves.
            await asyncio.shield(self._asking)
        return self._stats

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(AGE_MAX_SECONDS):
                self._stats = await self._pool.stats()
        except (PoolUnavailable, TimeoutError):
            self._stats = None
        else:
            self._rate.note(self._clock_s(), self._stats)
        finally:
            self._asked_s = self._clock_s()
            self._asking = None
