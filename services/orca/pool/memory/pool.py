"""The request pool in memory: the same contract on plain Python data, under a clock that is passed in.

It is what simulations run on (virtual time, thousands of runs) and what the executable model of the protocol drives.
Methods never wait, except `wait_for_work`; each is a whole transition, as a script is in Redis, and the
order of work inside it is that of the script of the same name.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from orca.core.domain.request import FinishReason, Request
from orca.core.domain.step import Claim
from orca.pool import codec
from orca.pool.api import Pool
from orca.pool.contract import (
    CLOSED_FOR_MS,
    PASSED_FOR_MS,
    WANTED_FOR_MS,
    ReadRoom,
    check_submission,
    refusal,
    reserved_bytes,
    stored,
)
from orca.pool.hints import LogNews
from orca.pool.memory.scheduler import MemoryScheduler
from orca.pool.memory.state import Clock, ParentRecord, Record
from orca.pool.records import (
    LargerRequests,
    LogSlice,
    OnDisconnect,
    Parent,
    PoolStats,
    RequestState,
    RequestStatus,
    Submission,
)

__all__ = ["Clock", "MemoryPool"]


class MemoryPool(MemoryScheduler, Pool):
    """The pool of one deployment in this process."""

    @property
    def reader_lease_s(self) -> float:
        return self.settings.reader_lease_ms / 1000

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
            return self._store(submission, reserved).submission.requests
        if known.submission.digest != submission.digest:
            raise refusal("taken", "", submission.requests)
        await self.attach(submission.parent, submission.reader)
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
        tokens = self.queued_prompt_tokens + sum(len(request.prompt) for request in requests)
        if self.queued_prompt_tokens and tokens > self.settings.max_queued_prompt_tokens:
            raise refusal("tokens", self.settings.max_queued_prompt_tokens, requests)
        if self.bytes_reserved + size > self.settings.bytes_max:
            if size <= self.settings.bytes_max:
                self.wanted = self.settings.bytes_max - size, self.awake
            raise refusal("bytes", self.settings.bytes_max, requests)

    def _store(self, submission: Submission, reserved: list[int]) -> ParentRecord:
        requests = []
        for request, size in zip(submission.requests, reserved, strict=True):
            self._arrival += 1
            request = stored(request, self._arrival, self._wall)
            self.records[request.id] = Record(request, size, codec.token_bytes(request.sampling), self.schema)
            self._queue(request.revision).append((request.arrival, request.id))
            if request.first_deadline_wall_ms is not None:
                self._deadlines.set(request.id, request.first_deadline_wall_ms)
            self.bytes_reserved += size
            self.queued_prompt_tokens += len(request.prompt)
            requests.append(request)
        kept = replace(submission, requests=tuple(requests))
        lease_end = self.awake + self.settings.reader_lease_ms
        parent = self.parents[kept.parent] = ParentRecord(kept, len(requests), {kept.reader: lease_end})
        if kept.on_disconnect is OnDisconnect.CANCEL:
            self._watch.set(kept.parent, lease_end + self.settings.resume_grace_ms)
        self._hints.tell_work(requests[0].revision)
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

    async def read(self, request_id: str, start: int, limit: int = 1024) -> LogSlice:
        return _slice(self._record(request_id), start, limit, ReadRoom())

    async def read_many(
        self,
        starts: Mapping[str, int],
        limit: int = 1024,
        *,
        for_all: bool = False,  # noqa: ARG002 - nothing waits here
    ) -> dict[str, LogSlice | None]:
        room = ReadRoom()
        found: dict[str, LogSlice | None] = {}
        for request_id, start in starts.items():
            record = self.records.get(request_id)
            if record is None:
                found[request_id] = None
            elif record.entries > start:
                found[request_id] = _slice(record, start, limit, room)
        return found

    def log_news(self, cursors: Mapping[str, int]) -> AbstractContextManager[LogNews]:
        return self._hints.log_news(cursors)

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
            first_token_ms=record.first_token_ms,
            ended_ms=record.ended_ms,
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

    async def detach(self, parent: str, reader: str) -> None:
        self._begin()
        kept = self.parents.get(parent)
        if kept is not None and reader in kept.readers:
            lease_end = kept.readers.pop(reader)
            self._watch_readers(parent, min(lease_end, self.awake))

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
            elif not self._is_parent_readable(parent):
                self._watch.set(parent, self.awake + PASSED_FOR_MS)
            else:
                self._end_parent(parent, FinishReason.CANCELLED)
        since = self.awake - CLOSED_FOR_MS
        self.closed_at = {process: at for process, at in self.closed_at.items() if at > since}
        for request_id in self._deadlines.due(self._wall):
            if self._is_readable(self.records[request_id]):
                self._end_now(self.records[request_id], FinishReason.DEADLINE_EXCEEDED)
            else:
                self._deadlines.set(request_id, self._wall + PASSED_FOR_MS)
        for revision in self._retired.due(self.awake):
            self._retired.drop(revision)
            if self._end_retired(revision):
                self._retired.set(revision, self.awake + PASSED_FOR_MS)

    def _forget_old(self) -> None:
        for name in self._ended.due(self.awake - self.settings.retention_ms):
            self._forget(name)
        room_beside, wanted_ms = self.wanted
        is_wanted = self.awake - wanted_ms <= WANTED_FOR_MS
        pressure = min(self.settings.pressure_bytes, room_beside) if is_wanted else self.settings.pressure_bytes
        for name in self._ended.due(self.awake - self.settings.retention_least_ms):
            if self.bytes_reserved <= pressure:
                break
            self._forget(name)

    def _forget(self, parent: str) -> None:
        if self._last_reader(parent) > self.awake or not self._is_parent_readable(parent):
            self._ended.set(parent, self.awake)
            return
        for request in self.parents.pop(parent).submission.requests:
            self.bytes_reserved -= self.records.pop(request.id).bytes
        self._ended.drop(parent)

    def _is_parent_readable(self, parent: str) -> bool:
        first = self.parents[parent].submission.requests[0]
        return self._is_readable(self.records[first.id])

    def _end_retired(self, revision: str) -> int:
        """Returns: how many were passed over, since this release cannot read them."""
        waiting = [self.records[request_id] for _, request_id in self._queue(revision)]
        groups = [group for group in self.leases if self.seats[group].revision == revision]
        running = [record for group in groups for record in self.own.get(group, {}).values()]
        for record in filter(self._is_readable, waiting + running):
            self._end_now(record, FinishReason.MODEL_REPLACED)
        return sum(not self._is_readable(record) for record in waiting + running)

    async def report(self, part: str) -> int:
        self._begin()
        self.parts = {name: said for name, said in self.parts.items() if said[0] > self.awake}
        self.parts[part] = self.awake + self.settings.seat_lease_ms, self.schemas
        return self.schema

    async def set_schema(self, number: int) -> int:
        self._begin()
        living = [schemas for lease_end, schemas in self.parts.values() if lease_end > self.awake]
        if all(number in schemas for schemas in (self.schemas, *living)):
            self.schema = number
        return self.schema

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
                if record.request.max_total_tokens > slots and self._is_readable(record):
                    self._end_now(record, FinishReason.ERROR)
        elif self.revision not in (None, revision) and not self._unfinished(revision):
            self.promises[revision] = min(slots, self.promises[revision])
        return self.promises[revision]

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        self._begin()
        if self.promises.get(revision) == expected:
            self.promises[revision] = slots
        return self.promises.get(revision)

    async def larger_requests(self, revision: str, slots: int) -> LargerRequests:
        self._begin()
        needs = [record.request.max_total_tokens for record in self._unfinished(revision)]
        larger = [need for need in needs if need > slots]
        return LargerRequests(
            promised_slots=self.promises.get(revision),
            unfinished=len(larger),
            smallest=min(larger, default=0),
            largest=max(larger, default=0),
        )

    def _unfinished(self, revision: str) -> list[Record]:
        records = (record for record in self.records.values() if record.request.revision == revision)
        return [record for record in records if record.state is not RequestState.ENDED]

    async def stats(self) -> PoolStats:
        self._begin()
        waiting = [self.records[i] for queue in self.queues.values() for _, i in queue]
        heads = [self.records[queue[0][1]].request for queue in self.queues.values() if queue]
        replaced = [record for record in self.records.values() if record.request.revision != self.revision]
        owned = sum(map(len, self.own.values()))
        groups = [group for group in self.leases if self._is_living(group)]
        formed = [group for group in groups if self.seats[group].is_formed]
        return PoolStats(
            queued=len(waiting),
            owned=owned,
            ended=len(self.records) - len(waiting) - owned,
            queued_prompt_tokens=self.queued_prompt_tokens,
            queued_max=self.settings.max_queued,
            queued_prompt_tokens_max=self.settings.max_queued_prompt_tokens,
            ended_ever=self.ended_ever,
            oldest_wait_ms=max((max(0, self._wall - head.submitted_ms) for head in heads), default=0),
            bytes_reserved=self.bytes_reserved,
            bytes_max=self.settings.bytes_max,
            revision=self.revision,
            generation=None if self.revision is None else self._generation,
            replaced_revisions=tuple(sorted({record.request.revision for record in replaced})),
            replaced_unfinished=sum(record.state is not RequestState.ENDED for record in replaced),
            promised_slots=None if self.revision is None else self.promises.get(self.revision),
            offered_slots=self._offered_slots(formed),
            groups=tuple(groups),
            groups_formed=tuple(formed),
            groups_in_force=tuple(group for group in groups if self.seats[group].revision == self.revision),
            schema=self.schema,
            newer_records=sum(record.schema > self.schema for record in self.records.values()),
        )

    def _offered_slots(self, formed: Sequence[str]) -> int | None:
        seats = (self.seats[group] for group in formed)
        offers = [seat.offered_slots for seat in seats if seat.revision == self.revision]
        told = [slots for slots in offers if slots is not None]
        return min(told) if told and len(told) == len(offers) else None

    async def close(self) -> None:
        """Nothing is held open."""


def _slice(record: Record, start: int, limit: int, room: ReadRoom) -> LogSlice:
    """What of a log there is room for."""
    if room.is_spent:
        return LogSlice(start, (), None, is_cut=record.entries > start)
    tokens = room.take(record.log[start : start + limit])
    is_cut = start + len(tokens) < len(record.log)
    end = record.end if not is_cut and start <= len(record.log) else None
    return LogSlice(start, tokens, end, is_cut=is_cut)
