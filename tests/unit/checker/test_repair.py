"""The time for which a fault kept clients waiting."""

import pytest

from checker.history.records import Event, Fault, GroupNews, Record
from checker.rules.repairs import measure_repairs, repair_table


def token(at: float, call: str = "c0") -> Event:
    return Event(at=at, call=call, connection=0, id="0.1", data="{}")


def fault(at: float, *in_flight: str, number: int = 0) -> Fault:
    return Fault(at=at, number=number, kind="kill", targets=("rank-0.1.0",), pids=(1,), in_flight=in_flight)


def news(at: float, what: str) -> GroupNews:
    return GroupNews(at=at, group="scheduler-0", what=what, epoch=2)


def test_repair_time_is_split_by_scheduler_events_and_tokens_in_flight_do_not_count() -> None:
    history: list[Record] = [fault(10.0, "c0"), token(10.01), news(10.5, "over"), news(12.0, "formed"), token(12.3)]
    [repair] = measure_repairs(history)
    assert (repair.detect_s, repair.reform_s) == (0.5, 1.5)
    assert repair.recompute_s == pytest.approx(0.3)
    assert repair.total_s == pytest.approx(2.3)


def test_a_death_is_detected_when_it_is_logged_and_a_pool_outage_ends_with_it() -> None:
    history: list[Record] = [
        fault(10.0, "c0"),
        news(10.1, "death"),
        news(10.4, "away"),
        news(11.0, "back"),
        token(11.2),
    ]
    [repair] = measure_repairs(history)
    assert (repair.detect_s, repair.reform_s) == (pytest.approx(0.1), pytest.approx(0.9))
    assert repair.recompute_s == pytest.approx(0.2)


def test_an_undetected_fault_has_only_a_total() -> None:
    [repair] = measure_repairs([fault(10.0, "c0"), token(10.2)])
    assert (repair.total_s, repair.detect_s) == (pytest.approx(0.2), None)


def test_tokens_in_flight_do_not_end_an_undetected_silence() -> None:
    [repair] = measure_repairs([fault(10.0, "c0"), token(10.01), token(12.0), token(12.1)])
    assert repair.total_s == pytest.approx(2.0)


def test_events_after_the_next_fault_are_not_part_of_this_repair() -> None:
    first, _ = measure_repairs([fault(10.0, "c0"), fault(11.0, "c0", number=1), token(12.0)])
    assert first.total_s is None


def test_the_worst_of_the_affected_streams_counts_and_others_do_not() -> None:
    noticed: list[Record] = [news(10.05, "over"), news(10.06, "formed")]
    [repair] = measure_repairs([fault(10.0, "c0", "c1"), *noticed, token(10.2), token(10.1, "c2"), token(14.0, "c1")])
    assert (repair.affected, repair.total_s, repair.worst_s) == (2, pytest.approx(0.2), 4.0)


def test_news_after_the_next_fault_belong_to_that_fault() -> None:
    history: list[Record] = [fault(10.0, "c0"), fault(11.0, "c0", number=1), news(11.5, "seat"), news(12.0, "formed")]
    first, second = measure_repairs(history)
    assert (first.detect_s, second.detect_s) == (None, 0.5)
    assert second.total_s is None


def test_the_table_has_a_line_per_kind_of_fault() -> None:
    lines = repair_table(measure_repairs([fault(10.0, "c0"), token(10.2)])).splitlines()
    assert lines[-1].split() == ["kill", "rank", "1", "0.20", "(0.20)", "-", "-", "-", "0.2"]
