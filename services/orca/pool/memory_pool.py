"""The request pool in memory: the same contract on plain Python data, under a clock that is passed in.

It is what simulations run on (virtual time, thousands of runs) and what the executable model of the protocol drives.
Methods never wait, except `wait` and `wait_for_work`; each is a whole transition, as a script is in Redis, and the
order of work inside it is that of the script of the same name.
"""

from collections.abc import Mapping, Sequence

from orca.core.request import FinishReason, Request, slots_needed
from orca.core.step import Claim, Epoch
from orca.pool import codec
from orca.pool.api import (
    Caller,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    CommitEntry,
    Entered,
    Heartbeat,
    LogSlice,
    OnDisconnect,
    Parent,
    Pool,
    PoolStats,
    RequestState,
    RequestStatus,
    Submission,
    Wait,
)
from orca.pool.contract import check_entry, check_submission, refusal, reserved_bytes, stored, verdict_error
from orca.pool.memory_state import Clock, MemoryState, ParentRecord, Record, Seat

__all__ = ["Clock", "MemoryPool"]


class MemoryPool(MemoryState, Pool):
    """The pool of one deployment in this process."""

    # gateway

    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        check_submission(submission)
        self._begin()
        known = self.parents.get(submission.parent)
        if known is None:
            reserved = [
                reserved_bytes(submission, choice, codec.pack_body(request))
                for choice, request in enumerate(submission.requests)
            ]
            self._check_room(submission, sum(reserved))
            known = self._store(submission, reserved)
        return known.submission.requests

    def _check_room(self, submission: Submission, size: int) -> None:
        requests = submission.requests
        revision = requests[0].revision
        promise = self.promises.get(revision)
        queued = sum(map(len, self.queues.values()))
        if revision != self.revision:
            raise refusal("revision", self.revision or "", requests)
        if promise is not None and any(request.max_total_tokens > promise for request in requests):
            raise refusal("promise", promise, requests)
        if queued + len(requests) > self.settings.max_queued:
            raise refusal("queue", self.settings.max_queued, requests)
        if self.bytes_reserved + size > self.settings.bytes_max:
            raise refusal("bytes", self.settings.bytes_max, requests)

    def _store(self, submission: Submission, reserved: list[int]) -> ParentRecord:
        requests = []
        for request, size in zip(submission.requests, reserved, strict=True):
            self._arrival += 1
            request = stored(request, self._arrival, self._wall)
            self.records[request.id] = Record(request, size, codec.token_bytes(request.sampling))
            self._queue(request.revision).append((request.arrival, request.id))
            if request.deadline_ms is not None:
                self._deadlines.set(request.id, request.deadline_ms)
            self.bytes_reserved += size
            requests.append(request)
        kept = Submission(
            parent=submission.parent,
            requests=tuple(requests),
            reader=submission.reader,
            on_disconnect=submission.on_disconnect,
            render=submission.render,
        )
        lease_end = self.awake + self.settings.reader_lease_ms
        parent = self.parents[kept.parent] = ParentRecord(kept, len(requests), {kept.reader: lease_end})
        if kept.on_disconnect is OnDisconnect.CANCEL:
            self._watch.set(kept.parent, lease_end + self.settings.resume_grace_ms)
        self._tell(f"+{requests[0].revision}")
        return parent

    async def parent(self, parent: str) -> Parent:
        kept = self._parent(parent).submission
        return Parent(parent=parent, requests=kept.requests, on_disconnect=kept.on_disconnect, render=kept.render)

    async def read(self, request_id: str, start: int, limit: int = 1024) -> LogSlice:
        record = self._record(request_id)
        end = record.end if start <= len(record.log) <= start + limit else None
        return LogSlice(start, tuple(record.log[start : start + limit]), end)

    async def read_many(self, starts: Mapping[str, int], limit: int = 1024) -> dict[str, LogSlice]:
        return {
            request_id: await self.read(request_id, start, limit)
            for request_id, start in starts.items()
            if request_id in self.records and self.records[request_id].entries > start
        }

    async def wait(self, versions: Mapping[str, int], timeout_s: float) -> frozenset[str]:
        if not (longer := self._longer(versions)):
            await self._wait_for(list(versions), timeout_s)
            longer = self._longer(versions)
        return longer

    def _longer(self, versions: Mapping[str, int]) -> frozenset[str]:
        return frozenset(i for i, seen in versions.items() if i in self.records and self.records[i].entries > seen)

    async def status(self, request_id: str) -> RequestStatus:
        record = self._record(request_id)
        is_owned = record.state is RequestState.OWNED
        return RequestStatus(
            request=record.request,
            state=record.state,
            owner=record.process if is_owned else None,
            claim=Claim(record.number, record.call) if is_owned else None,
            tokens=len(record.log),
            end=record.end,
            first_claimed_ms=record.first_claimed_ms,
        )

    async def cancel(self, parent: str) -> None:
        self._begin()
        self._end_parent(parent, FinishReason.CANCELLED)

    async def attach(self, parent: str, reader: str) -> None:
        self._begin()
        self._parent(parent).readers[reader] = self.awake + self.settings.reader_lease_ms
        self._watch_readers(parent, 0)

    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        self._begin()
        for parent, reader in readers:
            if parent in self.parents and reader in self.parents[parent].readers:
                self.parents[parent].readers[reader] = self.awake + self.settings.reader_lease_ms
                self._watch_readers(parent, 0)

    async def detach(self, parent: str, reader: str) -> None:
        self._begin()
        kept = self.parents.get(parent)
        if kept is not None and reader in kept.readers:
            lease_end = kept.readers.pop(reader)
            self._watch_readers(parent, min(lease_end, self.awake))

    # scheduler

    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        await self._wait_for([f"+{revision}"], timeout_s)

    async def enter(
        self, caller: Caller, call: int, *, reported_epoch: int, is_holder_dead: bool = False
    ) -> Entered | Wait:
        self._begin()
        if caller.process in self.closed:
            raise verdict_error("closed", caller)
        seat = self.seats.setdefault(caller.group, Seat())
        if seat.holder == caller.process:
            if call == seat.enter_call:
                return Entered(Epoch(seat.epoch, caller.process))
            if call <= seat.last_call:
                raise verdict_error("stale", caller)
        elif not self._may_take_seat(caller.group, seat, is_holder_dead):
            return Wait((self.leases.get(caller.group) or self.awake) - self.awake)
        self._take_back_all(caller.group)
        self.seats[caller.group] = Seat(
            holder=caller.process,
            epoch=max(seat.epoch, reported_epoch) + 1,
            revision=caller.revision,
            last_call=call,
            enter_call=call,
        )
        self.leases.set(caller.group, self.awake + self.settings.seat_lease_ms)
        return Entered(Epoch(self.seats[caller.group].epoch, caller.process))

    def _may_take_seat(self, group: str, seat: Seat, is_holder_dead: bool) -> bool:
        return not seat.holder or is_holder_dead or not self._is_living(group)

    async def heartbeat(self, caller: Caller) -> Heartbeat:
        self._begin()
        self._check_seated(caller)
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
            slots = slots_needed(record.request.max_total_tokens, block_tokens)
            if slots <= free_slots:
                free_slots -= slots
                chosen.append(record)
            elif self._may_mark(slots, total_slots) and not self._is_marked_for_another(record, caller.group):
                record.mark = (epoch, caller.group)
                return chosen, True
        return chosen, False

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
        if record is None:
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
        if entry.end is not None:
            self._end(record, entry.end)
        else:
            self._tell(entry.request_id)
        return CommitAnswer.APPLIED

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
        self.closed.add(process)

    # everybody

    async def sweep(self) -> None:
        self._begin()
        self._forget_old()
        for group in self.leases.due(self.awake):
            self._take_back_all(group)
            self.leases.drop(group)
        for parent in self._watch.due(self.awake):
            unread_at = self._last_reader(parent) + self.settings.resume_grace_ms
            if unread_at > self.awake:
                self._watch.set(parent, unread_at)
            else:
                self._end_parent(parent, FinishReason.CANCELLED)
        for request_id in self._deadlines.due(self._wall):
            self._end_now(self.records[request_id], FinishReason.DEADLINE_EXCEEDED)
        for revision in self._retired.due(self.awake):
            self._end_retired(revision)
            self._retired.drop(revision)

    def _forget_old(self) -> None:
        is_pressed = self.bytes_reserved > self.settings.pressure_bytes
        kept_ms = self.settings.retention_least_ms if is_pressed else self.settings.retention_ms
        for name in self._ended.due(self.awake - kept_ms):
            if self._last_reader(name) > self.awake:
                self._ended.set(name, self.awake)
                continue
            for request in self.parents.pop(name).submission.requests:
                self.bytes_reserved -= self.records.pop(request.id).bytes
            self._ended.drop(name)

    def _end_retired(self, revision: str) -> None:
        for _, request_id in list(self._queue(revision)):
            self._end_now(self.records[request_id], FinishReason.MODEL_REPLACED)
        for group in self.leases:
            if self.seats[group].revision == revision:
                for record in list(self.own.get(group, {}).values()):
                    self._end_now(record, FinishReason.MODEL_REPLACED)

    async def set_revision(self, revision: str, generation: int) -> str:
        self._begin()
        if self.revision is not None:
            is_formed = revision == self.revision or revision in self.promises
            if generation <= self._generation or not is_formed:
                return self.revision
            if revision != self.revision:
                self._retired.set(self.revision, self.awake + self.settings.retire_ms)
        self._retired.drop(revision)
        self.revision, self._generation = revision, generation
        return revision

    async def promise_slots(self, revision: str, slots: int) -> int:
        self._begin()
        if revision not in self.promises:
            self.promises[revision] = slots
            for _, request_id in list(self._queue(revision)):
                record = self.records[request_id]
                if record.request.max_total_tokens > slots:
                    self._end_now(record, FinishReason.ERROR)
        return self.promises[revision]

    async def stats(self) -> PoolStats:
        self._begin()
        waiting = [self.records[i] for queue in self.queues.values() for _, i in queue]
        heads = [self.records[queue[0][1]].request for queue in self.queues.values() if queue]
        owned = sum(map(len, self.own.values()))
        return PoolStats(
            queued=len(waiting),
            owned=owned,
            ended=len(self.records) - len(waiting) - owned,
            queued_prompt_tokens=sum(len(record.request.prompt) for record in waiting),
            oldest_wait_ms=max((max(0, self._wall - head.submitted_ms) for head in heads), default=0),
            bytes_reserved=self.bytes_reserved,
            bytes_max=self.settings.bytes_max,
            revision=self.revision,
            promised_slots=None if self.revision is None else self.promises.get(self.revision),
            groups=tuple(group for group in self.leases if self._is_living(group)),
        )

    async def close(self) -> None:
        """Nothing is held open."""
