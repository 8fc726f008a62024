"""What happened, as a client and a bystander saw it: plain records, one JSON line each, in the order they were made.

A verdict is a function of a history alone, so one that is kept can be judged again. `at` is seconds of the recording
machine's monotonic clock; `Opening` says what wall clock that was. A *call* is one HTTP call of ours, under a name of
ours (`c17`); it becomes a *request* of the server, one per choice, under the server's name.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first record: what this history is of."""

    at: float
    seed: int
    wall_s: float  # Unix time at `at`
    settings: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # path of the model's tokenizer.json, for judging texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A call leaves: its body, and how it is meant to end."""

    at: float
    call: str
    attempt: int  # from 0; a refused call is sent again as the next attempt, a broken one under the same
    path: str
    body: dict[str, Any]
    intent: str = "finish"  # finish | cancel (the client will leave) | deadline (the body has one) | poison


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The door said no, and when to come back: nothing was accepted."""

    at: float
    call: str
    attempt: int
    status: int
    code: str | None
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Headers came."""

    at: float
    call: str
    connection: int  # of this call, from 0
    status: int
    request_id: str | None  # the server's name of the call
    cursor: str | None = None  # Last-Event-ID that was sent; None for a POST, "" for all from the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event; or a whole answer, under the id `whole`."""

    at: float
    call: str
    connection: int
    id: str | None
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A connection ended, also one that never had headers. `error` is None where HTTP saw nothing wrong."""

    at: float
    call: str
    connection: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The client went away for good: it asked for `cancel`, or gave up for a reason."""

    at: float
    call: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault was done to the system."""

    at: float
    number: int
    kind: str  # kill | freeze | cut | the name of a point and what was done there
    targets: tuple[str, ...]
    pids: tuple[int, ...]
    in_flight: tuple[str, ...]  # calls that were accepted and not over
    seconds: float = 0.0  # how long a freeze lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers:
    """Clients that are no calls of ours sent so many calls and left; each may have become a request."""

    at: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNews:
    """What a part said about the state of things: read from its log, or from the output of `orca up`."""

    at: float
    group: str  # the part that says it, or that it is said of
    what: str  # over | seat (taken) | formed | commit (an epoch's first) | away, back (the pool) | death
    epoch: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A scheduler took a request; read from its log."""

    at: float
    request: str
    claim: int
    logged: int  # tokens that the log had


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Requests that were part of an iteration, as far as the iteration logs survived."""

    at: float
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLog:
    """A request's log, read from Redis when all was over."""

    at: float
    request: str
    tokens: tuple[int, ...]
    reason: str | None  # None: it has no end
    count: int | None
    is_dense: bool = True  # entry i has the stream id (i+1)-0, the end comes last
    claims: tuple[int, ...] = ()  # number of the claim that wrote each entry; empty where the log does not hold them


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an oracle says a choice is: the tokens to their end."""

    at: float
    call: str
    choice: int
    tokens: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the system holds at a moment at rest."""

    at: float
    moment: str  # before | after
    held: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one part holds at a moment of a soak."""

    at: float
    part: str
    pid: int
    is_steady: bool  # no fault was being done, and the process was warm
    held: dict[str, float]  # by what is counted (growth.BOUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """What the processes offered to the pool and the stages, and which stale work of it was taken (offers.py)."""

    at: float
    counts: dict[str, int]
    harmful: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A part ended politely and began again as another release."""

    at: float
    part: str
    release: str  # that it is of now: before | after
    in_flight: tuple[str, ...]  # calls that were accepted and not over when it was told to end
    seconds: float  # until it had ended
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A question that a disturbance asked the system by itself, and whether the answer may be."""

    at: float
    rule: str
    subject: str
    expected: str
    found: str
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemEnded:
    """The whole system ended by itself, and its last words."""

    at: float
    words: str


Record = (
    Opening
    | Sent
    | Refused
    | Answered
    | Event
    | Closed
    | Left
    | Fault
    | Strangers
    | GroupNews
    | Claimed
    | Ran
    | PoolLog
    | Expected
    | Resources
    | Sample
    | Offers
    | HandedOver
    | Checked
    | SystemEnded
)
_KINDS: dict[str, Callable[..., Record]] = {
    kind.__name__: kind
    for kind in (
        Opening,
        Sent,
        Refused,
        Answered,
        Event,
        Closed,
        Left,
        Fault,
        Strangers,
        GroupNews,
        Claimed,
        Ran,
        PoolLog,
        Expected,
        Resources,
        Sample,
        Offers,
        HandedOver,
        Checked,
        SystemEnded,
    )
}


class HistoryWriter:
    """Appends records to a file and keeps them: `with HistoryWriter(path) as history: history.add(Sent(...))`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self.records: list[Record] = []

    def __enter__(self) -> "HistoryWriter":
        self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()

    def add(self, record: Record) -> None:
        assert self._file is not None, "records are added inside `with`"
        self._file.write(to_line(record) + "\n")
        self.keep(record)

    def keep(self, record: Record) -> None:
        """In memory, beside the file."""
        self.records.append(record)

    def finish(self, call: str) -> None:
        """No more records of this call will come."""

    @property
    def standing(self) -> str:
        """How things are, in a line."""
        return f"{len(self.records)} records"


def to_line(record: Record) -> str:
    return json.dumps({"record": type(record).__name__} | asdict(record), ensure_ascii=False, separators=(",", ":"))


def from_line(line: str) -> Record:
    """Raises: ValueError for what is no record."""
    fields: dict[str, Any] = json.loads(line)
    kind = _KINDS.get(fields.pop("record", ""))
    if kind is None:
        raise ValueError(f"no record of a history: {line[:80]!r}")
    # JSON has no tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return kind(**values)


def read_history(path: Path) -> list[Record]:
    """All records of a file. Raises: ValueError for a line that is none."""
    with path.open(encoding="utf-8") as file:
        return list(_records(file))


def _records(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        yield from_line(line)
