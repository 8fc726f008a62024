"""The history of a run from outside: plain records, one JSON line each, in the order in which they were made.

A verdict is a function of a history alone, so a stored history can be judged again. `at` is seconds of the recording
machine's monotonic clock; `Opening` has the wall-clock time of one such moment. A *call* is one HTTP call of the
checker, with the checker's name (`c17`). The server makes a *request* of it, one per choice, with the server's id.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first record, with the settings of the run."""

    at: float
    seed: int
    wall_s: float  # Unix time at `at`
    settings: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # path of the model's tokenizer.json, for judging texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The client sends a call, with its body and the intended end."""

    at: float
    call: str
    attempt: int  # from 0; a refused call is sent again as the next attempt, a broken one as the same attempt
    path: str
    body: dict[str, Any]
    intent: str = "finish"  # finish | cancel (the client will leave) | deadline (the body has one) | poison


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The gateway refused the call and named a time to try again; it accepted nothing."""

    at: float
    call: str
    attempt: int
    status: int
    code: str | None
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The headers of an answer arrived."""

    at: float
    call: str
    connection: int  # of this call, from 0
    status: int
    request_id: str | None  # the server's id of the call
    cursor: str | None = None  # the sent Last-Event-ID; None for a POST, "" for all events from the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event, or a whole answer with the id `whole`."""

    at: float
    call: str
    connection: int
    id: str | None
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A connection ended, even if it never had headers. `error` is None if HTTP reported no error."""

    at: float
    call: str
    connection: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The client left and will not come back: it wanted to `cancel`, or gave up for a reason."""

    at: float
    call: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The checker injected a fault into the system."""

    at: float
    number: int
    kind: str  # kill | freeze | cut | the name of a point and the action there
    targets: tuple[str, ...]
    pids: tuple[int, ...]
    in_flight: tuple[str, ...]  # calls that were accepted and not over
    seconds: float = 0.0  # length of a freeze or cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers:
    """Clients without records sent a number of calls and left; each call may have become a request."""

    at: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNews:
    """A part reported a change of state, in its log or in the output of `orca up`."""

    at: float
    group: str  # the part that reports it, or that died
    # over | seat (taken) | formed | commit (an epoch's first) | away, back (the pool) | death | broke (a rank's epoch)
    what: str
    epoch: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A scheduler claimed a request, according to its log."""

    at: float
    request: str
    claim: int
    logged: int  # number of tokens in the log at this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The requests of all iterations in the iteration logs; a kill may have cut the logs."""

    at: float
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLog:
    """A request's log in Redis, read after the end of the call."""

    at: float
    request: str
    tokens: tuple[int, ...]
    reason: str | None  # None: it has no end
    count: int | None
    is_dense: bool = True  # entry i has the stream id (i+1)-0, and the end comes last
    claims: tuple[int, ...] = ()  # number of the claim that wrote each entry; empty if the log does not have them


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected tokens of a choice up to its end, from an oracle."""

    at: float
    call: str
    choice: int
    tokens: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of the system at rest."""

    at: float
    moment: str  # before | after
    held: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The resources of one part at a moment of a soak."""

    at: float
    part: str
    pid: int
    is_steady: bool  # during a quiet time, after the warm-up of the process
    held: dict[str, float]  # by resource (growth.BOUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Counts of commits and steps that the processes offered, and the stale ones that were taken (offers.py)."""

    at: float
    counts: dict[str, int]
    harmful: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A part ended in order and started again as another release."""

    at: float
    part: str
    release: str  # its new release: before | after
    in_flight: tuple[str, ...]  # calls that were accepted and not over when the part got the signal
    seconds: float  # from the signal to the end of the part
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A check that a disturbance made itself, with its result."""

    at: float
    rule: str
    subject: str
    expected: str
    found: str
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemEnded:
    """The whole system ended by itself; `words` is the end of its output."""

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
    """Appends records to a file and stores them: `with HistoryWriter(path) as history: history.add(Sent(...))`."""

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
        """Store a record in memory; the file has it already."""
        self.records.append(record)

    def finish(self, call: str) -> None:
        """Mark a call as complete: it gets no more records."""

    @property
    def summary(self) -> str:
        """The state of the history, in a line."""
        return f"{len(self.records)} records"


def to_line(record: Record) -> str:
    return json.dumps({"record": type(record).__name__} | asdict(record), ensure_ascii=False, separators=(",", ":"))


def from_line(line: str) -> Record:
    """Parse a record from a line. Raises: ValueError for any other line."""
    fields: dict[str, Any] = json.loads(line)
    kind = _KINDS.get(fields.pop("record", ""))
    if kind is None:
        raise ValueError(f"not a record of a history: {line[:80]!r}")
    # JSON has lists only, records have tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return kind(**values)


def read_history(path: Path) -> list[Record]:
    """Return all records of a file. Raises: ValueError for a line that is not a record."""
    with path.open(encoding="utf-8") as file:
        return list(_records(file))


def _records(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        yield from_line(line)
