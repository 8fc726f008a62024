"""What a gateway does when more is asked than can be served: refuse early, cheaply, and say when to come back.

The pool decides who is accepted (`submit`). What is here only saves work: while the queue is known to be full, a call
is refused before its body is read and its prompt encoded, and without waiting for the pool, whose counts are asked for
at most four times a second, whatever comes in. All times are estimates from the rate at which requests have ended while
others waited.
"""

import asyncio
import collections
import hashlib
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from orca.core.domain.errors import Overloaded, PoolFull, PoolUnavailable, QueueFull
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.pool.api import RequestPool
from orca.pool.records import PoolStats

log = logging.getLogger(__name__)

ASK_SECONDS = 0.25
"""Counts older than this are asked for anew; an answer that takes longer is not waited for."""

BELIEVE_SECONDS = 0.5
"""A queue that was full so long ago is taken to be full while the pool is asked anew: no refusal waits for an answer,
and a place that becomes free is seen so much later at most."""

EMPTY_SECONDS = 10.0
"""Behind a queue that was empty so long ago no call waits for newer counts. Should it have filled up since, the pool
refuses the call itself."""

ANSWERS_SHARE = 0.9
"""Part of a gateway's connections that new calls may hold open: the others are for probes, cancels and resuming."""

LAG_LOOK_SECONDS = 0.1
LAG_MOST_SECONDS = 0.5
"""How late the event loop may be for new calls. Probes are answered as late as calls, and `orca up` waits 6 s."""

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


class LoopLag:
    """How late this process's event loop is. `run` is one task of the process.

    A gateway that takes in more calls than it has time for would answer all of them late, probes too, and be killed.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.most_seconds = LAG_MOST_SECONDS

    async def run(self) -> None:
        """Until cancelled: see by how much a short sleep is too long."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + LAG_LOOK_SECONDS
            await asyncio.sleep(LAG_LOOK_SECONDS)
            self.seconds = clock() - due_s

    def refusal(self) -> ApiError | None:
        """Of a new call while the ones before it have not had their turn: 503."""
        if self.seconds <= self.most_seconds:
            return None
        return ApiError(
            503,
            f"this gateway is {self.seconds:.1f} s behind its calls",
            kind=UNAVAILABLE,
            code="gateway_busy",
            retry_after_s=retry_after_seconds(0, None, secrets.token_hex(8)),
        )


class Overload:
    """The pool's backlog as this process last heard of it."""

    def __init__(
        self,
        pool: RequestPool,
        clock_s: Callable[[], float],
        connections_max: int,
        told: Callable[[PoolStats], None] = lambda _: None,
    ) -> None:
        """
        Args:
            clock_s: any clock that never goes back, in seconds.
            connections_max: of this gateway.
            told: gets the pool's counts whenever it has said them.
        """
        self._pool = pool
        self._told = told
        self._clock_s = clock_s
        self._answers_max = math.ceil(connections_max * ANSWERS_SHARE)
        self._stats: PoolStats | None = None
        self._known_s = -math.inf  # when the pool answered, or failed to
        self.schema: int | None = None  # in force when the pool last answered; None until it has
        self._has_refused = False  # the pool's own refusal of a call since then
        self._asking: asyncio.Task[None] | None = None
        self._rate = EndRate()
        self.lag = LoopLag()

    async def check(self, queue_percent: int | None = None) -> None:
        """Before anything is done for a call. Args: queue_percent: of the queue's bounds, where its key has less.

        Raises: QueueFull when the queue is known to be full; a pool that does not answer is left to `submit`.
        """
        refusal = self.refusal_known(queue_percent)
        must_ask = self._age_s > ASK_SECONDS and not self._was_empty
        if refusal is None and self._asking is not None and must_ask:
            await self._wait_for(self._asking)
            refusal = self._refusal_by_counts(queue_percent)
        if refusal is not None:
            raise refusal

    def refusal_known(self, queue_percent: int | None = None) -> Overloaded | None:
        """What `check` would raise, where that is known without waiting; sees to it that counts are asked for."""
        age_s = self._age_s
        self._see_to_counts()
        return self._refusal_by_counts(queue_percent) if age_s <= BELIEVE_SECONDS else None

    async def counts(self, within_s: float) -> PoolStats | None:
        """The pool's counts, at most ASK_SECONDS old, None when it does not answer in time.

        Whoever asks, and nobody needs a key for probes and metrics: the pool is asked no more often.
        """
        self._see_to_counts()
        if self._asking is not None:
            answered, _ = await asyncio.wait((self._asking,), timeout=within_s)
            if not answered:
                return None
        return self._stats

    def check_answers(self, answers: int) -> None:
        """Raises: ApiError 503 when so many answers are open here that one more would leave no way in for the rest."""
        if answers >= self._answers_max:
            raise ApiError(
                503,
                f"{answers} answers are open at this gateway already",
                kind=UNAVAILABLE,
                code="too_many_answers",
                retry_after_s=self._retry_after_s(answers, secrets.token_hex(8)),
            )

    def check_deadline(self, deadline_ms: int | None, param: str = "deadline_ms") -> None:
        """Raises: ApiError 429 for a call that would still wait when its deadline comes. Without data none is.

        Args: param: the field or header that asks for it.
        """
        rate, stats = self._rate.per_second, self._stats
        if deadline_ms is None or rate is None or stats is None:
            return
        wait_s = wait_seconds(stats.queued, rate)
        if wait_s * DEADLINE_MARGIN * 1000 > deadline_ms:
            message = f"requests wait for about {wait_s:.0f} s at the moment: {param} {deadline_ms} cannot be met"
            raise ApiError(
                429,
                message,
                kind="overloaded_error",
                param=param,
                code="deadline_unreachable",
                retry_after_s=self._retry_after_s(stats.queued, secrets.token_hex(8)),
            )

    def refusal(self, error: Overloaded, word: str) -> Overloaded:
        """The pool's refusal of a call, with the time after which it should come back."""
        if self._stats is not None:
            # Bytes are held by what runs as well.
            others = self._stats.owned if isinstance(error, PoolFull) else 0
            error.retry_after_s = self._retry_after_s(self._stats.queued + others, word)
        return error

    def note_full(self) -> None:
        """The queue had no place for one more: what is counted here is behind."""
        self._has_refused = True

    def _see_to_counts(self) -> None:
        """Ask for them where those that are known are old and nobody asks already."""
        if self._age_s > ASK_SECONDS and self._asking is None:
            self._asking = asyncio.create_task(self._ask())

    @property
    def _age_s(self) -> float:
        """Of what is known."""
        return self._clock_s() - self._known_s

    @property
    def _was_empty(self) -> bool:
        """As of a while ago."""
        has_waiting = self._stats is None or self._stats.queued > 0 or self._has_refused
        return not has_waiting and self._age_s <= EMPTY_SECONDS

    def _refusal_by_counts(self, queue_percent: int | None) -> Overloaded | None:
        message = self._fullness((queue_percent or 100) / 100)
        return None if message is None else self.refusal(QueueFull(message), secrets.token_hex(8))

    def _retry_after_s(self, waiting: int, word: str) -> float:
        return retry_after_seconds(waiting, self._rate.per_second, word)

    def _fullness(self, share: float) -> str | None:
        """Why a call is refused in a queue whose bounds are this part of the pool's; None for one that may try."""
        stats = self._stats
        if stats is None:
            return None
        if stats.queued >= stats.queued_max * share:
            return f"{stats.queued} requests wait already"
        if stats.queued_prompt_tokens >= stats.queued_prompt_tokens_max * share:
            return f"requests with {stats.queued_prompt_tokens} prompt tokens wait already"
        return "as many requests wait already as the queue holds" if self._has_refused else None

    async def _wait_for(self, asking: asyncio.Task[None]) -> None:
        """Wait for the pool's answer to one question, shared by all calls; not for long."""
        answered, _ = await asyncio.wait((asking,), timeout=ASK_SECONDS)
        if not answered:
            self._stats, self._known_s = None, self._clock_s()

    async def _ask(self) -> None:
        stats = None
        try:
            stats = await self._pool.stats()
            self._rate.note(self._clock_s(), stats)
            self.schema = stats.schema
            self._told(stats)
        except (PoolUnavailable, TimeoutError) as error:
            log.info("the pool does not say how full it is: %s", error)
        finally:
            # After any failure nothing is known: old counts must not refuse for ever.
            self._stats, self._has_refused = stats, False
            self._known_s, self._asking = self._clock_s(), None
