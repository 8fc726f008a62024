"""The scheduler's life: take the group's seat, form an epoch, serve it, and begin again when it breaks.

    enter seat -> form engine -> serve (epoch/epoch_run.py) -> seat lost or engine broken: again
                                                            -> stopped: finish the steps in flight, commit, leave

Heartbeats run from the moment the seat is taken, also while the engine forms; the sweep runs always. The loop holds no
truth: everything that it knows is in the pool or can be computed again.
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from orca.core.domain.engine import EngineShape, PrefixCharge
from orca.core.domain.errors import EngineError, PoolUnavailable, SettingError
from orca.core.domain.step import Epoch
from orca.pool.api import SeatLost
from orca.pool.schemas import SCHEMA_OF_TARGETS
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.epoch.epoch_run import EpochRun
from orca.scheduler.observer import SchedulerLoad
from orca.scheduler.policy.policy import BatchBounds, BatchLimits
from orca.scheduler.policy.state import GroupState
from orca.scheduler.seat import GroupSeat

log = logging.getLogger("orca.scheduler")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions(BatchBounds):
    """The options of scheduling. The group's own sizes come from its engine when it forms."""

    max_batch_size: int = 16
    prefetch: int = 0
    is_encoder_decoder: bool = False  # the model is one: its requests have a source and a target
    are_slots_chosen: bool = False  # slots of the engine are set; otherwise memory decides them
    prefix_cache: bool = False  # requests begin with the KV blocks of others that have the same tokens
    prefix_charge: PrefixCharge = PrefixCharge.EACH
    generation: int = 1  # of the revision: the newest one becomes current
    is_predecessor_dead: bool = False  # the last holder of the seat was seen to exit (protocol: enter)

    @property
    def prefixes(self) -> PrefixCharge | None:
        """The charge for blocks that requests share; None if they share none."""
        return self.prefix_charge if self.prefix_cache else None

    def limits(self, shape: EngineShape) -> BatchLimits:
        return BatchLimits(
            stages=shape.stages,
            max_batch_size=self.max_batch_size,
            slots=shape.slots,
            block_tokens=shape.block_tokens,
            max_model_len=shape.max_model_len,
            prefetch=self.prefetch,
            max_batch_tokens=self.max_batch_tokens,
            cycle=self.cycle,
            is_encoder_decoder=self.is_encoder_decoder,
            are_slots_chosen=self.are_slots_chosen,
            shares_prefixes=self.prefix_cache,
            prefix_charge=self.prefix_charge,
        )


class GroupScheduler:
    """One group's scheduler without its process: `run` serves until `stop` was called."""

    def __init__(self, dependencies: Dependencies, options: SchedulingOptions) -> None:
        self._dependencies = dependencies
        self._options = options
        self._seat = GroupSeat(dependencies, is_predecessor_dead=options.is_predecessor_dead)
        self._stop = asyncio.Event()
        self._run: EpochRun | None = None
        self._pause_s = 0.0  # before the next epoch is formed
        self._failures = 0  # epochs in a row that ended before a step returned

    @property
    def is_serving(self) -> bool:
        return self._run is not None

    @property
    def state(self) -> GroupState | None:
        """The state of the present epoch, for inspection; None while there is no epoch."""
        return None if self._run is None else self._run.state

    def load(self) -> SchedulerLoad:
        return SchedulerLoad() if self._run is None else self._run.load()

    def set_batch_bounds(self, bounds: BatchBounds) -> None:
        """Use other bounds for every batch from the next one on; running requests go on.

        Raises: SettingError if the policy cannot work under them; nothing has changed then.
        """
        if self._run is not None:
            self._run.set_batch_bounds(bounds)
        self._options = self._options.with_bounds(bounds)

    def stop(self) -> None:
        """Drain: submit no new steps, commit what is in flight, give the rest back, leave. `run` then returns."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until stopped.

        Raises: ProcessClosed if the pool has closed this process, SettingError if the policy cannot work on this group.
            Both mean that it makes no sense to go on.
        """
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(self._sweeps())]
            if (orders := self._dependencies.orders) is not None:
                background.append(group.create_task(orders.follow_lengths(self._dependencies.counted_lengths)))
            try:
                await self._live_until_stopped()
            except* SettingError:
                # No process can serve the group with these settings: free the seat at once for one with others.
                await self._seat.leave()
                raise
            await self._seat.leave()
            for task in background:
                task.cancel()

    async def _live_until_stopped(self) -> None:
        while not self._stop.is_set():
            epoch = await self._unless_stopped(self._seat.enter())
            if epoch is not None:
                await self._live(epoch)

    async def _live(self, epoch: Epoch) -> None:
        """Form and serve one epoch; return when it is over."""
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
            is_from_inside = any(error.is_from_inside for error in failures)
            blamed = self._run.in_flight() if self._run is not None and is_from_inside else None
            self._seat.note_failure(failures, blamed)
            reason = f"the engine failed: {failures[0]}"
        finally:
            self._run = None
        if reason is not None:
            log.warning("epoch over", extra={"epoch": epoch.number, "reason": reason})
            self._dependencies.observer.broke(epoch, reason)
            self._set_pause()

    async def _form_and_serve(self, epoch: Epoch) -> None:
        # The pause comes after the seat was taken: the requests of the last epoch are blamed before the lease ends, and
        # other groups can claim them.
        await self._unless_stopped(asyncio.sleep(self._pause_s))
        self._failures += 1
        shape = await self._unless_stopped(self._dependencies.engine.form(epoch))
        if shape is None:
            return
        limits = self._options.limits(shape)
        if (refusal := limits.refusal or self._dependencies.policy.refuse(limits)) is not None:
            raise SettingError(refusal)
        if await self._unless_stopped(self._promise(limits)) is None:
            return
        self._dependencies.observer.formed(epoch, shape.slots, self._dependencies.policy.describe(limits))
        log.info("epoch formed", extra={"epoch": epoch.number, "stages": shape.stages, "slots": shape.slots})
        self._run = EpochRun(self._dependencies, epoch, limits)
        try:
            await self._run.run(self._stop)
        finally:
            if self._run.state.submitted > len(self._run.state.steps):
                self._failures = 0

    async def _promise(self, limits: BatchLimits) -> int:
        """Promise the slots that any one request may need, and set the revision.

        No request needs more than the model's length, so a group that comes back with fewer slots still forms if it has
        at least that many.

        Returns: the promise in force.
        Raises: EngineError if the group has fewer slots than promised, or other blocks than the groups before it, or if
            the pool cannot store the model's requests yet.
        """
        dependencies, revision = self._dependencies, self._dependencies.caller.revision
        if self._options.is_encoder_decoder:
            await check_schema(dependencies)
        block_tokens = await dependencies.call_pool(
            lambda pool: pool.state_block_tokens(dependencies.caller, limits.block_tokens)
        )
        if block_tokens != limits.block_tokens:
            raise EngineError(
                f"the group has {limits.block_tokens} tokens in a KV block, and the other groups or waiting requests of"
                f" revision {revision} have {block_tokens}: start it with --block-tokens {block_tokens}"
            )
        promised = await dependencies.call_pool(lambda pool: pool.promise_slots(revision, limits.longest_request))
        if limits.slots < promised:
            raise EngineError(
                f"the group has {limits.slots} slots, and {promised} were promised to a request of revision {revision}:"
                " give the group as many slots, or a pool of its own"
            )
        await dependencies.call_pool(lambda pool: pool.set_revision(revision, self._options.generation))
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
        """Sweep until cancelled. Sweeps run all the time, so they also log that the pool went away and came back."""
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

    def _set_pause(self) -> None:
        timings = self._dependencies.timings
        doublings = min(max(self._failures - 1, 0), 30)
        self._pause_s = min(timings.form_retry_s * 2.0**doublings, timings.form_retry_max_s)

    async def _unless_stopped(self, call: Awaitable[T]) -> T | None:
        """Await `call`, or cancel it if the scheduler is stopped first. Returns: None if stopped."""
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
    """Return the exceptions of a group and of the groups in it, in their order."""
    found: list[E] = []
    for error in errors.exceptions:
        found += flat_errors(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


async def check_schema(dependencies: Dependencies) -> None:
    """Check that the pool can store requests of an encoder-decoder model before that model takes over.

    Otherwise every call would be refused from then on. A model that is in force already has requests to finish.
    Raises: EngineError.
    """
    stats = await dependencies.call_pool(lambda pool: pool.stats())
    if stats.schema < SCHEMA_OF_TARGETS and stats.revision != dependencies.caller.revision:
        raise EngineError(
            f"requests of an encoder-decoder model need schema {SCHEMA_OF_TARGETS} in the pool, and schema"
            f" {stats.schema} of the release before is in force: after the upgrade of all parts, run"
            f" `orca pool schema {SCHEMA_OF_TARGETS}`, with the --data of `orca up` or the --pool of a cluster"
        )
