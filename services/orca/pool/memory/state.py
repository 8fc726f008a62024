"""What the in-memory pool holds, and the few moves that its transitions are made of.

The moves are those of `scripts/prelude.lua`: let awake time pass, TAKE BACK, END, watch the readers.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from orca.core.domain.errors import UnknownRequest
from orca.core.domain.request import End, FinishReason, Request, Token
from orca.pool import poison
from orca.pool.contract import WANTED_FOR_MS, verdict_error
from orca.pool.hints import Hints
from orca.pool.records import Caller, RequestState, Submission
from orca.pool.schemas import SCHEMAS, Schemas
from orca.pool.settings import PoolSettings

_AWAKE_STEP_MAX_MS = 1_000


class Clock(Protocol):
    """The wall clock, which may jump and stand still as Redis' does."""

    def wall_ms(self) -> int: ...


@dataclass(slots=True)
class Record:
    """A request as the pool sees it."""

    request: Request
    bytes: int
    token_bytes: int
    schema: int
    state: RequestState = RequestState.QUEUED
    number: int = 0  # of its present claim; rises with each claim and each take-back
    call: str = ""  # of its present claim; empty while queued, and as it was after the end
    group: str = ""
    process: str = ""
    first_claimed_ms: int | None = None
    first_token_ms: int | None = None
    ended_ms: int | None = None
    mark: tuple[int, str] | None = None  # epoch and group of the seat that it is reserved for
    is_on_trial: bool = False  # claimed, and nothing was committed since
    failures: int = 0  # trials in a row that ended with the group's engine failing from inside
    log: list[Token] = field(default_factory=list)
    writers: list[int] = field(
        default_factory=list
    )  # of each entry, the end too: the number of the claim that wrote it
    end: End | None = None

    @property
    def entries(self) -> int:
        return len(self.log) + (self.end is not None)

    @property
    def is_alone(self) -> bool:
        return poison.is_alone(self.failures)


@dataclass(slots=True)
class Seat:
    """A group's seat. The answers of the holder's last calls are kept, so that a repeated call gets the same."""

    holder: str = ""
    epoch: int = 0
    revision: str = ""
    last_call: int = -1
    enter_call: int | None = None
    enter_answer: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # failed, poisoned
    claim_call: int | None = None
    claim_answer: tuple[tuple[tuple[str, int], ...], int, bool] = ((), 0, False)  # (id, number).., waiting, blocked
    is_formed: bool = False  # its holder said last that the group serves
    offered_slots: int | None = None  # that one request may need in it at most, as its holder said last


@dataclass(slots=True)
class ParentRecord:
    submission: Submission
    left: int  # requests that have not ended
    readers: dict[str, int] = field(default_factory=dict)  # reader -> awake ms at which its lease ends


class Schedule:
    """Names with the time at which each is due; a name has one time."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # also holds times that have been replaced

    def set(self, name: str, at: int) -> None:
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))

    def get(self, name: str) -> int | None:
        return self._at.get(name)

    def drop(self, name: str) -> None:
        self._at.pop(name, None)

    def due(self, now: int) -> list[str]:
        """Names whose time has come, the earliest first; they stay until dropped or set anew."""
        found: dict[str, None] = {}
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._at.get(name) == at:
                found[name] = None
        for name in found:
            heapq.heappush(self._heap, (self._at[name], name))
        return list(found)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._at))


class MemoryState:
    """Records, queues, seats and times of one deployment, kept consistent by its moves."""

    def __init__(self, clock: Clock, settings: PoolSettings | None = None, schemas: Schemas = SCHEMAS) -> None:
        self._clock = clock
        self.schemas = schemas
        self.schema = schemas.newest  # in force
        self.parts: dict[str, tuple[int, Schemas]] = {}  # part -> end of its lease, what it reads and writes
        self.settings = settings or PoolSettings()
        self.awake = 0
        self._wall = clock.wall_ms()
        self.records: dict[str, Record] = {}
        self.parents: dict[str, ParentRecord] = {}
        self.queues: dict[str, list[tuple[int, str]]] = {}  # revision -> (arrival, id), oldest first
        self.own: dict[str, dict[str, Record]] = {}  # group -> its requests
        self.seats: dict[str, Seat] = {}
        self.leases = Schedule()  # group -> end of its seat's lease; groups without a living seat are not in it
        self.closed_at: dict[str, int] = {}  # process that has left -> awake ms
        self.promises: dict[str, int] = {}
        self.bytes_reserved = 0
        self.wanted = 0, -WANTED_FOR_MS - 1  # bytes that a refused submission had found room beside, and when
        self.queued_prompt_tokens = 0
        self.ended_ever = 0
        self.revision: str | None = None
        self._generation = 0
        self._arrival = 0
        self._watch = Schedule()  # parent -> when it counts as unread
        self._deadlines = Schedule()  # request -> deadline in force, wall clock
        self._ended = Schedule()  # parent -> when its last request ended
        self._retired = Schedule()  # revision -> when its requests end
        self._hints = Hints(poll_s=math.inf)

    def check(self) -> None:
        """Recount what is kept twice: state against queue and group, bytes against records, ends against parents."""
        queued = {request_id for queue in self.queues.values() for _, request_id in queue}
        owned = {request_id for own in self.own.values() for request_id in own}
        for request_id, record in self.records.items():
            state = record.state
            assert (request_id in queued) == (state is RequestState.QUEUED), request_id
            assert (request_id in owned) == (state is RequestState.OWNED), request_id
            assert (record.end is not None) == (state is RequestState.ENDED), request_id
            assert record.end is None or record.end.count == len(record.log), request_id
        assert queued | owned <= self.records.keys()
        assert all(queue == sorted(queue) for queue in self.queues.values())
        assert self.queued_prompt_tokens == sum(len(self.records[i].request.prompt) for i in queued)
        assert self.bytes_reserved == sum(record.bytes for record in self.records.values())
        for name, parent in self.parents.items():
            records = [self.records[request.id] for request in parent.submission.requests]
            assert parent.left == sum(record.end is None for record in records), name

    def _begin(self) -> None:
        """Add the time since the last call to the awake time (protocol: awake time)."""
        wall = self._clock.wall_ms()
        self.awake += self._awake_step(wall - self._wall)
        self._wall = wall

    def _awake_step(self, passed_ms: int) -> int:
        return min(max(passed_ms, 0), _AWAKE_STEP_MAX_MS)

    def _take_back(self, record: Record) -> None:
        """TAKE BACK: queued at its old place, the claim number raised so that a commit on its way is refused.

        The mark of its trial goes, and `failures` stays as it is: who blames the request has counted before.
        """
        del self.own[record.group][record.request.id]
        record.state, record.number, record.call = RequestState.QUEUED, record.number + 1, ""
        record.group = record.process = ""
        record.is_on_trial = False
        insort(self._queue(record.request.revision), (record.request.arrival, record.request.id))
        self.queued_prompt_tokens += len(record.request.prompt)
        self._hints.tell_work(record.request.revision)

    def _take_back_all(self, group: str) -> None:
        for record in list(self.own.get(group, {}).values()):
            if self._is_readable(record):
                self._take_back(record)

    def _end(self, record: Record, end: End) -> None:
        """END: the last entry of the log, out of queue and group, and the bytes that it will not use given back."""
        if record.state is RequestState.QUEUED:
            self._unqueue(record)
        else:
            del self.own[record.group][record.request.id]
        record.state, record.end, record.ended_ms = RequestState.ENDED, end, self._wall
        record.writers.append(record.number)
        record.group = record.process = ""
        self._deadlines.drop(record.request.id)
        unused = (record.request.max_new_tokens - len(record.log)) * record.token_bytes
        record.bytes -= unused
        self.bytes_reserved -= unused
        self.ended_ever += 1
        parent = self.parents[record.request.parent]
        parent.left -= 1
        if parent.left == 0:
            self._ended.set(record.request.parent, self.awake)
            self._watch.drop(record.request.parent)
        self._hints.tell_log(record.request.id, record.entries)

    def _end_now(self, record: Record, reason: FinishReason) -> None:
        self._end(record, End(reason, len(record.log)))

    def _end_parent(self, parent: str, reason: FinishReason) -> None:
        kept = self.parents.get(parent)
        for request in kept.submission.requests if kept else ():
            record = self.records[request.id]
            if record.state is not RequestState.ENDED and self._is_readable(record):
                self._end_now(record, reason)

    def _is_readable(self, record: Record) -> bool:
        """Was it written under a schema number of this release?"""
        return record.schema in self.schemas

    def _watch_readers(self, parent: str, at_least: int) -> None:
        if self._watch.get(parent) is not None:
            self._watch.set(parent, max(self._last_reader(parent), at_least) + self.settings.resume_grace_ms)

    def _last_reader(self, parent: str) -> int:
        return max(self.parents[parent].readers.values(), default=0)

    def _check_seated(self, caller: Caller) -> None:
        if caller.process in self.closed_at:
            raise verdict_error("closed", caller)
        seat = self.seats.get(caller.group)
        if seat is None or seat.holder != caller.process:
            raise verdict_error("lost", caller)

    def _is_living(self, group: str) -> bool:
        lease = self.leases.get(group)
        return lease is not None and lease > self.awake

    def _queue(self, revision: str) -> list[tuple[int, str]]:
        return self.queues.setdefault(revision, [])

    def _unqueue(self, record: Record) -> None:
        self.queued_prompt_tokens -= len(record.request.prompt)
        queue = self._queue(record.request.revision)
        del queue[bisect_left(queue, (record.request.arrival, record.request.id))]

    def _record(self, request_id: str) -> Record:
        if request_id not in self.records:
            raise UnknownRequest(request_id)
        return self.records[request_id]

    def _parent(self, parent: str) -> ParentRecord:
        if parent not in self.parents:
            raise UnknownRequest(parent)
        return self.parents[parent]
