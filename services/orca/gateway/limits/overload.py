"""Refuses calls early and cheaply when more is asked than can be served, and says when to come back.

The pool decides who is accepted (`submit`). This module only saves work: while the queue is known to be full, a call is
refused before its body is read and its prompt encoded. All times are estimates from the rate at which requests have
ended while others waited.
"""

import asyncio
import hashlib
import math
import secrets
from collections.abc import Callable

from orca.core.domain.errors import Overloaded, PoolFull, QueueFull
from orca.core.domain.request import Request
from orca.core.priority import DEFAULT_PRIORITY
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.latency_goals import DEADLINE_FIELD
from orca.gateway.limits.backlog import Backlog
from orca.gateway.limits.turns import least_run_ms, requests_ahead, wait_by_order
from orca.pool.api import RequestPool
from orca.pool.order.order_class import DeadlineKind, OrderClass
from orca.pool.records import PoolStats

BELIEVE_SECONDS = 0.5
"""A queue that was full at most this long ago is taken to be full while the pool is polled again. So no refusal waits
for an answer, and a place that becomes free is seen at most this much later."""

ANSWERS_SHARE = 0.9
"""Share of a gateway's connections that new calls may hold open. The others are for probes, cancels and resuming."""

LAG_INTERVAL_SECONDS = 0.1
LAG_MOST_SECONDS = 0.5
"""Largest delay of the event loop at which new calls are taken. Probes are delayed as calls are, and `orca up` waits
6 s for one."""

ASSUMED_ENDS_PER_SECOND = 10.0
"""The rate for Retry-After, and for nothing else, until one was measured."""

RETRY_LEAST_SECONDS, RETRY_MOST_SECONDS = 1.0, 60.0
"""The official clients follow a Retry-After up to a minute. They ignore a longer one."""

DEADLINE_MARGIN = 0.5
"""A call is refused only if its deadline is under this share of the estimated wait: the estimate may be wrong by 2."""

SHORTEST = OrderClass(DEFAULT_PRIORITY, prompt=0, output=0, kind=DeadlineKind.END)
"""The class of the shortest request. A call whose lengths are not known yet may be one."""


def wait_seconds(waiting: int, ends_per_second: float) -> float:
    """Estimate how long a request that comes now waits for `waiting` others."""
    return waiting / ends_per_second if ends_per_second > 0 else math.inf


def retry_after_seconds(waiting: int, ends_per_second: float | None, call_id: str) -> float:
    """Choose when a refused call should come back: after half to all of what waits now has been served.

    Args: call_id: spreads calls that are refused together; the same id gets the same time.
    Returns: 1 to 60; never less for a longer queue.
    """
    wait_s = wait_seconds(waiting, ends_per_second or ASSUMED_ENDS_PER_SECOND)
    share = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:4]) / 2**32
    bounded_s = min(max(wait_s, 2 * RETRY_LEAST_SECONDS), RETRY_MOST_SECONDS)
    return bounded_s * (0.5 + share / 2)


class LoopLag:
    """Measures how late this process's event loop is. `run` is one task of the process.

    A gateway that takes in more calls than it has time for would answer all of them late, probes too, and be killed.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.most_seconds = LAG_MOST_SECONDS

    async def run(self) -> None:
        """Measure, until cancelled, by how much a short sleep is too long."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + LAG_INTERVAL_SECONDS
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.seconds = clock() - due_s

    def refusal(self) -> ApiError | None:
        """Return a 503 for a new call while the calls before it wait for their turn in the loop."""
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
    """Decides which new calls are refused for load."""

    def __init__(
        self,
        pool: RequestPool,
        clock_s: Callable[[], float],
        connections_max: int,
        on_counts: Callable[[PoolStats], None] = lambda _: None,
    ) -> None:
        """Args: clock_s, on_counts: as for `Backlog`; connections_max: bound on the connections of this gateway."""
        self.backlog = Backlog(pool, clock_s, on_counts)
        self.lag = LoopLag()
        self._answers_max = math.ceil(connections_max * ANSWERS_SHARE)

    async def check(self, queue_percent: int | None = None) -> None:
        """Raise for a call that would be refused, before anything is done for it.

        Args: queue_percent: share of the queue's bounds that the call's key may fill; None for all of it.
        Raises: QueueFull when the queue is known to be full; a pool that does not answer is left to `submit`.
        """
        refusal = self.known_refusal(queue_percent)
        if refusal is None and await self.backlog.refresh():
            refusal = self._refusal_by_counts(queue_percent)
        if refusal is not None:
            raise refusal

    def known_refusal(self, queue_percent: int | None = None) -> Overloaded | None:
        """Return what `check` would raise if that is known without waiting; start a poll if the counts are old."""
        age_s = self.backlog.age_s
        self.backlog.poll_if_old()
        return self._refusal_by_counts(queue_percent) if age_s <= BELIEVE_SECONDS else None

    def check_answers(self, answers: int) -> None:
        """Raise if so many answers are open here that one more would leave no way in for probes and cancels.

        Raises: ApiError 503.
        """
        if answers >= self._answers_max:
            raise ApiError(
                503,
                f"{answers} answers are open at this gateway already",
                kind=UNAVAILABLE,
                code="too_many_answers",
                retry_after_s=self._retry_after_s(answers, secrets.token_hex(8)),
            )

    def check_deadline(self, deadline_ms: int | None, param: str = DEADLINE_FIELD, of: OrderClass = SHORTEST) -> None:
        """Raise for a call that would still wait when its soonest deadline comes. Without data no call is refused.

        Args:
            param: the field or header that asks for the deadline.
            of: the class of the request, which matters where groups claim by another order than arrival.
        Raises: ApiError 429.
        """
        rates, stats = self.backlog.rate, self.backlog.stats
        if deadline_ms is None or stats is None:
            return
        rate = rates.per_second if stats.by_order is None else rates.served_per_second
        if rate is None:
            return
        ahead = requests_ahead(of, deadline_ms, stats)
        wait_s = wait_seconds(ahead, rate) if stats.by_order is None else wait_by_order(ahead, rate, stats)
        if wait_s * DEADLINE_MARGIN * 1000 > deadline_ms:
            raise ApiError(
                429,
                f"requests wait for about {wait_s:.0f} s at the moment, and {param} allows {deadline_ms} ms",
                kind="overloaded_error",
                param=param,
                code="deadline_unreachable",
                retry_after_s=retry_after_seconds(ahead, rate, secrets.token_hex(8)),
            )

    def check_run_time(self, request: Request, kind: DeadlineKind, deadline_ms: int, param: str) -> None:
        """Raise for a request that an idle engine could not serve by its deadline. Nothing is known of most engines.

        Args: kind: the event that must happen by the deadline; param: as for `check_deadline`.
        Raises: ApiError 429, which says that another try is useless.
        """
        stats = self.backlog.stats
        if stats is None or stats.by_order is None:
            return
        least_ms = least_run_ms(request, kind, stats.by_order.least_step_ms)
        if least_ms > deadline_ms:
            raise ApiError(
                429,
                f"an idle engine needs at least {least_ms:.0f} ms for this call, and {param} allows {deadline_ms} ms",
                kind="overloaded_error",
                param=param,
                code="deadline_unreachable",
                is_final=True,
            )

    def with_retry_after(self, error: Overloaded, call_id: str) -> Overloaded:
        """Put the time after which the call should come back into the pool's refusal."""
        stats = self.backlog.stats
        if stats is not None:
            # Requests that run hold bytes as well.
            others = stats.owned if isinstance(error, PoolFull) else 0
            error.retry_after_s = self._retry_after_s(stats.queued + others, call_id)
        return error

    def _refusal_by_counts(self, queue_percent: int | None) -> Overloaded | None:
        message = self._full_message((queue_percent or 100) / 100)
        return None if message is None else self.with_retry_after(QueueFull(message), secrets.token_hex(8))

    def _retry_after_s(self, waiting: int, call_id: str) -> float:
        return retry_after_seconds(waiting, self.backlog.rate.per_second, call_id)

    def _full_message(self, share: float) -> str | None:
        """Return why a queue whose bounds are this share of the pool's has no place; None if it has one."""
        stats = self.backlog.stats
        if stats is None:
            return None
        if stats.queued >= stats.queued_max * share:
            return f"{stats.queued} requests wait already"
        if stats.queued_prompt_tokens >= stats.queued_prompt_tokens_max * share:
            return f"requests with {stats.queued_prompt_tokens} prompt tokens wait already"
        return "as many requests wait already as the queue holds" if self.backlog.has_refused else None
