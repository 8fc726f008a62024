"""The pool's rules, each left out by a class of its own: what a walk of the model drives to find what a rule is for.

Some rules back each other up, so that one of them alone may go. A claim's number rises at each take-back and at each
claim. A commit compares the value at an index that is already there. This comparison catches, at its first token, a
process that should not be the owner. Where a rule is only seen to be needed without that comparison, its class inherits
IndexOnly.

Others cost no token when they go, since schedulers give back what they do not know, and commits compare claims. These
are the order of claims and the marks, stored answers and stale calls, heartbeats without a seat, the take-back after a
gap. The promises of the calls themselves need those (see pool_model_calls).
"""

# The rules that are taken away here are methods whose arguments then go unused.
# ruff: noqa: ARG002

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orca.core.domain.request import End, FinishReason, Request
from orca.core.domain.step import Claim
from orca.pool.memory.pool import MemoryPool, unfinished
from orca.pool.memory.state import ParentRecord, PoolState, RequestRecord, Seat
from orca.pool.records import (
    Caller,
    ClaimAnswer,
    CommitAnswer,
    CommitEntry,
    Heartbeat,
    LargerRequests,
    OwnershipState,
    SeatEntered,
    SeatHeld,
    Submission,
)


class IndexOnly(MemoryPool):
    """A commit at an index that is already there is taken for a repeated one, whatever its value."""

    def _is_there(self, record: RequestRecord, entry: CommitEntry) -> bool:
        return True


class ClaimsNotCompared(IndexOnly):
    def _is_owner(self, record: RequestRecord, claim: Claim) -> bool:
        return record.state is OwnershipState.OWNED


class CallIdNotCompared(IndexOnly):
    def _is_owner(self, record: RequestRecord, claim: Claim) -> bool:
        return record.state is OwnershipState.OWNED and record.number == claim.number


class NewestProcessWins(MemoryPool):
    def _may_take_seat(self, group: str, seat: Seat, is_holder_dead: bool) -> bool:
        return True


class LeavesWithTheirOwner(PoolState):
    """Has moments in which a group's requests are not taken back."""

    is_leaving_them = False

    @contextlib.contextmanager
    def leaving_them(self) -> Iterator[None]:
        self.is_leaving_them = True
        try:
            yield
        finally:
            self.is_leaving_them = False

    def take_back_all(self, group: str) -> None:
        if not self.is_leaving_them:
            super().take_back_all(group)


class EnteringKeepsClaims(IndexOnly):
    """A new process finds the requests of the old one under the same claims."""

    state_class = LeavesWithTheirOwner
    state: LeavesWithTheirOwner

    async def enter(self, *args: Any, **kwargs: Any) -> SeatEntered | SeatHeld:
        with self.state.leaving_them():
            return await super().enter(*args, **kwargs)


class LeavingClosesNothing(MemoryPool):
    def _close_process(self, process: str) -> None:
        pass


class ForgetsWhoHasLeftTooSoon(MemoryPool):
    """A process is forgotten before the last call that it sent may have arrived."""

    async def sweep(self) -> None:
        since = self.state.awake - 1000
        self.state.closed_at = {process: at for process, at in self.state.closed_at.items() if at > since}
        await super().sweep()


class WallClockTime(PoolState):
    def awake_step(self, passed_ms: int) -> int:
        return max(0, passed_ms)


class WallClockLeases(MemoryPool):
    state_class = WallClockTime


class BackwardsTime(PoolState):
    def awake_step(self, passed_ms: int) -> int:
        return min(passed_ms, 1000)


class TimeRunsBackwards(MemoryPool):
    state_class = BackwardsTime


class GroupsReserveWhatTheyCanNeverHold(MemoryPool):
    def _may_mark(self, slots: int, total_slots: int) -> bool:
        return True


class EachClaimBeginsAgain(MemoryPool):
    """The latency of a request counts from its last claim."""

    def _own(self, record: RequestRecord, caller: Caller, call: str) -> None:
        record.first_claimed_ms = None
        super()._own(record, caller, call)


class AppendsAtAnyIndex(MemoryPool):
    def _is_next(self, record: RequestRecord, entry: CommitEntry) -> bool:
        return True


class AppendsBehindGaps(MemoryPool):
    def _is_next(self, record: RequestRecord, entry: CommitEntry) -> bool:
        return entry.index >= len(record.log)


class SweepLeavesDeadGroupsTheirRequests(MemoryPool):
    state_class = LeavesWithTheirOwner
    state: LeavesWithTheirOwner

    async def sweep(self) -> None:
        with self.state.leaving_them():
            await super().sweep()


class EndsAreNotFinal(MemoryPool):
    """A commit goes into a log that a cancel or deadline has ended."""

    def _commit_entry(self, entry: CommitEntry) -> CommitAnswer:
        record = self.state.records.get(entry.request_id)
        if record is not None and record.state is OwnershipState.ENDED and entry.index == len(record.log):
            record.log += entry.tokens
            record.end = End(record.end.reason, len(record.log)) if record.end else None
            return CommitAnswer.APPLIED
        return super()._commit_entry(entry)


class FirstTokensLiftNoDeadline(MemoryPool):
    def _note_first_token(self, record: RequestRecord) -> None:
        pass


class ReadersAreNotRenewed(MemoryPool):
    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        self.state.begin()


class SubmitStoresAgain(MemoryPool):
    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        if submission.parent in self.state.parents:
            self._forget(submission.parent)
        return await super().submit(submission)

    def _forget(self, parent: str) -> None:
        known: ParentRecord = self.state.parents.pop(parent)
        for request in known.submission.requests:
            record = self.state.records.pop(request.id)
            self.state.bytes_reserved -= record.bytes
            if record.state is OwnershipState.QUEUED:
                self.state.unqueue(record)
            elif record.state is OwnershipState.OWNED:
                del self.state.own[record.group][request.id]


class RetiresAtOnce(MemoryPool):
    async def set_revision(self, revision: str, generation: int) -> str:
        before = self.state.revision
        in_force = await super().set_revision(revision, generation)
        if before is not None and before != in_force:
            self.state.retired.set(before, self.state.awake)
        return in_force


class RetiresNobody(MemoryPool):
    def _end_retired(self, revision: str) -> int:
        return 0


class OlderGenerationsWin(MemoryPool):
    async def set_revision(self, revision: str, generation: int) -> str:
        self.state.generation = 0
        return await super().set_revision(revision, generation)


class OneQueue(PoolState):
    def queue(self, revision: str) -> list[tuple[int, str]]:
        return super().queue("every")


class RevisionsShareAQueue(MemoryPool):
    state_class = OneQueue


class BlamesNobody(MemoryPool):
    def _blame(self, group: str, blamed: Mapping[str, Claim]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()


class BlamesAllOfTheGroup(MemoryPool):
    """Every request of the group counts as on trial when its engine fails, whatever it has committed."""

    def _blame(self, group: str, blamed: Mapping[str, Claim]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        for request_id in blamed.keys() & self.state.own.get(group, {}).keys():
            self.state.own[group][request_id].is_on_trial = True
        return super()._blame(group, blamed)


class CommitsAcquitNobody(MemoryPool):
    def _acquit(self, record: RequestRecord) -> None:
        pass


class YoungestFirst(MemoryPool):
    def _choose(self, caller: Caller, *slots: int) -> tuple[list[RequestRecord], bool]:
        queue = self.state.queue(caller.revision)
        queue.reverse()
        try:
            return super()._choose(caller, *slots)
        finally:
            queue.reverse()


class MarksNothing(MemoryPool):
    """Younger requests overtake one that does not fit now."""

    def _may_mark(self, slots: int, total_slots: int) -> bool:
        return False


class MarksOutliveSeats(MemoryPool):
    def _is_marked_for_another(self, record: RequestRecord, group: str) -> bool:
        return record.mark is not None and record.mark[1] != group


class KeptInCommits(PoolState):
    is_committing = False

    def take_back(self, record: RequestRecord) -> None:
        if not self.is_committing:
            super().take_back(record)


class GapsCostNoClaim(MemoryPool):
    """An entry that disagrees with the log is refused, and its request stays with its owner.

    In walks it is always a gap: while claims are compared, no two values of one index come under the same claim.
    """

    state_class = KeptInCommits
    state: KeptInCommits

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        self.state.is_committing = True
        try:
            return await super().commit(entries)
        finally:
            self.state.is_committing = False


def held_by(caller: Caller, pool: MemoryPool) -> Seat:
    """The caller's seat, or one that nobody else knows."""
    seat = pool.state.seats.get(caller.group, Seat())
    return seat if seat.holder == caller.process else Seat()


class ClaimAnswersAreNotKept(MemoryPool):
    async def claim(self, caller: Caller, call: int, **slots: int) -> ClaimAnswer:
        held_by(caller, self).claim_call = None
        return await super().claim(caller, call, **slots)


class RepeatedClaimsRun(MemoryPool):
    async def claim(self, caller: Caller, call: int, **slots: int) -> ClaimAnswer:
        seat = held_by(caller, self)
        if call == seat.claim_call:
            seat.claim_call, seat.last_call = None, call - 1
        return await super().claim(caller, call, **slots)


class OlderClaimsRun(MemoryPool):
    async def claim(self, caller: Caller, call: int, **slots: int) -> ClaimAnswer:
        seat = held_by(caller, self)
        if call != seat.claim_call:
            seat.last_call = min(seat.last_call, call - 1)
        return await super().claim(caller, call, **slots)


class EnterAnswersAreNotKept(MemoryPool):
    async def enter(self, caller: Caller, call: int, **arguments: Any) -> SeatEntered | SeatHeld:
        held_by(caller, self).enter_call = None
        return await super().enter(caller, call, **arguments)


class RepeatedEntersRun(MemoryPool):
    async def enter(self, caller: Caller, call: int, **arguments: Any) -> SeatEntered | SeatHeld:
        seat = held_by(caller, self)
        if call == seat.enter_call:
            seat.enter_call, seat.last_call = None, call - 1
        return await super().enter(caller, call, **arguments)


class OlderEntersRun(MemoryPool):
    async def enter(self, caller: Caller, call: int, **arguments: Any) -> SeatEntered | SeatHeld:
        seat = held_by(caller, self)
        if call != seat.enter_call:
            seat.last_call = min(seat.last_call, call - 1)
        return await super().enter(caller, call, **arguments)


class LoweredPromisesAreForgotten(MemoryPool):
    """Admission uses the promise of the first group."""

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        return slots if revision in self.state.promises else None


class LargerRequestsThatRunAreNotCounted(MemoryPool):
    async def larger_requests(self, revision: str, slots: int) -> LargerRequests:
        queue, records = self.state.queue(revision), self.state.records
        waiting = [records[request_id].request.max_total_tokens for _, request_id in queue]
        larger = [need for need in waiting if need > slots]
        return replace(
            await super().larger_requests(revision, slots), unfinished=len(larger), largest=max(larger, default=0)
        )


class HeartbeatsNeedNoSeat(MemoryPool):
    """Any process of the group's name is answered as the holder is."""

    async def heartbeat(self, caller: Caller, **told: Any) -> Heartbeat:
        seat = self.state.seats.get(caller.group, Seat(holder=caller.process))
        return await super().heartbeat(replace(caller, process=seat.holder), **told)


class LoweredPromisesEndWhatWasAccepted(MemoryPool):
    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        for record in unfinished(self.state, revision):
            if record.request.max_total_tokens > slots:
                self.state.end_now(record, FinishReason.ERROR)
        return await super().set_promise(revision, slots, expected=expected)


class LatePromisesArePutInForce(MemoryPool):
    """A promise is put in force even if another one was set since the caller read it."""

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        seen = self.state.promises.get(revision)
        return None if seen is None else await super().set_promise(revision, slots, expected=seen)


class ForgetsThatItForgot(MemoryPool):
    """A submit that comes late stores a parent again that was forgotten."""

    def _was_forgotten(self, submission: Submission) -> bool:
        return False


class KeyedNamesAreFreeAtOnce(MemoryPool):
    """A call of an Idempotency-Key is made again as soon as its first answer was forgotten."""

    def _was_forgotten(self, submission: Submission) -> bool:
        return not submission.digest and super()._was_forgotten(submission)


class ForgetsOnlyWhatHasEnded(MemoryPool):
    """A parent that waits or runs stays."""

    async def forget(self, parent: str) -> None:
        known = self.state.parents.get(parent)
        if known is None or known.left == 0:
            await super().forget(parent)


FORGET_RULES = [ForgetsThatItForgot, KeyedNamesAreFreeAtOnce, ForgetsOnlyWhatHasEnded]
POISON_RULES = [BlamesNobody, BlamesAllOfTheGroup, CommitsAcquitNobody]
PROMISE_RULES = [
    LoweredPromisesEndWhatWasAccepted,
    LoweredPromisesAreForgotten,
    LatePromisesArePutInForce,
    LargerRequestsThatRunAreNotCounted,
]
REVISION_RULES = [RetiresAtOnce, RetiresNobody, OlderGenerationsWin, RevisionsShareAQueue]
POOL_RULES = [
    ClaimsNotCompared,
    CallIdNotCompared,
    NewestProcessWins,
    LeavingClosesNothing,
    ForgetsWhoHasLeftTooSoon,
    WallClockLeases,
    TimeRunsBackwards,
    GroupsReserveWhatTheyCanNeverHold,
    EachClaimBeginsAgain,
    AppendsAtAnyIndex,
    AppendsBehindGaps,
    SweepLeavesDeadGroupsTheirRequests,
    EndsAreNotFinal,
    FirstTokensLiftNoDeadline,
    ReadersAreNotRenewed,
    SubmitStoresAgain,
]
CALL_RULES = [
    YoungestFirst,
    MarksNothing,
    MarksOutliveSeats,
    ClaimAnswersAreNotKept,
    RepeatedClaimsRun,
    OlderClaimsRun,
    EnterAnswersAreNotKept,
    RepeatedEntersRun,
    OlderEntersRun,
    HeartbeatsNeedNoSeat,
    GapsCostNoClaim,
]
