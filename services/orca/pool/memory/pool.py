"""The request pool in memory: the same contract on plain Python data, under a clock that is passed in.

Simulations run on it (virtual time, thousands of runs), and the executable model of the protocol drives it. Each method
is one whole transition, as a script is in Redis, and its steps have the order of the script of the same name. No method
waits, except `wait_for_work`. The records that the transitions change are in state.py.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import floor, inf
from operator import itemgetter

from orca.core.domain.errors import NeverFits, UnknownRequest
from orca.core.domain.request import End, FinishReason, Request
from orca.core.domain.step import Claim, Epoch
from orca.pool import codec
from orca.pool.api import RequestPool
from orca.pool.contract import (
    CLOSED_FOR_MS,
    FORGOTTEN_FOR_MS,
    RESULT_FOR_MS,
    SKIPPED_FOR_MS,
    WANTED_FOR_MS,
    ReadBudget,
    check_entry,
    check_result,
    check_submission,
    refusal,
    reserved_bytes,
    stored,
    verdict_error,
)
from orca.pool.hints import LogNews
from orca.pool.latency_bins import AnswerLatency, latencies_us
from orca.pool.latency_counts import LatencyCounts
from orca.pool.memory.ordered_claim import ClaimRoom, ClaimRow, OrderedClaim
from orca.pool.memory.state import ParentRecord, PoolClock, PoolState, RequestRecord, Seat
from orca.pool.memory.waiting_index import WaitingIndex, place_of
from orca.pool.order.deadline_counts import DeadlineCounts
from orca.pool.order.order_rules import INDEXED_AT_ONCE, LATE, PASSED_MAX, ClaimOrder
from orca.pool.order.order_stats import DUE_MS, OrderStats
from orca.pool.poison import FAILURES_MAX
from orca.pool.records import (
    NOBODY_BLAMED,
    Caller,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    CommitEntry,
    Heartbeat,
    LargerRequests,
    LengthCounts,
    LogSlice,
    OnDisconnect,
    OwnershipState,
    Parent,
    PoolStats,
    RequestStatus,
    SeatEntered,
    SeatHeld,
    Submission,
)
from orca.pool.schemas import SCHEMA_OF_CACHED_TOKENS, SCHEMA_OF_ORDERS, SCHEMAS, Schemas, schema_least
from orca.pool.settings import PoolSettings

WALKED_AT_ONCE = 64
"""Requests after which a claim in order of arrival counts those that it has passed over."""


class MemoryPool(RequestPool):
    """The pool of one deployment in this process.

    The class is long but one idea: the protocol over one state, with one method per transition. Each rule that a
    transition applies is a small method after it. So a test of the protocol can leave out one rule in a subclass and
    see what it is for.
    """

    state_class = PoolState
    ordered_claim_class = OrderedClaim
    indexed_at_once = INDEXED_AT_ONCE

    def __init__(self, clock: PoolClock, settings: PoolSettings | None = None, schemas: Schemas = SCHEMAS) -> None:
        self.settings = settings or PoolSettings()
        self.state = self.state_class(clock, self.settings, schemas)

    @property
    def reader_lease_s(self) -> float:
        return self.settings.reader_lease_ms / 1000

    async def close(self) -> None:
        """Do nothing: the pool holds nothing open."""

    # gateway

    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        check_submission(submission)
        self.state.begin()
        known = self.state.parents.get(submission.parent)
        if known is None:
            if self._was_forgotten(submission):
                age_ms = self.state.awake - self.state.forgotten[submission.parent]
                raise refusal("forgotten", age_ms, submission)
            reserved = [
                reserved_bytes(submission, choice, codec.pack_body(request))
                for choice, request in enumerate(submission.requests)
            ]
            self._check_bounds(submission, sum(reserved))
            return self._store(submission, reserved).submission.requests
        if known.submission.digest != submission.digest:
            raise refusal("taken", "", submission)
        await self.attach(submission.parent, submission.reader)
        return known.submission.requests

    def _was_forgotten(self, submission: Submission) -> bool:
        """Return true if this submit may come late, and if readers may not have noticed that the first log is gone."""
        return submission.parent in self.state.forgotten

    def _check_bounds(self, submission: Submission, size: int) -> None:
        """Raises: the refusal of a submission that the pool does not accept now. Args: size: bytes to reserve."""
        state, settings, requests = self.state, self.settings, submission.requests
        revision = requests[0].revision
        promise = state.promises.get(revision)
        queued = sum(map(len, state.queues.values()))
        if revision != state.revision:
            raise refusal("revision", state.revision or "", submission)
        if max(schema_least(request, submission) for request in requests) > state.schema:
            raise refusal("schema", state.schema, submission)
        need = max(_promised_need(state, request) for request in requests)
        if promise is not None and need > promise:
            raise refusal("promise", promise, submission, need)
        if queued + len(requests) > settings.max_queued:
            raise refusal("queue", settings.max_queued, submission)
        tokens = state.queued_prompt_tokens + sum(len(request.prompt) for request in requests)
        if state.queued_prompt_tokens and tokens > settings.max_queued_prompt_tokens:
            raise refusal("tokens", settings.max_queued_prompt_tokens, submission)
        if state.bytes_reserved + size > settings.bytes_max:
            if size <= settings.bytes_max:
                state.wanted_bytes, state.wanted_ms = settings.bytes_max - size, state.awake
            raise refusal("bytes", settings.bytes_max, submission)

    def _store(self, submission: Submission, reserved: list[int]) -> ParentRecord:
        state, requests = self.state, []
        for request, size in zip(submission.requests, reserved, strict=True):
            state.arrival += 1
            request = stored(request, state.arrival, state.wall)
            token_bytes = codec.token_bytes(request.sampling)
            state.records[request.id] = RequestRecord(request, size, token_bytes, state.schema)
            state.queue(request.revision).append((request.arrival, request.id))
            if request.first_deadline_wall_ms is not None:
                state.deadlines.set(request.id, request.first_deadline_wall_ms)
            state.waiting.add(request, request.first_deadline_wall_ms, 0)
            state.bytes_reserved += size
            state.queued_prompt_tokens += len(request.prompt)
            requests.append(request)
        kept = replace(submission, requests=tuple(requests))
        lease_end = state.awake + self.settings.reader_lease_ms
        parent = state.parents[kept.parent] = ParentRecord(kept, len(requests), {kept.reader: lease_end})
        if kept.on_disconnect is OnDisconnect.CANCEL:
            state.watch.set(kept.parent, lease_end + self.settings.resume_grace_ms)
        state.hints.publish_work(requests[0].revision)
        return parent

    async def parent(self, parent: str) -> Parent:
        kept = self._parent(parent).submission
        return Parent(
            parent=parent,
            requests=kept.requests,
            on_disconnect=kept.on_disconnect,
            render=kept.render,
            owner=kept.owner,
        )

    async def conversation(self, parent: str) -> str | None:
        return self._parent(parent).submission.conversation

    async def read(self, request_id: str, start: int, limit: int = 1024) -> LogSlice:
        return _slice(self._record(request_id), start, limit, ReadBudget())

    async def read_many(
        self,
        starts: Mapping[str, int],
        limit: int = 1024,
        *,
        for_all: bool = False,  # noqa: ARG002 - no call waits here
    ) -> dict[str, LogSlice | None]:
        budget = ReadBudget()
        found: dict[str, LogSlice | None] = {}
        for request_id, start in starts.items():
            record = self.state.records.get(request_id)
            if record is None:
                found[request_id] = None
            elif record.entries > start:
                found[request_id] = _slice(record, start, limit, budget)
        return found

    def log_news(self, cursors: Mapping[str, int]) -> AbstractContextManager[LogNews]:
        return self.state.hints.log_news(cursors)

    async def status(self, request_id: str) -> RequestStatus:
        record = self._record(request_id)
        is_owned = record.state is OwnershipState.OWNED
        return RequestStatus(
            request=record.request,
            state=record.state,
            owner=record.process if is_owned else None,
            claim=Claim(record.number, record.call) if is_owned else None,
            tokens=len(record.log),
            end=record.end,
            first_claimed_ms=record.first_claimed_ms,
            starts_by_ms=record.starts_by_ms,
            older_waiting=self._older_waiting(record),
            first_token_ms=record.first_token_ms,
            ended_ms=record.ended_ms,
        )

    def _older_waiting(self, record: RequestRecord) -> int | None:
        if record.state is not OwnershipState.QUEUED:
            return None
        request = record.request
        return bisect_left(self.state.queue(request.revision), (request.arrival, request.id))

    async def cancel(self, parent: str) -> None:
        self.state.begin()
        self.state.end_parent(parent, FinishReason.CANCELLED)

    async def forget(self, parent: str) -> None:
        state = self.state
        state.begin()
        if parent not in state.parents:
            return
        if not self._is_parent_readable(parent):
            raise UnknownRequest(parent)
        state.end_parent(parent, FinishReason.CANCELLED)
        self._remove(parent)
        state.forgotten[parent] = state.awake

    async def attach(self, parent: str, reader: str) -> None:
        self.state.begin()
        self._parent(parent).readers[reader] = self.state.awake + self.settings.reader_lease_ms
        self.state.watch_readers(parent, 0)

    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        self.state.begin()
        for parent, reader in readers:
            kept = self.state.parents.get(parent)
            if kept is not None and reader in kept.readers:
                kept.readers[reader] = self.state.awake + self.settings.reader_lease_ms

    async def detach(self, parent: str, reader: str) -> None:
        self.state.begin()
        kept = self.state.parents.get(parent)
        if kept is not None and reader in kept.readers:
            lease_end = kept.readers.pop(reader)
            self.state.watch_readers(parent, min(lease_end, self.state.awake))

    def _record(self, request_id: str) -> RequestRecord:
        if request_id not in self.state.records:
            raise UnknownRequest(request_id)
        return self.state.records[request_id]

    def _parent(self, parent: str) -> ParentRecord:
        if parent not in self.state.parents:
            raise UnknownRequest(parent)
        return self.state.parents[parent]

    # scheduler: the seat

    async def enter(
        self,
        caller: Caller,
        call: int,
        *,
        reported_epoch: int,
        is_holder_dead: bool = False,
        blamed: Mapping[str, Claim] = NOBODY_BLAMED,
    ) -> SeatEntered | SeatHeld:
        state = self.state
        state.begin()
        if caller.process in state.closed_at:
            raise verdict_error("closed", caller)
        seat = state.seats.setdefault(caller.group, Seat())
        if seat.holder == caller.process:
            if call == seat.enter_call:
                return SeatEntered(Epoch(seat.epoch, caller.process), *seat.enter_answer)
            if call <= seat.last_call:
                raise verdict_error("stale", caller)
        elif not self._may_take_seat(caller.group, seat, is_holder_dead):
            return SeatHeld((state.leases.get(caller.group) or state.awake) - state.awake)
        failed_and_poisoned = self._blame(caller.group, blamed)
        state.take_back_all(caller.group)
        state.seats[caller.group] = seat = Seat(
            holder=caller.process,
            epoch=max(seat.epoch, reported_epoch) + 1,
            revision=caller.revision,
            last_call=call,
            enter_call=call,
            enter_answer=failed_and_poisoned,
        )
        state.leases.set(caller.group, state.awake + self.settings.seat_lease_ms)
        return SeatEntered(Epoch(seat.epoch, caller.process), *failed_and_poisoned)

    def _may_take_seat(self, group: str, seat: Seat, is_holder_dead: bool) -> bool:
        return not seat.holder or is_holder_dead or not self.state.is_seat_living(group)

    def _blame(self, group: str, blamed: Mapping[str, Claim]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Count a failure for each blamed request that is still on trial, and end those that have reached the bound.

        Returns: the requests that failed and go on, and those that ended.
        """
        failed, poisoned = [], []
        for request_id, claim in blamed.items():
            record = self.state.own.get(group, {}).get(request_id)
            if record is None or not self._may_change(record, claim) or not record.is_on_trial:
                continue
            record.failures, record.is_on_trial = record.failures + 1, False
            if record.failures < FAILURES_MAX:
                failed.append(request_id)
            else:
                poisoned.append(request_id)
                self.state.end_now(record, FinishReason.ERROR)
        return tuple(failed), tuple(poisoned)

    async def heartbeat(self, caller: Caller, *, is_formed: bool = True, offered_slots: int | None = None) -> Heartbeat:
        self.state.begin()
        seat = self._seat(caller)
        seat.is_formed, seat.offered_slots = is_formed, offered_slots if is_formed else None
        self.state.leases.set(caller.group, self.state.awake + self.settings.seat_lease_ms)
        own = self.state.own.get(caller.group, {})
        return Heartbeat(owned={i: Claim(record.number, record.call) for i, record in own.items()})

    async def leave(self, caller: Caller) -> None:
        self.state.begin()
        seat = self.state.seats.get(caller.group)
        if seat is not None and seat.holder == caller.process:
            self.state.take_back_all(caller.group)
            seat.holder = ""
            self.state.leases.drop(caller.group)
        self._close_process(caller.process)

    def _close_process(self, process: str) -> None:
        self.state.closed_at[process] = self.state.awake

    def _seat(self, caller: Caller) -> Seat:
        """Return the seat that the caller holds. Raises: ProcessClosed, SeatLost."""
        if caller.process in self.state.closed_at:
            raise verdict_error("closed", caller)
        seat = self.state.seats.get(caller.group)
        if seat is None or seat.holder != caller.process:
            raise verdict_error("lost", caller)
        return seat

    # scheduler: owned requests

    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        await self.state.hints.wait_for_work(revision, timeout_s)

    async def claim(
        self,
        caller: Caller,
        call: int,
        *,
        free_slots: int,
        total_slots: int,
        block_tokens: int,
        most: int,
        order: ClaimOrder | None = None,
    ) -> ClaimAnswer:
        state = self.state
        state.begin()
        order = order if state.schema >= SCHEMA_OF_ORDERS else None
        seat = self._seat(caller)
        if call != seat.claim_call:
            if call <= seat.last_call:
                raise verdict_error("stale", caller)
            if not state.is_seat_living(caller.group):
                raise verdict_error("lost", caller)
            if order is None:
                chosen, is_blocked = self._choose(caller, seat.epoch, free_slots, total_slots, block_tokens, most)
            else:
                prompts = order.free_prompt_tokens, order.total_prompt_tokens
                room = ClaimRoom(most, free_slots, total_slots, *prompts, block_tokens)
                chosen, is_blocked = self._choose_by_order(caller, seat.epoch, order, room)
            for record in chosen:
                self._own(record, caller, f"{caller.process}/{call}")
            seat.last_call = seat.claim_call = call
            given = tuple((record.request.id, record.number) for record in chosen)
            seat.claim_answer = given, len(state.queue(caller.revision)), is_blocked, order is not None
            seat.order = order
        given, waiting, is_blocked, is_by_order = seat.claim_answer
        claimed = tuple(
            Claimed(
                request=state.records[request_id].request,
                claim=Claim(number, f"{caller.process}/{call}"),
                log=tuple(state.records[request_id].log),
                is_alone=state.records[request_id].is_alone,
                slack_ms=_slack_ms(state.records[request_id], number),
            )
            for request_id, number in given
            if request_id in state.records
        )
        return ClaimAnswer(claimed=claimed, waiting=waiting, is_blocked=is_blocked, is_by_order=is_by_order)

    def _choose(
        self, caller: Caller, epoch: int, free_slots: int, total_slots: int, block_tokens: int, most: int
    ) -> tuple[list[RequestRecord], bool]:
        """Return the oldest that fit, and true if one that does not fit now is reserved for the caller's group."""
        chosen: list[RequestRecord] = []
        for place, (_, request_id) in enumerate(self.state.queue(caller.revision)):
            has_passed_over = place % WALKED_AT_ONCE == 0 and place - len(chosen) > PASSED_MAX
            if len(chosen) >= most or has_passed_over:
                break
            record = self.state.records[request_id]
            if not self._is_claimable(record):
                continue
            slots = record.request.slots(block_tokens)
            if slots <= free_slots:
                free_slots -= slots
                chosen.append(record)
            elif self._may_mark(slots, total_slots) and self._may_reserve(record, epoch, caller.group):
                return chosen, True
        return chosen, False

    def _choose_by_order(
        self, caller: Caller, epoch: int, order: ClaimOrder, room: ClaimRoom
    ) -> tuple[list[RequestRecord], bool]:
        """End what is too late, and return what another order than arrival puts first; then as `_choose`."""
        records = self.state.records

        def find(request_id: str) -> Request | None:
            record = records[request_id]
            return record.request if self._is_claimable(record) else None

        claim = self.ordered_claim_class(
            order=order,
            index=self._kept_index(caller.revision, room.requests),
            now_ms=self.state.wall,
            row=ClaimRow(room=room, find=find, logged=lambda request_id: len(records[request_id].log)),
            may_reserve=lambda request_id: self._may_reserve(records[request_id], epoch, caller.group),
        )
        for request_id in claim.too_late():
            record = records[request_id]
            self.state.end(record, End(FinishReason.DEADLINE_EXCEEDED, len(record.log), detail=LATE))
        claim.waiting = len(self.state.queue(caller.revision))
        chosen, is_blocked = claim.choose()
        for item in chosen:
            self._note_window(records[item.id], item.starts_by)
        return [records[item.id] for item in chosen], is_blocked

    def _note_window(self, record: RequestRecord, starts_by: float) -> None:
        """Record the end of the start window, as the first claim sees it."""
        if record.first_claimed_ms is None:
            record.starts_by_ms = floor(starts_by)

    def _kept_index(self, revision: str, most: int) -> WaitingIndex:
        """Return the index of a revision. If it is not whole, build its next part, from the oldest request on.

        Args: most: requests that the claim may take; the index gets at least as many.
        """
        state, queue = self.state, self.state.queue(revision)
        index, size = state.waiting.of(revision), max(self.indexed_at_once, most)
        if index.is_whole:
            return index
        begin = bisect_right(queue, index.built_to, key=itemgetter(0))
        part = queue[begin : begin + size]
        for _, request_id in part:
            record = state.records[request_id]
            if state.is_readable(record):
                index.add(*place_of(record.request, state.deadlines.get(request_id), len(record.log)))
        index.built_to = part[-1][0] if len(part) == size else inf
        return index

    def _may_reserve(self, record: RequestRecord, epoch: int, group: str) -> bool:
        """Reserve a request that does not fit for a group, unless it is reserved for another one."""
        if self._is_marked_for_another(record, group):
            return False
        record.mark = (epoch, group)
        return True

    def _is_claimable(self, record: RequestRecord) -> bool:
        """Return true if this release can read a waiting request, and its deadline has not passed."""
        return self.state.is_readable(record) and not self._is_expired(record)

    def _is_expired(self, record: RequestRecord) -> bool:
        """Return true after its deadline: the sweep will end it, and nothing of it is computed until then."""
        deadline = self.state.deadlines.get(record.request.id)
        return deadline is not None and deadline <= self.state.wall

    def _may_mark(self, slots: int, total_slots: int) -> bool:
        return slots <= total_slots

    def _is_marked_for_another(self, record: RequestRecord, group: str) -> bool:
        if record.mark is None or record.mark[1] == group:
            return False
        epoch, marked = record.mark
        return self.state.is_seat_living(marked) and self.state.seats[marked].epoch == epoch

    def _own(self, record: RequestRecord, caller: Caller, call: str) -> None:
        self.state.unqueue(record)
        record.state, record.number, record.call = OwnershipState.OWNED, record.number + 1, call
        record.group, record.process, record.mark = caller.group, caller.process, None
        record.is_on_trial = True
        if record.first_claimed_ms is None:
            record.first_claimed_ms = self.state.wall
        self.state.own.setdefault(caller.group, {})[record.request.id] = record

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        for entry in entries:
            check_entry(entry)
        self.state.begin()
        return [self._commit_entry(entry) for entry in entries]

    def _commit_entry(self, entry: CommitEntry) -> CommitAnswer:
        record = self.state.records.get(entry.request_id)
        if record is None or not self.state.is_readable(record):
            return CommitAnswer.NOT_YOURS
        if record.schema < SCHEMA_OF_CACHED_TOKENS:
            entry = entry.without_cached_tokens()
        is_ended = record.state is OwnershipState.ENDED
        if not self._is_owner(record, entry.claim):
            return CommitAnswer.ENDED if is_ended else CommitAnswer.NOT_YOURS
        if is_ended:
            is_repeated = entry.end is not None and self._is_there(record, entry)
            return CommitAnswer.ALREADY_THERE if is_repeated else CommitAnswer.ENDED
        if not self._is_next(record, entry):
            if self._is_there(record, entry):
                return CommitAnswer.ALREADY_THERE
            self.state.take_back(record)
            return CommitAnswer.NOT_YOURS
        record.log += entry.tokens
        if entry.index == 0 and entry.tokens:
            self._note_first_step(record, entry.waited_ms)
            self._note_first_token(record)
        record.writers += [entry.claim.number] * len(entry.tokens)
        self._acquit(record)
        if entry.end is not None:
            self.state.end(record, entry.end)
            self._count_answer(record, entry.end)
        else:
            self.state.hints.publish_log(entry.request_id, record.entries)
        return CommitAnswer.APPLIED

    def _is_owner(self, record: RequestRecord, claim: Claim) -> bool:
        is_equal = (record.number, record.call) == (claim.number, claim.call)
        return is_equal and record.state is not OwnershipState.QUEUED

    def _may_change(self, record: RequestRecord, claim: Claim) -> bool:
        """Return true if this release can read the record, and the claim owns it."""
        return self.state.is_readable(record) and self._is_owner(record, claim)

    def _is_next(self, record: RequestRecord, entry: CommitEntry) -> bool:
        return entry.index == len(record.log)

    def _is_there(self, record: RequestRecord, entry: CommitEntry) -> bool:
        """Return true if the log already holds the entry's tokens from its index on, and its end if it has one."""
        found = tuple(record.log[entry.index : entry.index + len(entry.tokens)])
        return found == entry.tokens and (entry.end is None or record.end == entry.end)

    def _note_first_step(self, record: RequestRecord, waited_ms: int | None) -> None:
        """Record the time of the first step if this is the first claim: an earlier one may have had one, too."""
        if waited_ms is not None and record.number == 1 and record.first_claimed_ms is not None:
            record.first_step_ms = record.first_claimed_ms + waited_ms

    def _note_first_token(self, record: RequestRecord) -> None:
        """Record the time of token 0. From now on the deadline of the end is in force."""
        record.first_token_ms = self.state.wall
        if record.request.deadline_wall_ms is None:
            self.state.deadlines.drop(record.request.id)
        else:
            self.state.deadlines.set(record.request.id, record.request.deadline_wall_ms)

    def _count_answer(self, record: RequestRecord, end: End) -> None:
        """Count the lengths and the latencies of an answer that has just ended, if it ended by itself."""
        state, revision = self.state, record.request.revision
        state.lengths.count(revision, len(record.request.prompt), end, state.awake)
        state.latencies.count(revision, self._latencies_us(record), end, state.awake)

    def _latencies_us(self, record: RequestRecord) -> dict[AnswerLatency, float]:
        return latencies_us(
            submitted_ms=record.request.submitted_ms,
            first_step_ms=record.first_claimed_ms if record.first_step_ms is None else record.first_step_ms,
            first_token_ms=record.first_token_ms,
            ended_ms=self.state.wall,
            tokens=len(record.log),
        )

    def _acquit(self, record: RequestRecord) -> None:
        """End the trial at the first commit of a claim: the request ran, and did the group no harm."""
        if record.is_on_trial:
            record.is_on_trial, record.failures = False, 0

    async def give_back(self, claims: Mapping[str, Claim]) -> None:
        self.state.begin()
        for request_id, claim in claims.items():
            record = self.state.records.get(request_id)
            if record is not None and record.state is OwnershipState.OWNED and self._may_change(record, claim):
                self.state.take_back(record)

    # everybody: the sweep

    async def sweep(self) -> None:
        state = self.state
        state.begin()
        self._forget_old()
        for group in state.leases.due(state.awake):
            state.take_back_all(group)
            state.leases.drop(group)
        for parent in state.watch.due(state.awake):
            self._end_if_unread(parent)
        since = state.awake - CLOSED_FOR_MS
        state.closed_at = {process: at for process, at in state.closed_at.items() if at > since}
        since = state.awake - FORGOTTEN_FOR_MS
        state.forgotten = {parent: at for parent, at in state.forgotten.items() if at > since}
        for counted in (state.lengths, state.latencies, state.outcomes):
            counted.periods.drop_old(state.awake)
        for request_id in state.deadlines.due(state.wall):
            if state.is_readable(state.records[request_id]):
                state.end_now(state.records[request_id], FinishReason.DEADLINE_EXCEEDED)
            else:
                state.deadlines.set(request_id, state.wall + SKIPPED_FOR_MS)
        for revision in state.retired.due(state.awake):
            state.retired.drop(revision)
            if self._end_retired(revision):
                state.retired.set(revision, state.awake + SKIPPED_FOR_MS)

    def _forget_old(self) -> None:
        """Forget parents after their retention; under pressure earlier, as many as relieve it."""
        state = self.state
        for name in state.ended.due(state.awake - self.settings.retention_ms):
            self._forget(name)
        pressure = self.settings.pressure_bytes
        if state.awake - state.wanted_ms <= WANTED_FOR_MS:
            pressure = min(pressure, state.wanted_bytes)
        for name in state.ended.due(state.awake - self.settings.retention_least_ms):
            if state.bytes_reserved <= pressure:
                break
            self._forget(name)

    def _forget(self, parent: str) -> None:
        """Forget a parent, its requests and their logs; if it is still read, keep it as if it had ended now."""
        state = self.state
        if state.last_reader(parent) > state.awake or not self._is_parent_readable(parent):
            state.ended.set(parent, state.awake)
            return
        self._remove(parent)

    def _remove(self, parent: str) -> None:
        """FORGET: remove a parent whose requests have all ended, with its records, and release its bytes."""
        for request in self.state.parents.pop(parent).submission.requests:
            self.state.bytes_reserved -= self.state.records.pop(request.id).bytes
        self.state.ended.drop(parent)

    def _end_if_unread(self, parent: str) -> None:
        """Cancel a parent that no reader has read for the grace, otherwise check it again later."""
        state = self.state
        unread_at = state.last_reader(parent) + self.settings.resume_grace_ms
        if unread_at > state.awake:
            state.watch.set(parent, unread_at)
        elif not self._is_parent_readable(parent):
            state.watch.set(parent, state.awake + SKIPPED_FOR_MS)
        else:
            state.end_parent(parent, FinishReason.CANCELLED)

    def _is_parent_readable(self, parent: str) -> bool:
        first = self.state.parents[parent].submission.requests[0]
        return self.state.is_readable(self.state.records[first.id])

    def _end_retired(self, revision: str) -> int:
        """End the revision's requests. Returns: the number of records skipped, which this release cannot read."""
        state = self.state
        waiting = [state.records[request_id] for _, request_id in state.queue(revision)]
        groups = [group for group in state.leases if state.seats[group].revision == revision]
        running = [record for group in groups for record in state.own.get(group, {}).values()]
        for record in filter(state.is_readable, waiting + running):
            state.end_now(record, FinishReason.MODEL_REPLACED)
        return sum(not state.is_readable(record) for record in waiting + running)

    # everybody: schema, revision, promise, counts

    async def report(self, part: str) -> int:
        state = self.state
        state.begin()
        state.parts = {name: lease for name, lease in state.parts.items() if lease[0] > state.awake}
        state.parts[part] = state.awake + self.settings.seat_lease_ms, state.schemas
        return state.schema

    async def set_schema(self, number: int) -> int:
        state = self.state
        state.begin()
        living = [schemas for lease_end, schemas in state.parts.values() if lease_end > state.awake]
        if all(number in schemas for schemas in (state.schemas, *living)):
            state.schema = number
            if number < SCHEMA_OF_ORDERS:
                state.waiting.drop()  # releases before it do not keep them
        return state.schema

    async def set_revision(self, revision: str, generation: int) -> str:
        state = self.state
        state.begin()
        if state.revision is not None:
            is_formed = revision == state.revision or revision in state.promises
            if generation <= state.generation or not is_formed:
                return state.revision
            if revision != state.revision:
                state.retired.set(state.revision, state.awake + self.settings.retire_ms)
        state.retired.drop(revision)
        state.revision, state.generation = revision, generation
        return revision

    async def promise_slots(self, revision: str, slots: int) -> int:
        state = self.state
        state.begin()
        if revision not in state.promises:
            state.promises[revision] = slots
            for _, request_id in list(state.queue(revision)):
                record = state.records[request_id]
                need = _promised_need(state, record.request)
                if need > slots and state.is_readable(record):
                    detail = NeverFits.WORDS % (need, slots)
                    state.end(record, End(FinishReason.REFUSED, len(record.log), detail=detail))
        elif state.revision not in (None, revision) and not unfinished(state, revision):
            state.promises[revision] = min(slots, state.promises[revision])
        return state.promises[revision]

    async def state_block_tokens(self, caller: Caller, block_tokens: int) -> int:
        state, revision = self.state, caller.revision
        state.begin()
        if revision not in state.block_tokens or not self._is_relied_on(caller):
            state.block_tokens[revision] = block_tokens
        return state.block_tokens[revision]

    def _is_relied_on(self, caller: Caller) -> bool:
        """Return true if another group of the caller's revision lives, or a request of it is left."""
        living = (group for group in self.state.leases if self.state.is_seat_living(group) and group != caller.group)
        is_another = any(self.state.seats[group].revision == caller.revision for group in living)
        return is_another or bool(unfinished(self.state, caller.revision))

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        self.state.begin()
        if self.state.promises.get(revision) == expected:
            self.state.promises[revision] = slots
        return self.state.promises.get(revision)

    async def larger_requests(self, revision: str, slots: int) -> LargerRequests:
        self.state.begin()
        needs = [_promised_need(self.state, record.request) for record in unfinished(self.state, revision)]
        larger = [need for need in needs if need > slots]
        return LargerRequests(
            promised_slots=self.state.promises.get(revision),
            unfinished=len(larger),
            smallest=min(larger, default=0),
            largest=max(larger, default=0),
        )

    async def lengths(self, revision: str) -> LengthCounts:
        return self.state.lengths.of(revision, self.state.awake)

    async def latencies(self, revision: str) -> LatencyCounts:
        return self.state.latencies.of(revision, self.state.awake)

    async def deadline_counts(self, revision: str) -> DeadlineCounts:
        return self.state.outcomes.of(revision, self.state.awake)

    async def keep_result(self, key: str, result: bytes) -> None:
        check_result(key, result)
        self.state.begin()
        self.state.results[key] = self.state.wall + RESULT_FOR_MS, result

    async def result(self, key: str) -> bytes | None:
        self.state.begin()
        ends_ms, result = self.state.results.get(key, (0, b""))
        return result if ends_ms > self.state.wall else None

    async def stats(self) -> PoolStats:
        state = self.state
        state.begin()
        waiting = [state.records[request_id] for queue in state.queues.values() for _, request_id in queue]
        heads = [state.records[queue[0][1]].request for queue in state.queues.values() if queue]
        replaced = [record for record in state.records.values() if record.request.revision != state.revision]
        owned = sum(map(len, state.own.values()))
        groups = [group for group in state.leases if state.is_seat_living(group)]
        formed = [group for group in groups if state.seats[group].is_formed]
        in_force = [group for group in groups if state.seats[group].revision == state.revision]
        return PoolStats(
            queued=len(waiting),
            owned=owned,
            ended=len(state.records) - len(waiting) - owned,
            queued_prompt_tokens=state.queued_prompt_tokens,
            queued_max=self.settings.max_queued,
            queued_prompt_tokens_max=self.settings.max_queued_prompt_tokens,
            ended_ever=state.ended_ever,
            unserved_ever=state.unserved_ever,
            wall_ms=state.wall,
            oldest_wait_ms=max((max(0, state.wall - head.submitted_ms) for head in heads), default=0),
            bytes_reserved=state.bytes_reserved,
            bytes_max=self.settings.bytes_max,
            revision=state.revision,
            generation=None if state.revision is None else state.generation,
            replaced_revisions=tuple(sorted({record.request.revision for record in replaced})),
            replaced_unfinished=sum(record.state is not OwnershipState.ENDED for record in replaced),
            promised_slots=None if state.revision is None else state.promises.get(state.revision),
            block_tokens=None if state.revision is None else state.block_tokens.get(state.revision),
            offered_slots=_offered_slots(state, formed),
            groups=tuple(groups),
            groups_formed=tuple(formed),
            groups_in_force=tuple(in_force),
            schema=state.schema,
            newer_records=sum(record.schema > state.schema for record in state.records.values()),
            by_order=_order_stats(state, in_force),
        )


def _slack_ms(record: RequestRecord, number: int) -> int | None:
    """Return the time from a claim to the end of the start window; None unless it is the first one, and by an order."""
    if number != 1 or record.starts_by_ms is None or record.first_claimed_ms is None:
        return None
    return record.starts_by_ms - record.first_claimed_ms


def _promised_need(state: PoolState, request: Request) -> int:
    """Return what a promise is compared with: the tokens of the only block table, or the slots of both."""
    if len(request.table_tokens) == 1:
        return request.max_total_tokens
    return request.slots(state.block_tokens.get(request.revision, 1))


def unfinished(state: PoolState, revision: str) -> list[RequestRecord]:
    """Return the requests of a revision that have not ended."""
    records = (record for record in state.records.values() if record.request.revision == revision)
    return [record for record in records if record.state is not OwnershipState.ENDED]


def _order_stats(state: PoolState, in_force: Sequence[str]) -> OrderStats | None:
    """Return the counts by order. Args: in_force: the groups of the current revision with a living seat."""
    orders = [state.seats[group].order for group in in_force]
    by_order = [order for order in orders if order is not None]
    index = state.waiting.indexes.get(state.revision or "")
    if index is None or not by_order:
        return None
    are_known = all(order is not None and order.estimates.least_step_ms for order in orders)
    return OrderStats(
        classes=index.counts if index.is_whole else None,
        due=tuple(state.deadlines.count_between(state.wall, state.wall + ms) for ms in DUE_MS),
        least_step_ms=index.least_step_ms if are_known else 0.0,
        order=by_order[0],
    )


def _offered_slots(state: PoolState, formed: Sequence[str]) -> int | None:
    """Return the fewest slots that a formed group offers; None if none is formed or one does not report its offer."""
    seats = (state.seats[group] for group in formed)
    offers = [seat.offered_slots for seat in seats if seat.revision == state.revision]
    reported = [slots for slots in offers if slots is not None]
    return min(reported) if reported and len(reported) == len(offers) else None


def _slice(record: RequestRecord, start: int, limit: int, budget: ReadBudget) -> LogSlice:
    """Return the part of a log that the budget allows."""
    if budget.is_spent:
        return LogSlice(start, (), None, is_cut=record.entries > start)
    tokens = budget.take(record.log[start : start + limit])
    is_cut = start + len(tokens) < len(record.log)
    end = record.end if not is_cut and start <= len(record.log) else None
    return LogSlice(start, tokens, end, is_cut=is_cut)
