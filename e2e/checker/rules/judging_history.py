"""A history that judges each call when it is over and forgets it: hours of load in bounded memory.

The file has everything, as always. In memory stay the calls that are open, what belongs to no call, and of each judged
call what the rules over the whole system ask for: its names, and how its connections ended.
"""

from collections import defaultdict
from pathlib import Path
from types import TracebackType

from checker.history.answers import Call, gather_calls
from checker.history.records import Answered, HistoryWriter, PoolLog, Record
from checker.rules.evidence import Decode
from checker.rules.verdict import Verdict, judge, judge_system, together


class JudgingHistory(HistoryWriter):
    """`finish(call)` judges it, `verdict()` is that of all calls and the system, `records` has what is of no call."""

    def __init__(self, path: Path, decode: Decode | None) -> None:
        super().__init__(path)
        self._decode = decode
        self._open: defaultdict[str, list[Record]] = defaultdict(list)
        self._call_of: dict[str, str] = {}  # by the server's name of an open call
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
        """All records of the call are there."""
        records = self._open.pop(call)
        verdict = judge(records, self._decode)
        self._so_far = verdict if self._so_far is None else together(self._so_far, verdict)
        for judged in gather_calls(records):
            self._call_of.pop(judged.request_id or "", None)
            for connection in judged.connections.values():
                connection.said.clear()
            self._judged.append(judged)

    @property
    def standing(self) -> str:
        """How things are, in a line."""
        if self._so_far is None:
            return "nothing was judged yet"
        return (
            f"{self._so_far.requests} requests, {self._so_far.tokens} tokens, {len(self._so_far.violations)} violations"
        )

    def verdict(self) -> Verdict:
        of_system = judge_system(self._judged, self.records)
        return of_system if self._so_far is None else together(of_system, self._so_far)
