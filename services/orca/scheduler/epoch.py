"""One epoch of a group: claim, select, submit, read, commit, each in a task of its own, around one `GroupState`.

    claims   -> add requests                       while the policy has room for more
    steps    -> next_batch -> schedule -> submit   as soon as a result or a request changes what can run
    results  -> tokens, ends -> outbox             in step order
    commits  -> one call at a time -> answers      never waited for by the others

Whatever goes wrong with the engine or the seat ends the epoch as a whole; what goes wrong with one request ends that.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from orca.core.engine import Engine
from orca.core.errors import EngineError, PoolUnavailable
from orca.core.request import End
from orca.core.step import Claim, Epoch, Sampled, StepResult
from orca.pool.api import Caller, ClaimAnswer, Claimed, CommitAnswer, CommitEntry, Heartbeat, Pool, StaleCall
from orca.scheduler.ending import Ending, MakeOutputText
from orca.scheduler.observer import IterationRecord, Load, Observer
from orca.scheduler.outbox import Outbox
from orca.scheduler.policy import Limits, Policy, Room, next_batch
from orca.scheduler.state import Batch, GroupRequest, GroupState

log = logging.getLogger("orca.scheduler")
T = TypeVar("T")

SAY_AGAIN_S = 5.0
"""Between two words on one call that the pool does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long the loop waits for what, in seconds. The defaults suit a pool that answers in a millisecond."""

    heartbeat_s: float = 0.5  # between heartbeats, and between sweeps (protocol: twice a second)
    work_s: float = 0.25  # bound on a wait for the pool's hint that a request came: what a lost hint costs at most
    head_s: float = 0.05  # between claims while the head of the queue does not fit: another group may have taken it
    pool_retry_s: float = 0.1  # before a call that the pool did not answer is made again
    form_retry_s: float = 0.2  # before the next epoch after a failure; doubles up to `form_retry_max_s`
    form_retry_max_s: float = 5.0
    flush_s: float = 2.0  # bound on committing what was read, when an epoch ends or the scheduler stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What the loop stands between, and all that it takes from outside."""

    pool: Pool
    engine: Engine
    policy: Policy
    caller: Caller
    calls: Iterator[int]  # rising numbers for enter and claim, shared by all epochs of the process
    clock_ns: Callable[[], int]  # monotonic
    observer: Observer
    eos_token_ids: tuple[int, ...] = ()
    make_output_text: MakeOutputText | None = None
    times: Times = Times()


class EpochRun:
    """A formed epoch, from its first claim to its end. Made once for each epoch."""

    def __init__(self, seams: Seams, epoch: Epoch, limits: Limits) -> None:
        self._seams = seams
        self._epoch = epoch
        self._limits = limits
        self.state = GroupState()
        self._outbox = Outbox(holds_results=seams.policy.holds_results)
        self._endings: dict[GroupRequest, Ending] = {}
        self._owned: dict[str, GroupRequest] = {}  # what the pool should say is ours, until an answer tells otherwise
        self._handed_over = 0  # number of the last step that the engine took
        self._waiting = 0  # in the pool's queue, as of the last claim
        self._is_claiming = False  # a claim call is under way: the pool may list what nobody here knows yet
        self._is_draining = False
        self._can_step = asyncio.Event()  # something changed what can run
        self._has_room = asyncio.Event()  # something changed how much can be claimed
        self._has_work = asyncio.Event()  # the pool hinted at new requests, or none was heard for a while
        self._has_news = asyncio.Event()  # the outbox has something
        self._is_quiet = asyncio.Event()  # no step is in flight
        self._is_flushed = asyncio.Event()  # the outbox is empty and no commit is under way
        self._is_quiet.set()
        self._is_flushed.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then finish what is in flight and commit it.

        Raises: ExceptionGroup of EngineError, SeatLost or ProcessClosed when the epoch ends before.
        """
        async with asyncio.TaskGroup() as group:
            commits = group.create_task(self._commit_all())
            try:
                async with asyncio.TaskGroup() as inner:
                    running = [inner.create_task(part) for part in (self._steps(), self._results())]
                    claiming = [inner.create_task(part) for part in (self._claims(), self._hints())]
                    await stop.wait()
                    self._is_draining = True
                    _cancel(claiming)
                    await self._is_quiet.wait()
                    _cancel(running)
            finally:
                # What was read is right whatever became of the engine: the next owner need not compute it again. Who
                # is cancelled has no time for it (a second signal), or has lost the seat and would be refused.
                if not _is_cancelled():
                    await self._flush()
                commits.cancel()

    def load(self) -> Load:
        running = sum(entry.is_admitted and not entry.is_over for entry in self.state.requests)
        return Load(
            running=running,
            claimed=sum(not entry.is_admitted for entry in self.state.requests),
            waiting=self._waiting,
            slots_reserved=self.state.reserved,
            slots=self._limits.slots,
            uncommitted=len(self._outbox),
        )

    def in_flight(self) -> dict[str, Claim]:
        """Requests, by their claims, of the steps that the engine took and did not bring back."""
        taken = (step for step in self.state.steps if step.number <= self._handed_over)
        return {pick.request.request.id: pick.request.claim for step in taken for pick in step.picks}

    async def heartbeat(self) -> None:
        """Renew the seat and compare what the pool says is ours with what we hold (protocol: what each side does).

        Requests that came or went while the call was under way are left alone: the answer may be older than they are.
        Raises: SeatLost, ProcessClosed, PoolUnavailable.
        """
        before = dict(self._owned)
        beat = await self._seams.pool.heartbeat(self._seams.caller)
        for request_id, entry in before.items():
            if self._owned.get(request_id) is entry and beat.owned.get(request_id) != entry.claim:
                self._drop(entry, "the pool does not list it")
        if not self._is_claiming:
            await self._give_back(beat, before)

    async def _give_back(self, beat: Heartbeat, before: Mapping[str, GroupRequest]) -> None:
        unknown: dict[str, Claim] = {
            request_id: claim
            for request_id, claim in beat.owned.items()
            if request_id not in before and request_id not in self._owned
        }
        if unknown:
            log.warning("giving back requests that nobody here knows", extra={"requests": sorted(unknown)})
            await self._seams.pool.give_back(unknown)

    # steps

    async def _steps(self) -> None:
        while True:
            await self._can_step.wait()
            self._can_step.clear()
            while not self._is_draining and self._is_due(batch := self._next_batch()):
                self._is_quiet.clear()
                step = self.state.schedule(batch, self._epoch, now_ns=self._seams.clock_ns())
                for admission in batch.admitted:
                    self._outbox.admit(admission.request)
                # Requests whose last token this step draws make room for others now.
                self._has_room.set()
                await self._seams.engine.submit(step)
                self._handed_over = step.number

    def _next_batch(self) -> Batch:
        return next_batch(self._seams.policy, self.state, self._limits)

    def _is_due(self, batch: Batch) -> bool:
        """Frees wait for a step with rows while one can be expected: alone they would only cost a step."""
        return bool(batch.picks) or (bool(batch.freed) and not self.state.steps)

    async def _results(self) -> None:
        async for result in self._seams.engine.results():
            self._read(result)
        raise EngineError("the results of the epoch ended")

    def _read(self, result: StepResult) -> None:
        if not self.state.steps or result.number != self.state.steps[0].number or result.epoch != self._epoch:
            raise EngineError(f"result {result.number} of epoch {result.epoch.number} came out of order")
        step = self.state.read()
        drawn = [pick.request for pick in step.picks if pick.sample]
        if [entry.handle for entry in drawn] != [sampled.handle for sampled in result.sampled]:
            raise EngineError(f"result {result.number} does not have a token for each row that draws one")
        for entry, sampled in zip(drawn, result.sampled, strict=True):
            if not entry.is_ended:
                self._receive(entry, sampled)
        self._seams.observer.iterated(
            IterationRecord(
                epoch=self._epoch,
                step=step.number,
                batch=step.batch,
                submitted_ns=step.submitted_ns,
                returned_ns=self._seams.clock_ns(),
            )
        )
        if not self.state.steps:
            self._is_quiet.set()
        self._can_step.set()
        self._has_room.set()
        self._announce()

    def _receive(self, entry: GroupRequest, sampled: Sampled) -> None:
        if sampled.index != entry.received:
            raise EngineError(f"token {sampled.index} of {entry.request.id} came where {entry.received} was due")
        self.state.receive(entry, sampled.token.id)
        end = self._endings[entry].push(sampled.token.id)
        if end is not None:
            self._end(entry, end)
        self._outbox.put(entry, sampled.index, sampled.token, end)

    def _end(self, entry: GroupRequest, end: End) -> None:
        self.state.end(entry)
        del self._endings[entry]
        self._seams.observer.ended(entry.request, end.reason, end.count)
        fields = self._fields(entry) | {"reason": end.reason, "tokens": end.count}
        log.info("request ended", extra=fields)

    # claims

    async def _claims(self) -> None:
        refused = 0  # free slots that were not enough for the head of the queue
        while True:
            if refused:
                # The head goes without a word when its client leaves or another group takes it: then younger ones fit.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seams.times.head_s):
                        await self._room_above(refused)
            room = await self._room_above(0)
            self._has_work.clear()
            answer = await self._claim(room)
            for claimed in answer.claimed:
                self._adopt(claimed)
            is_refused = answer.waiting > 0 and len(answer.claimed) < room.requests
            refused = self._room().slots if is_refused else 0
            if not answer.waiting:
                await self._has_work.wait()

    async def _room_above(self, slots: int) -> Room:
        """Wait until another request, and more than so many slots, can be claimed."""
        while (room := self._room()).requests <= 0 or room.slots <= slots:
            self._has_room.clear()
            await self._has_room.wait()
        return room

    def _room(self) -> Room:
        return self._seams.policy.room(self.state, self._limits)

    async def _hints(self) -> None:
        """Listen for new work all the time, so that no hint falls between a claim and the wait after it."""
        times = self._seams.times
        while True:
            await patiently(
                lambda: self._seams.pool.wait_for_work(self._seams.caller.revision, times.work_s), times.pool_retry_s
            )
            self._has_work.set()

    async def _claim(self, room: Room) -> ClaimAnswer:
        """One claim, repeated under its number until the pool answers: the answer to a lost reply is stored there."""
        self._is_claiming = True
        while True:
            call = next(self._seams.calls)
            try:
                answer = await patiently(
                    lambda call=call: self._seams.pool.claim(  # type: ignore[misc]
                        self._seams.caller,
                        call,
                        free_slots=room.slots,
                        total_slots=self._limits.slots,
                        block_tokens=self._limits.block_tokens,
                        most=room.requests,
                    ),
                    self._seams.times.pool_retry_s,
                )
            except StaleCall:
                continue
            self._is_claiming = False
            self._waiting = answer.waiting
            return answer

    def _adopt(self, claimed: Claimed) -> None:
        request = claimed.request
        if (older := self._owned.get(request.id)) is not None:
            self._drop(older, "claimed again")
        entry = self.state.add(request, claimed.claim, claimed.log, is_alone=claimed.is_alone)
        ending = Ending(request, self._seams.eos_token_ids, self._seams.make_output_text)
        self._owned[request.id] = entry
        self._endings[entry] = ending
        self._seams.observer.claimed(request, len(claimed.log))
        if claimed.is_alone:
            self._seams.observer.isolated(request)
        log.info("request claimed", extra=self._fields(entry) | {"logged": len(claimed.log)})
        if claimed.log and (end := ending.replay(claimed.log)) is not None:
            # Its tokens were all there, only its end was not.
            self._end(entry, end)
            self._outbox.put(entry, end.count, None, end)
            self._announce()
        self._can_step.set()

    # commits

    def _announce(self) -> None:
        if self._outbox:
            self._is_flushed.clear()
            self._has_news.set()

    async def _commit_all(self) -> None:
        has_committed = False
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            entries = self._outbox.take()
            if entries:
                answers = await patiently(
                    lambda entries=entries: self._seams.pool.commit(list(entries.values())),  # type: ignore[misc]
                    self._seams.times.pool_retry_s,
                )
                for (entry, written), answer in zip(entries.items(), answers, strict=True):
                    self._settle(entry, written, answer)
                if not has_committed and CommitAnswer.APPLIED in answers:
                    has_committed = True
                    log.info("first commit", extra={"epoch": self._epoch.number})
            if not self._outbox:
                self._is_flushed.set()

    def _settle(self, entry: GroupRequest, written: CommitEntry, answer: CommitAnswer) -> None:
        self._seams.observer.answered(answer)
        is_refused = answer in (CommitAnswer.ENDED, CommitAnswer.NOT_YOURS)
        if is_refused:
            log.info("commit refused", extra=self._fields(entry) | {"index": written.index, "answer": answer})
            self._drop(entry, answer)
        elif written.end is not None:
            self._disown(entry)
        elif entry.is_alone:
            self.state.acquit(entry, self._limits.block_tokens)
            self._can_step.set()
            self._has_room.set()

    def _drop(self, entry: GroupRequest, reason: str) -> None:
        """The request is not ours any more: it is scheduled no further and its slots return."""
        if entry in self._endings:
            log.info("request dropped", extra=self._fields(entry) | {"reason": reason})
            del self._endings[entry]
        self._disown(entry)
        self.state.end(entry)
        self._outbox.forget(entry)
        self._can_step.set()
        self._has_room.set()
        self._announce()

    def _disown(self, entry: GroupRequest) -> None:
        if self._owned.get(entry.request.id) is entry:
            del self._owned[entry.request.id]

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(self._seams.times.flush_s):
                await self._is_flushed.wait()
        except TimeoutError:
            log.warning("the pool did not take the last tokens in time", extra={"epoch": self._epoch.number})

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


async def patiently(call: Callable[[], Awaitable[T]], pause_s: float) -> T:
    """Call the pool until it answers, and say now and then that it does not; every transition may be repeated."""
    clock, silent_until = asyncio.get_running_loop().time, 0.0
    while True:
        try:
            return await call()
        except PoolUnavailable as error:
            if clock() >= silent_until:
                log.warning("the pool did not answer, asking again", extra={"error": str(error)})
                silent_until = clock() + SAY_AGAIN_S
            await asyncio.sleep(pause_s)
