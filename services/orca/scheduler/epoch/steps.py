"""Submits steps to the engine: the next batch as soon as something changes what can run."""

import asyncio
import contextlib
from collections.abc import Callable

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Claim, Epoch, StepResult
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.epoch.claims import RequestClaimer
from orca.scheduler.epoch.prefetch_timer import PrefetchTimer
from orca.scheduler.policy.batch import NOTHING, Batch, GroupRequest
from orca.scheduler.policy.policy import BatchLimits, next_batch
from orca.scheduler.policy.state import GroupState, StepInFlight


class StepSubmitter:
    """The steps of one epoch: `run` is a task of it."""

    def __init__(
        self,
        dependencies: Dependencies,
        epoch: Epoch,
        limits: BatchLimits,
        state: GroupState,
        claimer: RequestClaimer,
        *,
        admit: Callable[[GroupRequest], None],
    ) -> None:
        """Args: admit: called with each request that a step admits."""
        self._dependencies = dependencies
        self._epoch = epoch
        self._limits = limits
        self._state = state
        self._claimer = claimer
        self._admit = admit
        self._timer = PrefetchTimer()
        self._last_submitted = 0  # number of the last step that the engine accepted
        self._is_draining = False
        self._can_step = asyncio.Event()  # something changed what can run
        self._is_quiet = asyncio.Event()  # no step is in flight
        self._is_quiet.set()

    def set_batch_bounds(self, limits: BatchLimits) -> None:
        """Use other bounds from the next batch on."""
        self._limits = limits
        self.wake()

    def wake(self) -> None:
        """Choose again: something changed what can run."""
        self._can_step.set()

    async def run(self) -> None:
        """Submit steps until cancelled; none after `drain`. Raises: EngineError."""
        while True:
            await self._can_step.wait()
            self._can_step.clear()
            while not self._is_draining and self._is_worth_a_step(batch := await self._next_batch()):
                if (spare_s := self._spare_s(batch)) > 0:
                    await self._until_news(spare_s)
                    continue
                self._is_quiet.clear()
                step = self._state.schedule(batch, self._epoch, now_ns=self._dependencies.clock_ns())
                for admission in batch.admitted:
                    self._admit(admission.request)
                # Requests whose last token this step draws free capacity for others now.
                self._claimer.wake()
                await self._dependencies.engine.submit(step)
                self._last_submitted = step.number

    async def drain(self) -> None:
        """Submit no further step, and wait until none is in flight."""
        self._is_draining = True
        await self._is_quiet.wait()

    def take(self, result: StepResult, *, now_ns: int) -> StepInFlight:
        """Remove the oldest step from those in flight, as its result has come.

        Raises: EngineError if the result is not that step's.
        """
        steps = self._state.steps
        if not steps or result.number != steps[0].number or result.epoch != self._epoch:
            raise EngineError(f"result {result.number} of epoch {result.epoch.number} came out of order")
        self._timer.read(steps[0], now_ns)
        step = self._state.read()
        if not steps:
            self._is_quiet.set()
        return step

    def in_flight(self) -> dict[str, Claim]:
        """Return the requests, with their claims, of the steps that the engine accepted and has not returned."""
        accepted = (step for step in self._state.steps if step.number <= self._last_submitted)
        return {row.request.request.id: row.request.claim for step in accepted for row in step.rows}

    async def _next_batch(self) -> Batch:
        batch = next_batch(self._dependencies.policy, self._state, self._limits)
        if self._limits.prefetch or not batch.rows or not self._can_grow(batch):
            return batch
        # With prefetch another step hides the time in which a place is empty. Algorithm 1 itself leaves no place empty.
        await self._claimer.catch_up()
        return NOTHING if self._is_draining else next_batch(self._dependencies.policy, self._state, self._limits)

    def _is_worth_a_step(self, batch: Batch) -> bool:
        """Return true for a batch with rows. Frees alone wait for such a batch while one can be expected."""
        return bool(batch.rows) or (bool(batch.freed) and not self._state.steps)

    def _can_grow(self, batch: Batch) -> bool:
        return self._dependencies.policy.can_grow(batch, self._limits)

    def _spare_s(self, batch: Batch) -> float:
        """Return how long a prefetched batch with free places can wait for requests that may still arrive."""
        is_worth_waiting = self._can_grow(batch) and not self._claimer.waiting
        if not self._state.steps or not is_worth_waiting or self._limits.stages > 1:
            return 0.0
        return (self._timer.due_ns(self._state.steps[0]) - self._dependencies.clock_ns()) / 1e9

    async def _until_news(self, most_s: float) -> None:
        """Wait until something changes what can run, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._can_step.wait()
        self._can_step.clear()
