"""One epoch of a group: claim, select, submit, read, commit, each in a task of its own, around one `GroupState`.

    claims   -> add requests                       while the policy has room for more
    steps    -> next_batch -> schedule -> submit   as soon as a result or a request changes what can run
    results  -> tokens, ends -> commit queue             in step order
    commits  -> one call at a time -> answers      never waited for by the others

Claims and commits are classes of their own; steps and results are here, with what the group owns.

Whatever goes wrong with the engine or the seat ends the epoch as a whole; what goes wrong with one request ends that.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from orca.core.domain.errors import EngineError, SettingError
from orca.core.domain.request import End
from orca.core.domain.step import Claim, Epoch, Sampled, StepResult
from orca.pool.records import Claimed, CommitAnswer, CommitEntry, Heartbeat
from orca.scheduler.claims import RequestClaimer
from orca.scheduler.commit_queue import CommitQueue
from orca.scheduler.commits import Committer
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.observer import IterationRecord, SchedulerLoad
from orca.scheduler.policy.finish import FinishDetector
from orca.scheduler.policy.policy import BatchLimits, next_batch
from orca.scheduler.policy.state import NOTHING, Batch, GroupRequest, GroupState
from orca.scheduler.prefetch_timer import PrefetchTimer

log = logging.getLogger("orca.scheduler")

_QUEUED = 2
"""Times the interval of commits that theirs is while requests wait for a place, and so for the processors that a commit
takes: all of them then end the earlier the less is spent on showing what is not the end of any."""
_PATIENCE = 16
"""Intervals of commits after which one more is not noticed: it is a sixteenth of what was waited for at most."""


class EpochRun:
    """A formed epoch, from its first claim to its end. Made once for each epoch."""

    def __init__(self, dependencies: Dependencies, epoch: Epoch, limits: BatchLimits) -> None:
        self._dependencies = dependencies
        self._epoch = epoch
        self._limits = limits
        self.state = GroupState()
        self._commit_queue = CommitQueue(holds_results=dependencies.policy.holds_results, can_wait=self._can_wait)
        self._claims = RequestClaimer(dependencies, limits, self.state, adopt=self._adopt)
        self._commits = Committer(
            dependencies, self._commit_queue, settle=self._settle, interval_s=self._interval_s, epoch=epoch.number
        )
        self._endings: dict[GroupRequest, FinishDetector] = {}
        self._owned: dict[str, GroupRequest] = {}  # what the pool should say is ours, until an answer tells otherwise
        self._pace = PrefetchTimer()
        self._handed_over = 0  # number of the last step that the engine took
        self._is_draining = False
        self._can_step = asyncio.Event()  # something changed what can run
        self._is_quiet = asyncio.Event()  # no step is in flight
        self._is_quiet.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then finish what is in flight and commit it.

        Raises: ExceptionGroup of EngineError, SeatLost or ProcessClosed when the epoch ends before.
        """
        async with asyncio.TaskGroup() as group:
            commits = group.create_task(self._commits.run())
            try:
                async with asyncio.TaskGroup() as inner:
                    running = [inner.create_task(part) for part in (self._steps(), self._results())]
                    claiming = [inner.create_task(part) for part in (self._claims.run(), self._claims.listen())]
                    await stop.wait()
                    self._is_draining = True
                    _cancel(claiming)
                    await self._is_quiet.wait()
                    _cancel(running)
            finally:
                # What was read is right whatever became of the engine: the next owner need not compute it again. Who
                # is cancelled has no time for it (a second signal), or has lost the seat and would be refused.
                if not _is_cancelled():
                    await self._commits.flush()
                commits.cancel()

    def set_batch_bounds(self, max_batch_size: int, max_batch_tokens: int | None) -> None:
        """Bound batches by other sizes. Raises: SettingError when the policy cannot work under them."""
        limits = replace(self._limits, max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens)
        if (refusal := self._dependencies.policy.refuse(limits)) is not None:
            raise SettingError(refusal)
        self._limits = limits
        self._claims.set_batch_bounds(limits)
        self._can_step.set()

    def load(self) -> SchedulerLoad:
        running = sum(entry.is_admitted and not entry.is_over for entry in self.state.requests)
        return SchedulerLoad(
            running=running,
            claimed=sum(not entry.is_admitted for entry in self.state.requests),
            waiting=self._claims.waiting,
            slots_reserved=self.state.reserved,
            slots=self._limits.slots,
            uncommitted=len(self._commit_queue),
        )

    def in_flight(self) -> dict[str, Claim]:
        """Requests, by their claims, of the steps that the engine took and did not bring back."""
        taken = (step for step in self.state.steps if step.number <= self._handed_over)
        return {row.request.request.id: row.request.claim for step in taken for row in step.rows}

    async def heartbeat(self) -> None:
        """Renew the seat and compare what the pool says is ours with what we hold (protocol: what each side does).

        Requests that came or went while the call was under way are left alone: the answer may be older than they are.
        Raises: SeatLost, ProcessClosed, PoolUnavailable.
        """
        before = dict(self._owned)
        beat = await self._dependencies.pool.heartbeat(
            self._dependencies.caller, offered_slots=self._limits.lasting_offer
        )
        for request_id, entry in before.items():
            if self._owned.get(request_id) is entry and beat.owned.get(request_id) != entry.claim:
                self._drop(entry, "the pool does not list it")
        if not self._claims.is_under_way:
            await self._give_back(beat, before)

    async def _give_back(self, beat: Heartbeat, before: Mapping[str, GroupRequest]) -> None:
        unknown: dict[str, Claim] = {
            request_id: claim
            for request_id, claim in beat.owned.items()
            if request_id not in before and request_id not in self._owned
        }
        if unknown:
            log.warning("giving back requests that nobody here knows", extra={"requests": sorted(unknown)})
            await self._dependencies.pool.give_back(unknown)

    # steps

    async def _steps(self) -> None:
        while True:
            await self._can_step.wait()
            self._can_step.clear()
            while not self._is_draining and self._is_due(batch := await self._next_batch()):
                if (spare_s := self._spare_s(batch)) > 0:
                    await self._until_news(spare_s)
                    continue
                self._is_quiet.clear()
                step = self.state.schedule(batch, self._epoch, now_ns=self._dependencies.clock_ns())
                for admission in batch.admitted:
                    self._commit_queue.admit(admission.request)
                # Requests whose last token this step draws make room for others now.
                self._claims.look_again()
                await self._dependencies.engine.submit(step)
                self._handed_over = step.number

    async def _next_batch(self) -> Batch:
        batch = next_batch(self._dependencies.policy, self.state, self._limits)
        if self._limits.prefetch or not 0 < len(batch.rows) < self._limits.max_batch_size:
            return batch
        # With prefetch another step hides the time in which a place stands empty; Algorithm 1 itself leaves none empty.
        await self._claims.catch_up()
        return NOTHING if self._is_draining else next_batch(self._dependencies.policy, self.state, self._limits)

    def _spare_s(self, batch: Batch) -> float:
        """How long a prefetched batch can wait for a request that may still arrive, where it has room for one."""
        is_open = len(batch.rows) < self._limits.max_batch_size and not self._claims.waiting
        if not self.state.steps or not is_open or self._limits.stages > 1:
            return 0.0
        return (self._pace.due_ns(self.state.steps[0]) - self._dependencies.clock_ns()) / 1e9

    async def _until_news(self, most_s: float) -> None:
        """Until something changes what can run, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._can_step.wait()
        self._can_step.clear()

    def _is_due(self, batch: Batch) -> bool:
        """Frees wait for a step with rows while one can be expected: alone they would only cost a step."""
        return bool(batch.rows) or (bool(batch.freed) and not self.state.steps)

    async def _results(self) -> None:
        async for result in self._dependencies.engine.results():
            self._read(result)
        raise EngineError("the results of the epoch ended")

    def _read(self, result: StepResult) -> None:
        if not self.state.steps or result.number != self.state.steps[0].number or result.epoch != self._epoch:
            raise EngineError(f"result {result.number} of epoch {result.epoch.number} came out of order")
        now_ns = self._dependencies.clock_ns()
        self._pace.read(self.state.steps[0], now_ns)
        step = self.state.read()
        drawn = [row.request for row in step.rows if row.sample]
        if [entry.handle for entry in drawn] != [sampled.handle for sampled in result.sampled]:
            raise EngineError(f"result {result.number} does not have a token for each row that draws one")
        for entry, sampled in zip(drawn, result.sampled, strict=True):
            if not entry.is_ended:
                self._receive(entry, sampled)
        self._dependencies.observer.iterated(
            IterationRecord(
                epoch=self._epoch,
                step=step.number,
                batch=step.batch,
                submitted_ns=step.submitted_ns,
                returned_ns=now_ns,
            )
        )
        if not self.state.steps:
            self._is_quiet.set()
        # First what somebody waits for: the next step while the stages have none, else the tokens that are here.
        if self.state.steps:
            self._commits.announce()
        self._look_again()
        self._commits.announce()

    def _receive(self, entry: GroupRequest, sampled: Sampled) -> None:
        if sampled.index != entry.received:
            raise EngineError(f"token {sampled.index} of {entry.request.id} came where {entry.received} was due")
        self.state.receive(entry, sampled.token.id)
        end = self._endings[entry].push(sampled.token.id)
        if end is not None:
            self._end(entry, end)
        self._commit_queue.put(entry, sampled.index, sampled.token, end)

    def _can_wait(self, entry: GroupRequest) -> bool:
        """Has its client waited so long that an interval of commits is not noticed, while others wait for a place, and
        so for the processors that a commit takes? Never where the interval might be past a deadline."""
        request = entry.request
        if request.deadline_ms is not None or request.first_token_deadline_ms is not None:
            return False
        waited_s = (self._dependencies.wall_ms() - request.submitted_ms) / 1000
        return self._claims.waiting > 0 and waited_s > _PATIENCE * self._interval_s()

    def _interval_s(self) -> float:
        """From one commit of what nobody waits for to the next."""
        return self._dependencies.timings.commit_s * (_QUEUED if self._claims.waiting else 1)

    def _end(self, entry: GroupRequest, end: End) -> None:
        self.state.end(entry)
        del self._endings[entry]
        self._dependencies.observer.ended(entry.request, end.reason, end.count)
        fields = self._fields(entry) | {"reason": end.reason, "tokens": end.count}
        log.info("request ended", extra=fields)

    def _adopt(self, claimed: Claimed) -> None:
        request = claimed.request
        if (older := self._owned.get(request.id)) is not None:
            self._drop(older, "claimed again")
        entry = self.state.add(request, claimed.claim, claimed.log, is_alone=claimed.is_alone)
        ending = FinishDetector(request, self._dependencies.eos_token_ids, self._dependencies.make_stop_string_matcher)
        self._owned[request.id] = entry
        self._endings[entry] = ending
        self._dependencies.observer.claimed(request, len(claimed.log))
        if claimed.is_alone:
            self._dependencies.observer.isolated(request)
        log.info("request claimed", extra=self._fields(entry) | {"logged": len(claimed.log)})
        if claimed.log and (end := ending.replay(claimed.log)) is not None:
            # Its tokens were all there, only its end was not.
            self._end(entry, end)
            self._commit_queue.put(entry, end.count, None, end)
            self._commits.announce()
        self._can_step.set()

    def _settle(self, entry: GroupRequest, written: CommitEntry, answer: CommitAnswer) -> None:
        is_refused = answer in (CommitAnswer.ENDED, CommitAnswer.NOT_YOURS)
        if is_refused:
            log.info("commit refused", extra=self._fields(entry) | {"index": written.index, "answer": answer})
            self._drop(entry, answer)
        elif written.end is not None:
            self._disown(entry)
        elif entry.is_alone:
            self.state.acquit(entry, self._limits.block_tokens)
            self._look_again()

    def _drop(self, entry: GroupRequest, reason: str) -> None:
        """The request is not ours any more: it is scheduled no further and its slots return."""
        if entry in self._endings:
            log.info("request dropped", extra=self._fields(entry) | {"reason": reason})
            del self._endings[entry]
        self._disown(entry)
        self.state.end(entry)
        self._commit_queue.forget(entry)
        self._look_again()
        self._commits.announce()

    def _look_again(self) -> None:
        """Something changed what can run and how much can be claimed."""
        self._can_step.set()
        self._claims.look_again()

    def _disown(self, entry: GroupRequest) -> None:
        if self._owned.get(entry.request.id) is entry:
            del self._owned[entry.request.id]

    def _fields(self, entry: GroupRequest) -> dict[str, object]:
        return {
            "request_id": entry.request.id,
            "claim": entry.claim.number,
            "epoch": self._epoch.number,
            "step": self.state.submitted,
        }


def _is_cancelled() -> bool:
    """Was the running task told to end, by somebody outside the task groups that it is in?"""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
