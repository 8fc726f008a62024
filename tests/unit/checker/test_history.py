"""Histories on disk: a line per record, read back as they were."""

from pathlib import Path

import pytest

from checker.history.records import Fault, GroupNews, HistoryWriter, Left, Refused, Resources, from_line, read_history
from checker.rules.verdict import judge
from support.checker.history_builders import Break, decode, good_call, good_history

OTHERS = [
    Fault(at=1.0, number=0, kind="kill", targets=("redis",), pids=(12,), in_flight=("c0",)),
    GroupNews(at=1.1, group="scheduler-0", what="over", epoch=3, reason="a rank died"),
    Refused(at=1.2, call="c0", attempt=0, status=429, code="queue_full", retry_after_s=1.0),
    Left(at=1.3, call="c0", reason="cancel"),
    Resources(at=1.4, moment="after", held={"keys log": 2.0}),
]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    records = [*good_history(good_call(breaks=(Break(after=3),))), *OTHERS]
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        for record in records:
            history.add(record)
    assert read_history(tmp_path / "history.jsonl") == records == history.records
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == len(records)


def test_a_stored_history_is_judged_as_before(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        for record in good_history(good_call()):
            history.add(record)
    assert judge(read_history(tmp_path / "history.jsonl"), decode) == judge(history.records, decode)


@pytest.mark.parametrize("line", ['{"kind":"Rumour","at":1}', '{"at":1}', "{"])
def test_a_line_that_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a record|Expecting"):
        from_line(line)
