"""A history that judges each call when it is over and then drops its records: hours of load in bounded memory.

The file has all records, as always. The memory has the open calls and the records that belong to no call. Of each
judged
call it has only the parts that the rules over the whole system need: its names, and the ends of its connections.
"""

from collections import defaultdict
from pathlib import Path
from types import TracebackType

from checker.history.answers import Call, gather_calls
from checker.history.records import Answered, HistoryWriter, PoolLog, Record
from checker.rules.evidence import Decode
from checker.rules.verdict import Verdict, combine, judge, judge_system


class JudgingHistory(HistoryWriter):
    """`finish(call)` judges a call, `verdict()` covers all calls and the system, `records` belong to no call."""

    def __init__(self, path: Path, decode: Decode | None) -> None:
        super().__init__(path)
        self._decode = decode
        self._open: defaultdict[str, list[Record]] = defaultdict(list)
        self._call_of: dict[str, str] = {}  # by the server's id of an open call
        self._judged: list[Call] = []
        self._so_far: Verdict | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for call in list(self._open):
            self.finish(call)
        super().__exit__(kind, error, at)

    def keep(self, record: Record) -> None:
        if isinstance(record, Answered) and record.request_id is not None:
            self._call_of[record.request_id] = record.call
        call = self._call_of.get(record.request.rpartition(".")[0]) if isinstance(record, PoolLog) else None
        if call := call or getattr(record, "call", None):
            self._open[call].append(record)
        else:
            self.records.append(record)

    def finish(self, call: str) -> None:
        """Judge a call, whose records are complete, and drop its records."""
        records = self._open.pop(call)
        verdict = judge(records, self._decode)
        self._so_far = verdict if self._so_far is None else combine(self._so_far, verdict)
        for judged in gather_calls(records):
            self._call_of.pop(judged.request_id or "", None)
            for connection in judged.connections.values():
                connection.events.clear()
            self._judged.append(judged)

    @property
    def summary(self) -> str:
        """The state of the verdict, in a line."""
        if self._so_far is None:
            return "nothing is judged yet"
        return (
            f"{self._so_far.requests} requests, {self._so_far.tokens} tokens, {len(self._so_far.violations)} violations"
        )

    def verdict(self) -> Verdict:
        """Return the verdict over all finished calls and the system."""
        of_system = judge_system(self._judged, self.records)
        return of_system if self._so_far is None else combine(of_system, self._so_far)
