"""The scheduler's life: take the group's seat, form an epoch, serve it, and begin again when it breaks.

    enter seat -> form engine -> serve (epoch.py) -> seat lost or engine broken: again
                                                  -> stopped: finish the steps in flight, commit, leave

Heartbeats run from the moment the seat is taken, also while the engine forms; the sweep runs always. The loop holds no
truth: whatever it knows is in the pool or can be computed again.
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError, PoolUnavailable, SettingError
from orca.core.domain.step import Claim, Epoch
from orca.pool.api import SeatLost, StaleCall
from orca.pool.records import SeatEntered
from orca.scheduler.dependencies import Dependencies, call_until_answered
from orca.scheduler.epoch import EpochRun
from orca.scheduler.observer import SchedulerLoad
from orca.scheduler.policy.policy import BatchLimits
from orca.scheduler.policy.state import GroupState

log = logging.getLogger("orca.scheduler")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """What is chosen about scheduling; the group's own sizes come from its engine when it forms."""

    max_batch_size: int = 16
    prefetch: int = 0
    max_batch_tokens: int | None = None
    are_slots_chosen: bool = False  # that the engine forms with; or else memory decides them
    generation: int = 1  # of the revision: the newest one becomes current
    is_predecessor_dead: bool = False  # the last holder of the seat was seen to exit (protocol: enter)

    def limits(self, shape: EngineShape) -> BatchLimits:
        return BatchLimits(
            stages=shape.stages,
            max_batch_size=self.max_batch_size,
            slots=shape.slots,
            block_tokens=shape.block_tokens,
            max_model_len=shape.max_model_len,
            prefetch=self.prefetch,
            max_batch_tokens=self.max_batch_tokens,
            are_slots_chosen=self.are_slots_chosen,
        )


class GroupScheduler:
    """One group's scheduler process, without the process: `run` until `stop` was called."""

    def __init__(self, dependencies: Dependencies, options: SchedulingOptions) -> None:
        self._dependencies = dependencies
        self._options = options
        self._stop = asyncio.Event()
        self._run: EpochRun | None = None
        self._reported_epoch = 0  # highest epoch that a stage told of
        self._is_predecessor_dead = options.is_predecessor_dead  # believed once: later holders may live
        self._blamed: dict[str, Claim] = {}  # what ran when the engine failed from inside, until the pool knows
        self._pause_s = 0.0  # before the next epoch is formed
        self._failures = 0  # epochs in a row that ended before a step came back

    @property
    def is_serving(self) -> bool:
        return self._run is not None

    @property
    def state(self) -> GroupState | None:
        """Of the present epoch, to look at; None while there is none."""
        return None if self._run is None else self._run.state

    def load(self) -> SchedulerLoad:
        return SchedulerLoad() if self._run is None else self._run.load()

    def set_batch_bounds(self, max_batch_size: int, max_batch_tokens: int | None) -> None:
        """Bound every batch from the next one on by other sizes; what runs goes on.

        Raises: SettingError when the policy cannot work under them; nothing has changed then.
        """
        options = replace(self._options, max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens)
        if self._run is not None:
            self._run.set_batch_bounds(max_batch_size, max_batch_tokens)
        self._options = options

    def stop(self) -> None:
        """Drain: no new steps, commit what is in flight, give the rest back, leave. `run` then returns."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until stopped.

        Raises: ProcessClosed when the pool has closed this process, SettingError when the policy cannot work on this
            group. Both mean that it makes no sense to go on.
        """
        async with asyncio.TaskGroup() as group:
            sweeps = group.create_task(self._sweeps())
            try:
                await self._live_until_stopped()
            except* SettingError:
                # Nobody can serve the group with these settings: the seat is free at once for one with others.
                await self._leave()
                raise
            await self._leave()
            sweeps.cancel()

    async def _live_until_stopped(self) -> None:
        while not self._stop.is_set():
            epoch = await self._unless_stopped(self._enter())
            if epoch is not None:
                await self._live(epoch)

    async def _enter(self) -> Epoch:
        """Take the seat, however long its holder lives."""
        dependencies = self._dependencies
        while True:
            call = next(dependencies.calls)
            try:
                answer = await call_until_answered(
                    lambda call=call: dependencies.pool.enter(  # type: ignore[misc]
                        dependencies.caller,
                        call,
                        reported_epoch=self._reported_epoch,
                        is_holder_dead=self._is_predecessor_dead,
                        blamed=self._blamed,
                    ),
                    dependencies.timings.pool_retry_s,
                )
            except StaleCall:
                continue
            self._is_predecessor_dead = False
            if isinstance(answer, SeatEntered):
                self._note_blame(answer)
                log.info("seat taken", extra={"epoch": answer.epoch.number, "group": dependencies.caller.group})
                return answer.epoch
            self._dependencies.observer.stood_by()
            log.info("another process holds the seat", extra={"lease_ms": answer.lease_ms})
            await asyncio.sleep(min(max(answer.lease_ms, 1) / 1e3, dependencies.timings.heartbeat_s))

    def _note_blame(self, answer: SeatEntered) -> None:
        self._blamed = {}
        if answer.failed or answer.poisoned:
            log.warning("requests are blamed", extra={"failed": answer.failed, "poisoned": answer.poisoned})
            self._dependencies.observer.blamed(answer.failed, answer.poisoned)

    async def _live(self, epoch: Epoch) -> None:
        """Form and serve one epoch; returns when it is over."""
        reason: str | None = None
        try:
            async with asyncio.TaskGroup() as group:
                beats = group.create_task(self._heartbeats())
                await self._form_and_serve(epoch)
                beats.cancel()
        except* SeatLost as errors:
            reason = f"the seat was lost: {flat_errors(errors)[0]}"
            self._failures = 0
        except* EngineError as errors:
            failures = flat_errors(errors)
            self._reported_epoch = max(self._reported_epoch, *(error.reported_epoch for error in failures))
            if self._run is not None and any(error.is_from_inside for error in failures):
                self._blamed = self._run.in_flight()
            reason = f"the engine failed: {failures[0]}"
        finally:
            self._run = None
        if reason is not None:
            log.warning("epoch over", extra={"epoch": epoch.number, "reason": reason})
            self._dependencies.observer.broke(epoch, reason)
            self._set_pause()

    async def _form_and_serve(self, epoch: Epoch) -> None:
        # With the seat taken already: what the last epoch held is blamed before the lease ends, and free for others.
        await self._unless_stopped(asyncio.sleep(self._pause_s))
        self._failures += 1
        shape = await self._unless_stopped(self._dependencies.engine.form(epoch))
        if shape is None:
            return
        limits = self._options.limits(shape)
        if (refusal := self._dependencies.policy.refuse(limits)) is not None:
            raise SettingError(refusal)
        if await self._unless_stopped(self._promise(limits)) is None:
            return
        self._dependencies.observer.formed(epoch, shape.slots, self._dependencies.policy.describe())
        log.info("epoch formed", extra={"epoch": epoch.number, "stages": shape.stages, "slots": shape.slots})
        self._run = EpochRun(self._dependencies, epoch, limits)
        try:
            await self._run.run(self._stop)
        finally:
            if self._run.state.submitted > len(self._run.state.steps):
                self._failures = 0

    async def _promise(self, limits: BatchLimits) -> int:
        """State what any one request may need, and the revision. A group with fewer slots than promised is not formed.

        No request needs more than the model's length, so a group that comes back with fewer slots still forms above it.
        """
        dependencies, revision = self._dependencies, self._dependencies.caller.revision
        offer = limits.longest_request
        promised = await call_until_answered(
            lambda: dependencies.pool.promise_slots(revision, offer), dependencies.timings.pool_retry_s
        )
        if limits.slots < promised:
            raise EngineError(
                f"the group has {limits.slots} slots, and {promised} were promised to a request of revision {revision}:"
                " it forms with as many, or in a pool of its own"
            )
        await call_until_answered(
            lambda: dependencies.pool.set_revision(revision, self._options.generation),
            dependencies.timings.pool_retry_s,
        )
        return promised

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._dependencies.timings.heartbeat_s)
            try:
                if self._run is None:
                    await self._dependencies.pool.heartbeat(self._dependencies.caller, is_formed=False)
                else:
                    await self._run.heartbeat()
            except PoolUnavailable as error:
                # An outage costs no lease: leases run in the pool's awake time.
                log.warning("heartbeat without an answer", extra={"error": str(error)})

    async def _sweeps(self) -> None:
        """They run all the time, so they are also what says when the pool went away and came back."""
        is_away = False
        while True:
            try:
                await self._dependencies.pool.sweep()
            except PoolUnavailable as error:
                log.warning("sweep without an answer" if is_away else "pool away", extra={"error": str(error)})
                is_away = True
            else:
                if is_away:
                    log.info("pool back")
                is_away = False
            await asyncio.sleep(self._dependencies.timings.heartbeat_s)

    async def _leave(self) -> None:
        """Close this process in the pool. Its lease does the same, later, if the pool does not answer."""
        dependencies = self._dependencies
        try:
            async with asyncio.timeout(dependencies.timings.flush_s):
                await call_until_answered(
                    lambda: dependencies.pool.leave(dependencies.caller), dependencies.timings.pool_retry_s
                )
            log.info("left", extra={"group": dependencies.caller.group})
        except TimeoutError:
            log.warning("the pool did not answer the farewell", extra={"group": dependencies.caller.group})

    def _set_pause(self) -> None:
        timings = self._dependencies.timings
        self._pause_s = min(timings.form_retry_s * 2.0 ** min(max(self._failures - 1, 0), 30), timings.form_retry_max_s)

    async def _unless_stopped(self, call: Awaitable[T]) -> T | None:
        """Await `call`, or cancel it when the scheduler is stopped first. Returns: None when stopped."""
        task = asyncio.ensure_future(call)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for future in (task, stopped):
                if not future.done():
                    future.cancel()
                    await asyncio.wait((future,))


def flat_errors(errors: BaseExceptionGroup[E]) -> list[E]:
    """The single exceptions of a group of groups, in their order."""
    found: list[E] = []
    for error in errors.exceptions:
        found += flat_errors(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
