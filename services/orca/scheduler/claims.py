"""Takes requests out of the pool's queue while the policy has room for more."""

import asyncio
import contextlib
from collections.abc import Callable

from orca.pool.api import StaleCall
from orca.pool.records import ClaimAnswer, Claimed
from orca.scheduler.dependencies import Dependencies, call_until_answered
from orca.scheduler.policy.policy import BatchLimits, FreeCapacity
from orca.scheduler.policy.state import GroupState


class RequestClaimer:
    """The claims of one epoch: `run` and `listen` are one task each."""

    def __init__(
        self, dependencies: Dependencies, limits: BatchLimits, state: GroupState, *, adopt: Callable[[Claimed], None]
    ) -> None:
        """Args: adopt: gets each request that was claimed."""
        self._dependencies = dependencies
        self._limits = limits
        self._state = state
        self._adopt = adopt
        self._has_room = asyncio.Event()  # something changed how much can be claimed
        self._has_work = asyncio.Event()  # the pool hinted at new requests, or none was heard for a while
        self._is_answered = asyncio.Event()  # a claim was answered since somebody began to wait for that
        self._refused = 0  # free slots that were not enough for the head of the queue
        self._is_pool_slow = False  # the last one who waited for an answer did so in vain
        self.is_under_way = False  # a call is out: the pool may list what nobody here knows yet
        self.waiting = 0  # in the pool's queue, as of the last claim

    def set_batch_bounds(self, limits: BatchLimits) -> None:
        """Other bounds: more may be claimed now, or less."""
        self._limits = limits
        self.look_again()

    def look_again(self) -> None:
        """How much can be claimed may have changed."""
        self._has_room.set()

    async def run(self) -> None:
        """Claim whenever there is room and work, until cancelled. Raises: SeatLost, ProcessClosed."""
        while True:
            if self._refused:
                # The head goes without a word when its client leaves or another group takes it: then younger ones fit.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._dependencies.timings.head_s):
                        await self._capacity_above(self._refused)
            room = await self._capacity_above(0)
            self._has_work.clear()
            answer = await self._claim(room)
            for claimed in answer.claimed:
                self._adopt(claimed)
            is_refused = answer.waiting > 0 and len(answer.claimed) < room.requests
            self._refused = self._free_capacity().slots if is_refused else 0
            self._is_pool_slow = False
            self._is_answered.set()
            if not answer.waiting:
                await self._has_work.wait()

    async def listen(self) -> None:
        """Listen for new work all the time, so that no hint falls between a claim and the wait after it;
        until cancelled."""
        timings = self._dependencies.timings
        while True:
            await call_until_answered(
                lambda: self._dependencies.pool.wait_for_work(self._dependencies.caller.revision, timings.work_s),
                timings.pool_retry_s,
            )
            self._has_work.set()

    async def catch_up(self) -> None:
        """Wait until what can be claimed is claimed, where requests are known to wait for it; `Times.claim_s` at most.

        In Algorithm 1 the request pool is at hand: who takes the place of a request that ended early is in the very
        next batch. Here it has to be asked for.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dependencies.timings.claim_s):
                while self._is_owed and not self._is_pool_slow:
                    self._is_answered.clear()
                    await self._is_answered.wait()
            return
        self._is_pool_slow = True

    @property
    def _is_owed(self) -> bool:
        room = self._free_capacity()
        return self.waiting > 0 and room.requests > 0 and room.slots > self._refused

    async def _capacity_above(self, slots: int) -> FreeCapacity:
        """Wait until another request, and more than so many slots, can be claimed."""
        while (room := self._free_capacity()).requests <= 0 or room.slots <= slots:
            self._has_room.clear()
            await self._has_room.wait()
        return room

    def _free_capacity(self) -> FreeCapacity:
        return self._dependencies.policy.free_capacity(self._state, self._limits)

    async def _claim(self, room: FreeCapacity) -> ClaimAnswer:
        """One claim, repeated under its number until the pool answers: the answer to a lost reply is stored there."""
        self.is_under_way = True
        while True:
            call = next(self._dependencies.calls)
            try:
                answer = await call_until_answered(
                    lambda call=call: self._dependencies.pool.claim(  # type: ignore[misc]
                        self._dependencies.caller,
                        call,
                        free_slots=room.slots,
                        total_slots=self._limits.slots,
                        block_tokens=self._limits.block_tokens,
                        most=room.requests,
                    ),
                    self._dependencies.timings.pool_retry_s,
                )
            except StaleCall:
                continue
            self.is_under_way = False
            self.waiting = answer.waiting
            return answer
