"""Judging call by call finds what judging the whole history finds, and forgets the events."""

from pathlib import Path

from checker.history.records import Event, HistoryWriter, PoolLog, Ran, Record
from checker.rules.judging_history import JudgingHistory
from checker.rules.verdict import judge, judge_system
from support.checker.history_builders import decode, good_call, good_history


def judged_as_it_goes(path: Path, records: list[Record]) -> JudgingHistory:
    with JudgingHistory(path / "history.jsonl", decode) as history:
        for record in records:
            history.add(record)
    return history


def test_a_good_history_is_good_call_by_call(tmp_path: Path) -> None:
    records = good_history(good_call(), good_call("c1"))
    verdict, whole = judged_as_it_goes(tmp_path, records).verdict(), judge(records, decode)
    assert verdict.is_clean
    assert (verdict.requests, verdict.tokens, verdict.seed) == (whole.requests, whole.tokens, whole.seed)
    assert verdict.unproven == whole.unproven


def test_a_violation_of_one_call_is_reported_while_the_run_continues(tmp_path: Path) -> None:
    spoilt = [record for record in good_call("c1") if not (isinstance(record, Event) and record.id == "0.1")]
    with JudgingHistory(tmp_path / "history.jsonl", decode) as history:
        assert history.summary == "nothing is judged yet"
        for record in good_history(good_call(), spoilt):
            history.add(record)
        history.finish("c1")
        assert history.summary.endswith("violations")
    found, whole = history.verdict().violations, judge(good_history(good_call(), spoilt), decode).violations
    assert {violation.rule for violation in found} == {violation.rule for violation in whole}


def test_events_and_logs_of_a_judged_call_are_not_kept(tmp_path: Path) -> None:
    history = judged_as_it_goes(tmp_path, good_history(good_call()))
    assert not any(isinstance(record, Event | PoolLog) for record in history.records)


def test_the_rules_over_the_system_know_the_calls_that_were_judged(tmp_path: Path) -> None:
    ran = Ran(at=9.0, requests=("cmpl-c0.0", "cmpl-unknown.0"))
    found = judged_as_it_goes(tmp_path, good_history(good_call(), [ran])).verdict().violations
    assert [violation.found for violation in found] == ["1 unknown: cmpl-unknown"]


def test_without_calls_the_system_alone_is_judged() -> None:
    verdict = judge_system([], [])
    assert (verdict.requests, verdict.is_clean) == (0, True)


def test_a_history_that_is_judged_at_its_end_keeps_all(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        for record in good_call():
            history.add(record)
        history.finish("c0")
    assert history.records == good_call()
