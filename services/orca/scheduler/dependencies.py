"""Everything that a scheduler gets from outside, and its calls to a pool that may not answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from orca.core.domain.engine import Engine
from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import Request
from orca.core.process.wall_clock import wall_clock_ms
from orca.pool.api import RequestPool
from orca.pool.records import Caller, LengthCounts
from orca.scheduler.observer import Observer
from orca.scheduler.order.claim_orders import ClaimOrders
from orca.scheduler.policy.finish import MakeStopStringMatcher
from orca.scheduler.policy.policy import Policy

log = logging.getLogger("orca.scheduler")
T = TypeVar("T")

LOG_AGAIN_S = 5.0
"""Time between two log lines about one call that the pool does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimings:
    """Intervals and bounds of the loop, in seconds. The defaults suit a pool that answers in a millisecond."""

    heartbeat_s: float = 0.5  # between heartbeats, and between sweeps (protocol: twice a second)
    work_s: float = 0.25  # bound on a wait for the pool's hint that a request came: the cost of a lost hint
    claim_s: float = 0.05  # bound on a step's wait for a claim that is due, with prefetch 0
    head_s: float = 0.05  # between claims while the head of the queue does not fit: another group may have claimed it
    # From one commit of tokens to the next; while requests queue, twice as long. First tokens and ends that somebody
    # waits for do not wait for it.
    commit_s: float = 0.0
    pool_retry_s: float = 0.1  # pause before a call that the pool did not answer is repeated
    form_retry_s: float = 0.2  # pause before the next epoch after a failure; doubles up to `form_retry_max_s`
    form_retry_max_s: float = 5.0
    flush_s: float = 2.0  # bound on committing the tokens that were read, when an epoch ends or the scheduler stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The services and values that the loop gets from outside."""

    pool: RequestPool
    engine: Engine
    policy: Policy
    caller: Caller
    calls: Iterator[int]  # rising numbers for enter and claim, shared by all epochs of the process
    clock_ns: Callable[[], int]  # monotonic
    observer: Observer
    eos_token_ids: tuple[int, ...] = ()
    make_stop_string_matcher: MakeStopStringMatcher | None = None
    forces_last_token: bool = False  # the model has a `forced_eos_token_id` (FinishDetector)
    orders: ClaimOrders | None = None  # None: claims go by arrival
    timings: LoopTimings = LoopTimings()
    wall_ms: Callable[[], int] = wall_clock_ms  # Unix milliseconds
    # Returns the reason why no group can run a request, None if one can. The ranks decide so, too. Here it keeps out
    # what no message to them can hold, which would end this process (core.domain.refusal).
    refuse: Callable[[Request], str | None] = lambda request: None  # noqa: ARG005 - shape of the function

    async def counted_lengths(self) -> LengthCounts:
        """Return the lengths of answers that the pool has counted for this scheduler's revision."""
        return await self.call_pool(lambda pool: pool.lengths(self.caller.revision))

    async def call_pool(self, call: Callable[[RequestPool], Awaitable[T]]) -> T:
        """Call the pool until it answers, and log now and then that it does not. Every transition may be repeated."""
        clock, silent_until = asyncio.get_running_loop().time, 0.0
        while True:
            try:
                return await call(self.pool)
            except PoolUnavailable as error:
                if clock() >= silent_until:
                    log.warning("the pool did not answer, calling again", extra={"error": str(error)})
                    silent_until = clock() + LOG_AGAIN_S
                await asyncio.sleep(self.timings.pool_retry_s)
