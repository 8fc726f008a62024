"""Claims requests from the pool's queue while the policy has free capacity."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from orca.pool.api import StaleCall
from orca.pool.records import ClaimAnswer, Claimed
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.policy.policy import UNBOUNDED_ROOM, BatchLimits, FreeCapacity, PromptRoom
from orca.scheduler.policy.state import GroupState


class RefusedRoom(NamedTuple):
    """Room of a claim that was not enough for what is next in the queue."""

    slots: int
    prompt_tokens: int


NO_ROOM = RefusedRoom(0, 0)


class RequestClaimer:
    """The claims of one epoch: `run` and `listen` are one task each."""

    def __init__(
        self, dependencies: Dependencies, limits: BatchLimits, state: GroupState, *, adopt: Callable[[Claimed], None]
    ) -> None:
        """Args: adopt: called with each request that was claimed."""
        self._dependencies = dependencies
        self._limits = limits
        self._state = state
        self._adopt = adopt
        self._has_capacity = asyncio.Event()  # the free capacity may have changed
        self._has_work = asyncio.Event()  # the pool hinted at new requests, or sent no hint for a while
        self._is_answered = asyncio.Event()  # a claim was answered since somebody began to wait for that
        self._refused: RefusedRoom | None = None  # room that was not enough for what is next in the queue
        self._may_work_fit = False  # a request that comes now may fit into that room
        self._is_pool_slow = False  # the last wait for an answer ended without one
        self.is_claiming = False  # a call is in progress: the pool may list requests that are not known here yet
        self.waiting = 0  # requests in the pool's queue, as of the last claim

    def set_batch_bounds(self, limits: BatchLimits) -> None:
        """Use other bounds: they may change the free capacity."""
        self._limits = limits
        self.wake()

    def wake(self) -> None:
        """Check the free capacity again."""
        self._has_capacity.set()

    async def run(self) -> None:
        """Claim whenever there is capacity and work, until cancelled. Raises: SeatLost, ProcessClosed."""
        while True:
            if self._refused is not None:
                # When the head's client leaves or another group claims it, no hint comes, but younger ones may fit.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._dependencies.timings.head_s):
                        await self._capacity_above(self._refused)
            capacity = await self._capacity_above(NO_ROOM)
            self._has_work.clear()
            answer = await self._claim(capacity)
            for claimed in answer.claimed:
                self._adopt(claimed)
            is_refused = answer.waiting > 0 and len(answer.claimed) < capacity.requests
            self._refused = self._refused_room() if is_refused else None
            # Only a request that has reserved the group keeps others out: without one, the next that comes may fit.
            self._may_work_fit = answer.is_by_order and not answer.is_blocked
            self._is_pool_slow = False
            self._is_answered.set()
            if not answer.waiting:
                await self._has_work.wait()

    async def listen(self) -> None:
        """Listen for new work until cancelled. It never pauses, so that no hint is lost between a claim and a wait."""
        revision, timings = self._dependencies.caller.revision, self._dependencies.timings
        while True:
            await self._dependencies.call_pool(lambda pool: pool.wait_for_work(revision, timings.work_s))
            self._has_work.set()
            if self._may_work_fit:
                self.wake()

    async def catch_up(self) -> None:
        """Wait for the claim, at most for `claim_s`, if requests that the group could claim are known to wait.

        In Algorithm 1 the request pool is at hand: the successor of a request that ended early is in the very next
        batch. Here the scheduler has to claim it first.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dependencies.timings.claim_s):
                while self._is_claim_due and not self._is_pool_slow:
                    self._is_answered.clear()
                    await self._is_answered.wait()
            return
        self._is_pool_slow = True

    @property
    def _is_claim_due(self) -> bool:
        return self.waiting > 0 and self._has_more_than(self._free_capacity(), self._refused or NO_ROOM)

    async def _capacity_above(self, refused: RefusedRoom) -> FreeCapacity:
        """Wait until another request can be claimed, and into more room than was refused."""
        while not self._has_more_than(capacity := self._free_capacity(), self._without_new_work(refused)):
            self._has_capacity.clear()
            await self._has_capacity.wait()
        return capacity

    def _refused_room(self) -> RefusedRoom | None:
        """Return the room that was refused; None if there are no slots.

        By now the group may have no place for a request. The slots that were refused count all the same.
        """
        slots = self._dependencies.policy.free_slots(self._state, self._limits)
        return RefusedRoom(slots, self._prompt_room().free) if slots else None

    def _without_new_work(self, refused: RefusedRoom) -> RefusedRoom:
        """Return the room that is not enough: none is known if a request has come since that may fit into it."""
        return NO_ROOM if self._may_work_fit and self._has_work.is_set() else refused

    def _has_more_than(self, capacity: FreeCapacity, refused: RefusedRoom) -> bool:
        if capacity.requests <= 0 or capacity.slots <= 0:
            return False
        prompt_tokens = self._prompt_room().free
        return prompt_tokens > 0 and (capacity.slots > refused.slots or prompt_tokens > refused.prompt_tokens)

    def _prompt_room(self) -> PromptRoom:
        orders = self._dependencies.orders
        if orders is None or not orders.is_in_force:
            return UNBOUNDED_ROOM
        return self._dependencies.policy.prompt_room(self._state, self._limits)

    def _free_capacity(self) -> FreeCapacity:
        return self._dependencies.policy.free_capacity(self._state, self._limits)

    async def _claim(self, capacity: FreeCapacity) -> ClaimAnswer:
        """Claim once. The call is repeated under its number until the pool answers, which stores the answer."""
        self.is_claiming = True
        orders = self._dependencies.orders
        order = None if orders is None else orders.of_claim(self._prompt_room())
        while True:
            call = next(self._dependencies.calls)
            try:
                answer: ClaimAnswer = await self._dependencies.call_pool(
                    lambda pool, call=call: pool.claim(  # type: ignore[misc]
                        self._dependencies.caller,
                        call,
                        free_slots=capacity.slots,
                        total_slots=self._limits.slots,
                        block_tokens=self._limits.block_tokens,
                        most=capacity.requests,
                        order=order,
                    )
                )
            except StaleCall:
                continue
            self.is_claiming = False
            self.waiting = answer.waiting
            if orders is not None:
                orders.note(answer)
            return answer
