"""The in-memory pool's records, and the moves that its transitions (pool.py) are made of.

The moves are those of `redis/scripts/prelude.lua`: let awake time pass, TAKE BACK, END, watch the readers.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from orca.core.domain.request import End, FinishReason, Request, Token
from orca.pool import poison
from orca.pool.contract import WANTED_FOR_MS
from orca.pool.hints import Hints
from orca.pool.memory.deadlines import CountedDeadlines
from orca.pool.memory.latencies import CountedLatencies
from orca.pool.memory.lengths import CountedLengths
from orca.pool.memory.waiting_index import WaitingIndexes, place_of
from orca.pool.order.deadline_outcome import is_in_time
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.records import OwnershipState, Submission
from orca.pool.schemas import SCHEMAS, Schemas
from orca.pool.settings import PoolSettings

_AWAKE_STEP_MAX_MS = 1_000


class PoolClock(Protocol):
    """The wall clock, which may jump and stand still as that of Redis may."""

    def wall_ms(self) -> int: ...


@dataclass(slots=True)
class RequestRecord:
    """A request as the pool sees it."""

    request: Request
    bytes: int
    token_bytes: int
    schema: int
    state: OwnershipState = OwnershipState.QUEUED
    number: int = 0  # of its present claim; rises with each claim and each take-back
    call: str = ""  # of its present claim; empty while queued, unchanged by the end
    group: str = ""
    process: str = ""
    first_claimed_ms: int | None = None
    starts_by_ms: int | None = None  # end of its start window, as its first claim saw it
    first_step_ms: int | None = None  # known with the first token, if that came under the first claim
    first_token_ms: int | None = None
    ended_ms: int | None = None
    mark: tuple[int, str] | None = None  # epoch and group of the seat that it is reserved for
    is_on_trial: bool = False  # claimed, and without a commit since
    failures: int = 0  # trials in a row that ended with the group's engine failing from inside
    log: list[Token] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)  # per entry, the end included: number of the claim that wrote it
    end: End | None = None

    @property
    def entries(self) -> int:
        return len(self.log) + (self.end is not None)

    @property
    def is_alone(self) -> bool:
        return poison.is_alone(self.failures)


@dataclass(slots=True)
class Seat:
    """A group's seat. It keeps the answers of the holder's last calls, so that a repeated call gets the same answer."""

    holder: str = ""
    epoch: int = 0
    revision: str = ""
    last_call: int = -1
    enter_call: int | None = None
    enter_answer: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # failed, poisoned
    claim_call: int | None = None
    # (id, number).., waiting, blocked, by another order
    claim_answer: tuple[tuple[tuple[str, int], ...], int, bool, bool] = ((), 0, False, False)
    is_formed: bool = False  # the holder's last heartbeat reported that the group serves
    offered_slots: int | None = None  # the most that one request may need in the group, by the holder's last heartbeat
    order: ClaimOrder | None = None  # of the last claim; None if that was by arrival


@dataclass(slots=True)
class ParentRecord:
    submission: Submission
    left: int  # requests that have not ended
    readers: dict[str, int] = field(default_factory=dict)  # reader -> awake ms at which its lease ends


class DueTimes:
    """Names, each with the one time at which it is due."""

    def __init__(self) -> None:
        self._due_at: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # also holds times that have been replaced

    def set(self, name: str, due_at: int) -> None:
        self._due_at[name] = due_at
        heapq.heappush(self._heap, (due_at, name))

    def get(self, name: str) -> int | None:
        return self._due_at.get(name)

    def drop(self, name: str) -> None:
        self._due_at.pop(name, None)

    def count_between(self, after: int, until: int) -> int:
        """Count the names that are due after one time, and at another one at the latest."""
        return sum(after < due_at <= until for due_at in self._due_at.values())

    def due(self, now: int) -> list[str]:
        """Return the names that are due, the earliest first; a name stays until it is dropped or gets another time."""
        found: dict[str, None] = {}
        while self._heap and self._heap[0][0] <= now:
            due_at, name = heapq.heappop(self._heap)
            if self._due_at.get(name) == due_at:
                found[name] = None
        for name in found:
            heapq.heappush(self._heap, (self._due_at[name], name))
        return list(found)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._due_at))


class PoolState:
    """The records, queues, seats and due times of one deployment, kept consistent by its moves."""

    def __init__(self, clock: PoolClock, settings: PoolSettings, schemas: Schemas = SCHEMAS) -> None:
        self._clock = clock
        self.settings = settings
        self.schemas = schemas
        self.schema = schemas.newest  # in force
        self.parts: dict[str, tuple[int, Schemas]] = {}  # part -> end of its lease, what it reads and writes
        self.awake = 0
        self.wall = clock.wall_ms()  # at the last transition
        self.records: dict[str, RequestRecord] = {}
        self.parents: dict[str, ParentRecord] = {}
        self.queues: dict[str, list[tuple[int, str]]] = {}  # revision -> (arrival, id), oldest first
        self.waiting = WaitingIndexes()  # of the queues, for orders of claims
        self.own: dict[str, dict[str, RequestRecord]] = {}  # group -> its requests
        self.seats: dict[str, Seat] = {}
        self.leases = DueTimes()  # group -> end of its seat's lease; groups without a living seat are not in it
        self.closed_at: dict[str, int] = {}  # process that has left -> awake ms
        self.promises: dict[str, int] = {}
        self.block_tokens: dict[str, int] = {}  # revision -> tokens in a KV block of its groups
        self.bytes_reserved = 0
        # A submission was refused because reservations exceeded `wanted_bytes`, at this awake time.
        self.wanted_bytes, self.wanted_ms = 0, -WANTED_FOR_MS - 1
        self.queued_prompt_tokens = 0
        self.ended_ever = 0
        self.unserved_ever = 0  # those of them that ended while they waited
        self.revision: str | None = None
        self.generation = 0
        self.arrival = 0
        self.watch = DueTimes()  # parent -> awake ms at which it counts as unread
        self.forgotten: dict[str, int] = {}  # parent that was forgotten on demand -> awake ms
        self.deadlines = DueTimes()  # request -> deadline in force, wall clock
        self.ended = DueTimes()  # parent -> awake ms at which its last request ended
        self.retired = DueTimes()  # revision -> awake ms at which its requests end
        self.lengths = CountedLengths()
        self.latencies = CountedLatencies()
        self.outcomes = CountedDeadlines()
        self.results: dict[str, tuple[int, bytes]] = {}  # key of a Job -> wall clock ms until which it is kept, result
        self.hints = Hints(poll_s=math.inf)

    def check(self) -> None:
        """Recount what is kept twice: state against queue and group, bytes against records, ends against parents."""
        queued = {request_id for queue in self.queues.values() for _, request_id in queue}
        owned = {request_id for own in self.own.values() for request_id in own}
        for request_id, record in self.records.items():
            state = record.state
            assert (request_id in queued) == (state is OwnershipState.QUEUED), request_id
            assert (request_id in owned) == (state is OwnershipState.OWNED), request_id
            assert (record.end is not None) == (state is OwnershipState.ENDED), request_id
            assert record.end is None or record.end.count == len(record.log), request_id
        assert queued | owned <= self.records.keys()
        assert all(queue == sorted(queue) for queue in self.queues.values())
        for revision, index in self.waiting.indexes.items():
            queue = [request_id for arrival, request_id in self.queue(revision) if arrival <= index.built_to]
            waiting = [self.records[request_id] for request_id in queue]
            readable = [(each.request, len(each.log)) for each in waiting if self.is_readable(each)]
            places = {each.id: place_of(each, self.deadlines.get(each.id), logged) for each, logged in readable}
            assert places.items() <= index.places.items(), revision
            assert index.places.keys() <= set(queue), revision
        assert self.queued_prompt_tokens == sum(len(self.records[i].request.prompt) for i in queued)
        assert self.bytes_reserved == sum(record.bytes for record in self.records.values())
        for name, parent in self.parents.items():
            records = [self.records[request.id] for request in parent.submission.requests]
            assert parent.left == sum(record.end is None for record in records), name

    def begin(self) -> None:
        """Begin a transition: add the time since the last one to the awake time (protocol: awake time)."""
        wall = self._clock.wall_ms()
        self.awake += self.awake_step(wall - self.wall)
        self.wall = wall

    def awake_step(self, passed_ms: int) -> int:
        return min(max(passed_ms, 0), _AWAKE_STEP_MAX_MS)

    def take_back(self, record: RequestRecord) -> None:
        """TAKE BACK: queue it at its old place and raise its claim number, so that a commit on its way is refused.

        Its trial ends, and `failures` stays as it is: an enter that blames the request has counted before.
        """
        del self.own[record.group][record.request.id]
        record.state, record.number, record.call = OwnershipState.QUEUED, record.number + 1, ""
        record.group = record.process = ""
        record.is_on_trial = False
        insort(self.queue(record.request.revision), (record.request.arrival, record.request.id))
        self.waiting.add(record.request, self.deadlines.get(record.request.id), len(record.log))
        self.queued_prompt_tokens += len(record.request.prompt)
        self.hints.publish_work(record.request.revision)

    def take_back_all(self, group: str) -> None:
        for record in list(self.own.get(group, {}).values()):
            if self.is_readable(record):
                self.take_back(record)

    def end(self, record: RequestRecord, end: End) -> None:
        """END: write the log's last entry, leave queue and group, and release the bytes that it will not use."""
        if record.state is OwnershipState.QUEUED:
            self.unqueue(record)
            self.unserved_ever += 1
        else:
            del self.own[record.group][record.request.id]
        record.state, record.end, record.ended_ms = OwnershipState.ENDED, end, self.wall
        record.writers.append(record.number)
        record.group = record.process = ""
        self.deadlines.drop(record.request.id)
        in_time = is_in_time(record.request, end, first_token_ms=record.first_token_ms, ended_ms=self.wall)
        self.outcomes.count(record.request.revision, self.awake, in_time=in_time)
        unused = (record.request.max_new_tokens - len(record.log)) * record.token_bytes
        record.bytes -= unused
        self.bytes_reserved -= unused
        self.ended_ever += 1
        parent = self.parents[record.request.parent]
        parent.left -= 1
        if parent.left == 0:
            self.ended.set(record.request.parent, self.awake)
            self.watch.drop(record.request.parent)
        self.hints.publish_log(record.request.id, record.entries)

    def end_now(self, record: RequestRecord, reason: FinishReason) -> None:
        self.end(record, End(reason, len(record.log)))

    def end_parent(self, parent: str, reason: FinishReason) -> None:
        kept = self.parents.get(parent)
        for request in kept.submission.requests if kept else ():
            record = self.records[request.id]
            if record.state is not OwnershipState.ENDED and self.is_readable(record):
                self.end_now(record, reason)

    def is_readable(self, record: RequestRecord) -> bool:
        """Return true if the record was written under a schema number of this release."""
        return record.schema in self.schemas

    def watch_readers(self, parent: str, at_least: int) -> None:
        """Count the parent as unread after the grace. Args: at_least: awake time at which a reader just left, or 0."""
        if self.watch.get(parent) is not None:
            self.watch.set(parent, max(self.last_reader(parent), at_least) + self.settings.resume_grace_ms)

    def last_reader(self, parent: str) -> int:
        """Return the awake time at which the last reader's lease ends, 0 if there was no reader."""
        return max(self.parents[parent].readers.values(), default=0)

    def is_seat_living(self, group: str) -> bool:
        lease = self.leases.get(group)
        return lease is not None and lease > self.awake

    def queue(self, revision: str) -> list[tuple[int, str]]:
        return self.queues.setdefault(revision, [])

    def unqueue(self, record: RequestRecord) -> None:
        self.queued_prompt_tokens -= len(record.request.prompt)
        queue = self.queue(record.request.revision)
        del queue[bisect_left(queue, (record.request.arrival, record.request.id))]
        self.waiting.remove(record.request)
