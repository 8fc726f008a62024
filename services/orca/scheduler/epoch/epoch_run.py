"""One epoch of a group: claim, select, submit, read, commit, each in a task of its own, around one `GroupState`.

    claims.py    -> add requests                       while the policy has free capacity
    steps.py     -> next_batch -> schedule -> submit   as soon as a result or a request changes what can run
    results      -> tokens, ends -> commit queue       in step order
    commits.py   -> one call at a time -> answers      never waited for by the others

A failure of the engine or the seat ends the whole epoch; a refusal of one request ends that request.
"""

import asyncio
import logging
from collections.abc import Iterable

from orca.core.domain.errors import EngineError, SettingError
from orca.core.domain.step import Claim, Epoch, StepResult
from orca.pool.records import Claimed
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.epoch.claims import RequestClaimer
from orca.scheduler.epoch.commit_queue import CommitQueue
from orca.scheduler.epoch.commits import Committer
from orca.scheduler.epoch.owned_requests import OwnedRequests
from orca.scheduler.epoch.steps import StepSubmitter
from orca.scheduler.observer import IterationRecord, SchedulerLoad
from orca.scheduler.policy.admission import charged_slots
from orca.scheduler.policy.batch import GroupRequest
from orca.scheduler.policy.policy import BatchBounds, BatchLimits
from orca.scheduler.policy.prefix_index import held_blocks
from orca.scheduler.policy.state import GroupState

log = logging.getLogger("orca.scheduler")

_QUEUED_INTERVALS = 2
"""Commit half as often while requests queue: a commit costs CPU time that would finish requests sooner."""
_PATIENT_INTERVALS = 16
"""A client that has waited for so many intervals of commits does not notice one more: it is at most a sixteenth of its
wait."""


class EpochRun:
    """A formed epoch, from its first claim to its end. Each epoch has its own."""

    def __init__(self, dependencies: Dependencies, epoch: Epoch, limits: BatchLimits) -> None:
        self._dependencies = dependencies
        self._epoch = epoch
        self._limits = limits
        self.state = GroupState(prefixes=limits.make_prefixes())
        self._commit_queue = CommitQueue(holds_results=dependencies.policy.holds_results, can_wait=self._can_wait)
        self._claimer = RequestClaimer(dependencies, limits, self.state, adopt=self._adopt)
        self._steps = StepSubmitter(
            dependencies, epoch, limits, self.state, self._claimer, admit=self._commit_queue.admit
        )
        self._owned = OwnedRequests(
            dependencies,
            epoch,
            limits.block_tokens,
            self.state,
            self._commit_queue,
            wake=self._wake,
            wake_committer=self._wake_committer,
        )
        self._committer = Committer(
            dependencies,
            self._commit_queue,
            settle=self._owned.settle,
            interval_s=self._interval_s,
            epoch=epoch.number,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then finish the steps in flight and commit their tokens.

        Raises: ExceptionGroup of EngineError, SeatLost or ProcessClosed if the epoch ends before.
        """
        async with asyncio.TaskGroup() as group:
            commits = group.create_task(self._committer.run())
            try:
                async with asyncio.TaskGroup() as inner:
                    running = [inner.create_task(part) for part in (self._steps.run(), self._results())]
                    claiming = [inner.create_task(part) for part in (self._claimer.run(), self._claimer.listen())]
                    await stop.wait()
                    _cancel(claiming)
                    await self._steps.drain()
                    _cancel(running)
            finally:
                # Tokens that were read are right whatever became of the engine: the next owner need not compute them
                # again. A cancelled task has no time to commit them (a second signal), or has lost the seat and would
                # be refused.
                if not _is_cancelled():
                    await self._committer.flush()
                commits.cancel()

    def set_batch_bounds(self, bounds: BatchBounds) -> None:
        """Use other bounds of a batch. Raises: SettingError if the policy cannot work under them."""
        limits = self._limits.with_bounds(bounds)
        if (refusal := self._dependencies.policy.refuse(limits)) is not None:
            raise SettingError(refusal)
        self._limits = limits
        self._claimer.set_batch_bounds(limits)
        self._steps.set_batch_bounds(limits)

    def load(self) -> SchedulerLoad:
        prefixes = self.state.prefixes
        running = sum(entry.is_admitted and not entry.is_over for entry in self.state.requests)
        return SchedulerLoad(
            running=running,
            claimed=sum(not entry.is_admitted for entry in self.state.requests),
            waiting=self._claimer.waiting,
            slots_reserved=charged_slots(self.state),
            slots=self._limits.slots,
            uncommitted=len(self._commit_queue),
            cached_blocks=0 if prefixes is None else prefixes.index.cached,
            held_blocks=0 if prefixes is None else held_blocks(prefixes.index),
        )

    def in_flight(self) -> dict[str, Claim]:
        """Return the requests, with their claims, of the steps that the engine accepted and has not returned."""
        return self._steps.in_flight()

    async def heartbeat(self) -> None:
        """Renew the seat, and compare the pool's list of our requests with ours (protocol: what each side does).

        Requests that came or went during the call are left alone: the answer may be older than they are.
        Raises: SeatLost, ProcessClosed, PoolUnavailable.
        """
        pool, caller = self._dependencies.pool, self._dependencies.caller
        before = self._owned.snapshot()
        heartbeat = await pool.heartbeat(caller, offered_slots=self._limits.lasting_offer)
        self._owned.drop_unlisted(heartbeat, before)
        if self._claimer.is_claiming:
            return
        if unknown := self._owned.unknown(heartbeat, before):
            log.warning("giving back requests that are not known here", extra={"requests": sorted(unknown)})
            await pool.give_back(unknown)

    async def _results(self) -> None:
        async for result in self._dependencies.engine.results():
            self._read(result)
        raise EngineError("the results of the epoch ended")

    def _read(self, result: StepResult) -> None:
        now_ns = self._dependencies.clock_ns()
        step = self._steps.take(result, now_ns=now_ns)
        refused = {each.handle: each.reason for each in result.refused}
        drawn = [row.request for row in step.rows if row.sample and row.request.handle not in refused]
        if [entry.handle for entry in drawn] != [sampled.handle for sampled in result.sampled]:
            raise EngineError(f"result {result.number} does not have a token for each row that draws one")
        for entry, sampled in zip(drawn, result.sampled, strict=True):
            if not entry.is_ended:
                self._owned.receive(entry, sampled)
        for entry in (row.request for row in step.rows):
            if entry.handle in refused and not entry.is_ended:
                self._owned.refuse(entry, refused[entry.handle])
        self._dependencies.observer.iterated(
            IterationRecord(
                epoch=self._epoch,
                step=step.number,
                batch=step.batch,
                submitted_ns=step.submitted_ns,
                returned_ns=now_ns,
                evicted_blocks=step.evicted_blocks,
            )
        )
        # The more urgent task first: the next step if the stages have none, otherwise the commit of these tokens.
        if self.state.steps:
            self._committer.wake()
        self._wake()
        self._committer.wake()

    def _adopt(self, claimed: Claimed) -> None:
        self._owned.adopt(claimed)
        self._steps.wake()

    def _wake(self) -> None:
        """Check again what can run and how much can be claimed."""
        self._steps.wake()
        self._claimer.wake()

    def _wake_committer(self) -> None:
        self._committer.wake()

    def _can_wait(self, entry: GroupRequest) -> bool:
        """Return true if requests queue and this request's client will not notice an interval of commits.

        While requests queue, a commit costs CPU time that would finish them sooner. A request with a deadline never
        waits: the interval might exceed it.
        """
        request = entry.request
        if request.deadline_ms is not None or request.first_token_deadline_ms is not None:
            return False
        waited_s = (self._dependencies.wall_ms() - request.submitted_ms) / 1000
        return self._claimer.waiting > 0 and waited_s > _PATIENT_INTERVALS * self._interval_s()

    def _interval_s(self) -> float:
        """Return the interval between commits of tokens that nobody waits for."""
        return self._dependencies.timings.commit_s * (_QUEUED_INTERVALS if self._claimer.waiting else 1)


def _is_cancelled() -> bool:
    """Return true if something outside the task groups of the running task has cancelled it."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
