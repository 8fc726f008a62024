"""What schedulers call in the in-memory pool: the seat, claims, commits (see memory_pool)."""

from collections.abc import Mapping, Sequence

from orca.core.domain.request import FinishReason, slots_needed
from orca.core.domain.step import Claim, Epoch
from orca.pool.contract import check_entry, verdict_error
from orca.pool.memory.state import MemoryState, Record, Seat
from orca.pool.poison import FAILURES_MAX
from orca.pool.records import (
    NOBODY,
    Caller,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    CommitEntry,
    Entered,
    Heartbeat,
    RequestState,
    Wait,
)


class MemoryScheduler(MemoryState):
    """The scheduler's half of the twin."""

    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        await self._hints.work(revision, timeout_s)

    async def enter(
        self,
        caller: Caller,
        call: int,
        *,
        reported_epoch: int,
        is_holder_dead: bool = False,
        blamed: Mapping[str, Claim] = NOBODY,
    ) -> Entered | Wait:
        self._begin()
        if caller.process in self.closed_at:
            raise verdict_error("closed", caller)
        seat = self.seats.setdefault(caller.group, Seat())
        if seat.holder == caller.process:
            if call == seat.enter_call:
                return Entered(Epoch(seat.epoch, caller.process), *seat.enter_answer)
            if call <= seat.last_call:
                raise verdict_error("stale", caller)
        elif not self._may_take_seat(caller.group, seat, is_holder_dead):
            return Wait((self.leases.get(caller.group) or self.awake) - self.awake)
        failed_and_poisoned = self._blame(caller.group, blamed)
        self._take_back_all(caller.group)
        self.seats[caller.group] = seat = Seat(
            holder=caller.process,
            epoch=max(seat.epoch, reported_epoch) + 1,
            revision=caller.revision,
            last_call=call,
            enter_call=call,
            enter_answer=failed_and_poisoned,
        )
        self.leases.set(caller.group, self.awake + self.settings.seat_lease_ms)
        return Entered(Epoch(seat.epoch, caller.process), *failed_and_poisoned)

    def _blame(self, group: str, blamed: Mapping[str, Claim]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A mark that no commit has struck out becomes a failure; the last one that is granted ends the request."""
        failed, poisoned = [], []
        for request_id, claim in blamed.items():
            record = self.own.get(group, {}).get(request_id)
            if record is None or not self._is_owner(record, claim) or not record.is_on_trial:
                continue
            record.failures, record.is_on_trial = record.failures + 1, False
            if record.failures < FAILURES_MAX:
                failed.append(request_id)
            else:
                poisoned.append(request_id)
                self._end_now(record, FinishReason.ERROR)
        return tuple(failed), tuple(poisoned)

    def _may_take_seat(self, group: str, seat: Seat, is_holder_dead: bool) -> bool:
        return not seat.holder or is_holder_dead or not self._is_living(group)

    async def heartbeat(self, caller: Caller, *, is_formed: bool = True, offered_slots: int | None = None) -> Heartbeat:
        self._begin()
        self._check_seated(caller)
        seat = self.seats[caller.group]
        seat.is_formed, seat.offered_slots = is_formed, offered_slots if is_formed else None
        self.leases.set(caller.group, self.awake + self.settings.seat_lease_ms)
        own = self.own.get(caller.group, {})
        return Heartbeat(owned={i: Claim(record.number, record.call) for i, record in own.items()})

    async def claim(
        self, caller: Caller, call: int, *, free_slots: int, total_slots: int, block_tokens: int, most: int
    ) -> ClaimAnswer:
        self._begin()
        self._check_seated(caller)
        seat = self.seats[caller.group]
        if call != seat.claim_call:
            if call <= seat.last_call:
                raise verdict_error("stale", caller)
            if not self._is_living(caller.group):
                raise verdict_error("lost", caller)
            chosen, is_blocked = self._choose(caller, seat.epoch, free_slots, total_slots, block_tokens, most)
            for record in chosen:
                self._own(record, caller, f"{caller.process}/{call}")
            seat.last_call = seat.claim_call = call
            given = tuple((record.request.id, record.number) for record in chosen)
            seat.claim_answer = given, len(self._queue(caller.revision)), is_blocked
        given, waiting, is_blocked = seat.claim_answer
        claimed = tuple(
            Claimed(
                request=self.records[request_id].request,
                claim=Claim(number, f"{caller.process}/{call}"),
                log=tuple(self.records[request_id].log),
                is_alone=self.records[request_id].is_alone,
            )
            for request_id, number in given
            if request_id in self.records
        )
        return ClaimAnswer(claimed=claimed, waiting=waiting, is_blocked=is_blocked)

    def _choose(
        self, caller: Caller, epoch: int, free_slots: int, total_slots: int, block_tokens: int, most: int
    ) -> tuple[list[Record], bool]:
        """The oldest that fit, and whether one of them that does not fit now is reserved for the caller's group."""
        chosen: list[Record] = []
        for _, request_id in self._queue(caller.revision):
            if len(chosen) >= most:
                break
            record = self.records[request_id]
            if self._is_expired(record) or not self._is_readable(record):
                continue
            slots = slots_needed(record.request.max_total_tokens, block_tokens)
            if slots <= free_slots:
                free_slots -= slots
                chosen.append(record)
            elif self._may_mark(slots, total_slots) and not self._is_marked_for_another(record, caller.group):
                record.mark = (epoch, caller.group)
                return chosen, True
        return chosen, False

    def _is_expired(self, record: Record) -> bool:
        """Its time is over: the sweep ends it, and nothing of it is computed until then."""
        deadline = self._deadlines.get(record.request.id)
        return deadline is not None and deadline <= self._wall

    def _may_mark(self, slots: int, total_slots: int) -> bool:
        return slots <= total_slots

    def _is_marked_for_another(self, record: Record, group: str) -> bool:
        if record.mark is None or record.mark[1] == group:
            return False
        epoch, marked = record.mark
        return self._is_living(marked) and self.seats[marked].epoch == epoch

    def _own(self, record: Record, caller: Caller, call: str) -> None:
        self._unqueue(record)
        record.state, record.number, record.call = RequestState.OWNED, record.number + 1, call
        record.group, record.process, record.mark = caller.group, caller.process, None
        record.is_on_trial = True
        if record.first_claimed_ms is None:
            record.first_claimed_ms = self._wall
        self.own.setdefault(caller.group, {})[record.request.id] = record

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        for entry in entries:
            check_entry(entry)
        self._begin()
        return [self._commit_entry(entry) for entry in entries]

    def _commit_entry(self, entry: CommitEntry) -> CommitAnswer:
        record = self.records.get(entry.request_id)
        if record is None or not self._is_readable(record):
            return CommitAnswer.NOT_YOURS
        is_ended = record.state is RequestState.ENDED
        if not self._is_owner(record, entry.claim):
            return CommitAnswer.ENDED if is_ended else CommitAnswer.NOT_YOURS
        if is_ended:
            is_repeated = entry.end is not None and self._is_there(record, entry)
            return CommitAnswer.ALREADY_THERE if is_repeated else CommitAnswer.ENDED
        if not self._is_next(record, entry):
            if self._is_there(record, entry):
                return CommitAnswer.ALREADY_THERE
            self._take_back(record)
            return CommitAnswer.NOT_YOURS
        record.log += entry.tokens
        if entry.index == 0 and entry.tokens:
            self._note_first_token(record)
        record.writers += [entry.claim.number] * len(entry.tokens)
        self._acquit(record)
        if entry.end is not None:
            self._end(record, entry.end)
        else:
            self._hints.tell_log(entry.request_id, record.entries)
        return CommitAnswer.APPLIED

    def _note_first_token(self, record: Record) -> None:
        """When token 0 came, and the deadline that holds from now on: that of the end."""
        record.first_token_ms = self._wall
        if record.request.deadline_wall_ms is None:
            self._deadlines.drop(record.request.id)
        else:
            self._deadlines.set(record.request.id, record.request.deadline_wall_ms)

    def _acquit(self, record: Record) -> None:
        """The first commit of a claim: the request has run, and did the group no harm."""
        if record.is_on_trial:
            record.is_on_trial, record.failures = False, 0

    def _is_owner(self, record: Record, claim: Claim) -> bool:
        is_equal = (record.number, record.call) == (claim.number, claim.call)
        return is_equal and record.state is not RequestState.QUEUED

    def _is_next(self, record: Record, entry: CommitEntry) -> bool:
        return entry.index == len(record.log)

    def _is_there(self, record: Record, entry: CommitEntry) -> bool:
        """Are the entry's tokens, and its end where it has one, what the log holds from its index on?"""
        found = tuple(record.log[entry.index : entry.index + len(entry.tokens)])
        return found == entry.tokens and (entry.end is None or record.end == entry.end)

    async def give_back(self, claims: Mapping[str, Claim]) -> None:
        self._begin()
        for request_id, claim in claims.items():
            record = self.records.get(request_id)
            if record is not None and record.state is RequestState.OWNED and self._is_owner(record, claim):
                self._take_back(record)

    async def leave(self, caller: Caller) -> None:
        self._begin()
        seat = self.seats.get(caller.group)
        if seat is not None and seat.holder == caller.process:
            self._take_back_all(caller.group)
            seat.holder = ""
            self.leases.drop(caller.group)
        self._close_process(caller.process)

    def _close_process(self, process: str) -> None:
        self.closed_at[process] = self.awake
