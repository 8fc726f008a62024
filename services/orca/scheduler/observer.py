"""Events of the loop, for metrics, for the iteration log and for tests. Observers change nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import orjson

from orca.core.domain.request import FinishReason, Request
from orca.core.domain.step import Epoch, Part
from orca.core.process.line_file import LineFile
from orca.pool.records import CommitAnswer
from orca.scheduler.policy.batch import Batch, BatchRow, GroupRequest, Phase


@dataclass(frozen=True, slots=True)
class RowRecord:
    """A request's part of an iteration."""

    request_id: str
    phase: Phase  # INITIATION while it runs known tokens, otherwise INCREMENT
    start: int  # position of its first token
    count: int  # tokens
    part: Part = Part.UNSPECIFIED  # SOURCE or TARGET with an encoder-decoder model

    def as_list(self) -> list[object]:
        """Return request, phase, start and count, then the part where there is one."""
        values = [self.request_id, self.phase, self.start, self.count]
        return values if self.part is Part.UNSPECIFIED else [*values, self.part.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One step whose result was read. Times are of the loop's clock, in nanoseconds.

    It refers to the loop's own entries, so that a step costs no copying; the fields used here never change.
    """

    epoch: Epoch
    step: int
    batch: Batch
    submitted_ns: int
    returned_ns: int
    evicted_blocks: int = 0  # of the prefix cache

    @property
    def rows(self) -> tuple[RowRecord, ...]:
        """The rows in the order of the step: sources first."""
        return tuple(map(_source_row, self.batch.sources)) + tuple(map(_row, self.batch.rows))

    @property
    def freed(self) -> tuple[str, ...]:
        """The ids of the requests whose slots this step gave back."""
        return tuple(entry.request.id for entry in self.batch.freed)

    @property
    def tokens(self) -> int:
        """Tokens of the step, those of sources included."""
        return sum(row.count for row in self.batch.rows) + self.batch.source_tokens

    def as_json(self) -> bytes:
        """Return one line: epoch, step, rows (`RowRecord.as_list`), freed, and the two times."""
        return orjson.dumps(
            {
                "epoch": self.epoch.number,
                "step": self.step,
                "rows": [row.as_list() for row in self.rows],
                "freed": self.freed,
                "submitted_ns": self.submitted_ns,
                "returned_ns": self.returned_ns,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """The present load of the group."""

    running: int = 0  # requests admitted and not over
    claimed: int = 0  # requests claimed that have not run yet
    waiting: int = 0  # requests in the pool's queue, as of the last claim
    slots_reserved: int = 0
    slots: int = 0  # 0 while no epoch is formed
    uncommitted: int = 0  # requests whose newest tokens are not in the pool yet
    cached_blocks: int = 0  # KV blocks of ended requests, kept for their prefixes
    held_blocks: int = 0  # KV blocks of requests; 0 without a prefix cache, which alone counts them


class Observer:
    """Base of all observers: has a method for each event, which does nothing."""

    def formed(self, epoch: Epoch, slots: int, description: str) -> None:
        """An epoch begins."""

    def broke(self, epoch: Epoch, reason: str) -> None:
        """An epoch ended before the scheduler was stopped."""

    def stood_by(self) -> None:
        """Another process holds the seat that this one wants to enter, and so the group."""

    def claimed(self, request: Request, logged: int, slack_ms: int | None = None) -> None:
        """A request was claimed, with `logged` tokens of earlier claims.

        Args: slack_ms: until the end of its start window; None unless it is its first claim, and by another order.
        """

    def isolated(self, request: Request) -> None:
        """A request was claimed that must run alone, because engines failed while they ran it."""

    def blamed(self, failed: Sequence[str], poisoned: Sequence[str]) -> None:
        """The engine failed from inside. The pool queued the failed requests again and ended the poisoned ones."""

    def iterated(self, record: IterationRecord) -> None:
        """A step was read."""

    def ended(self, request: Request, reason: FinishReason, tokens: int) -> None:
        """The scheduler decided a request's end."""

    def answered(self, answers: Sequence[CommitAnswer]) -> None:
        """The pool answered a commit, one answer for each request in it."""


class IterationHistory(Observer):
    """Keeps every iteration in memory: for tests and simulations."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []

    def iterated(self, record: IterationRecord) -> None:
        self.records.append(record)


class IterationLogFile(Observer):
    """Writes every iteration as a JSON line (`IterationRecord.as_json`).

    A scheduler that is killed leaves whole lines up to its last step, and a full disk costs it no step.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def iterated(self, record: IterationRecord) -> None:
        self._file.write(record.as_json())

    def __enter__(self) -> "IterationLogFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class Observers(Observer):
    """Passes every event on to several observers, in order. The class is long because it has a method per event."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def formed(self, epoch: Epoch, slots: int, description: str) -> None:
        for observer in self._observers:
            observer.formed(epoch, slots, description)

    def broke(self, epoch: Epoch, reason: str) -> None:
        for observer in self._observers:
            observer.broke(epoch, reason)

    def stood_by(self) -> None:
        for observer in self._observers:
            observer.stood_by()

    def claimed(self, request: Request, logged: int, slack_ms: int | None = None) -> None:
        for observer in self._observers:
            observer.claimed(request, logged, slack_ms)

    def isolated(self, request: Request) -> None:
        for observer in self._observers:
            observer.isolated(request)

    def blamed(self, failed: Sequence[str], poisoned: Sequence[str]) -> None:
        for observer in self._observers:
            observer.blamed(failed, poisoned)

    def iterated(self, record: IterationRecord) -> None:
        for observer in self._observers:
            observer.iterated(record)

    def ended(self, request: Request, reason: FinishReason, tokens: int) -> None:
        for observer in self._observers:
            observer.ended(request, reason, tokens)

    def answered(self, answers: Sequence[CommitAnswer]) -> None:
        for observer in self._observers:
            observer.answered(answers)


def _row(row: BatchRow) -> RowRecord:
    phase = Phase.INITIATION if row.is_of_prompt else Phase.INCREMENT
    return RowRecord(row.request.request.id, phase, row.start, row.count, row.request.part)


def _source_row(entry: GroupRequest) -> RowRecord:
    return RowRecord(entry.request.id, Phase.INITIATION, 0, entry.source_tokens, Part.SOURCE)
