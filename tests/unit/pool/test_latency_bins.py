"""Bins of latencies, the spans that they measure, and what a reader makes of the counts."""

import itertools
import math

import pytest

from orca.pool.latency_bins import LATENCIES, LATENCY_MAX_US, AnswerLatency, bin_of, bounds_of, latencies_us, middle_s
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies, counts_from_json, counts_to_json
from orca.pool.length_bins import PERIOD_MS


def test_bins_cover_all_latencies_in_order_and_without_a_gap() -> None:
    bounds = [bounds_of(number) for number in range(bin_of(LATENCY_MAX_US) + 1)]
    assert (len(bounds), bounds[0][0], bounds[-1][1]) == (1024, 0, LATENCY_MAX_US)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(bounds))


def test_the_middle_of_a_bin_is_within_a_64th_of_its_latencies() -> None:
    for number in range(bin_of(64), 1024):
        for latency_us in bounds_of(number):
            assert abs(1e6 * middle_s(number) - latency_us) <= latency_us / 64


def test_a_latency_out_of_range_has_the_first_or_the_last_bin() -> None:
    assert (bin_of(-5), bin_of(0.9), bin_of(2.0**50)) == (0, 0, 1023)


def spans(**changes: int | None) -> dict[AnswerLatency, float]:
    times: dict[str, int | None] = {"submitted_ms": 0, "first_step_ms": 10, "first_token_ms": 25, "ended_ms": 125}
    return latencies_us(**{"tokens": 11, **times, **changes})  # type: ignore[arg-type]


def test_each_latency_has_its_span() -> None:
    assert spans() == {
        AnswerLatency.SEQUENCE: 115_000,
        AnswerLatency.REQUEST: 125_000,
        AnswerLatency.FIRST_TOKEN: 15_000,
        AnswerLatency.REQUEST_FIRST_TOKEN: 25_000,
        AnswerLatency.TOKEN: 10_000,
    }


def test_a_time_that_is_missing_leaves_its_latencies_out() -> None:
    assert spans(first_token_ms=None, tokens=0).keys() == {AnswerLatency.SEQUENCE, AnswerLatency.REQUEST}
    assert spans(tokens=1).keys() == set(LATENCIES) - {AnswerLatency.TOKEN}
    assert spans(first_step_ms=None).keys() == set(LATENCIES) - {AnswerLatency.SEQUENCE, AnswerLatency.FIRST_TOKEN}


def period(number: int, seconds: dict[float, int], *, first_ms: int | None = None) -> PeriodLatencies:
    """Return a period whose answers took so long."""
    bins = {bin_of(1e6 * each): count for each, count in seconds.items()}
    begins_ms = number * PERIOD_MS
    return PeriodLatencies(
        period=number, first_ms=begins_ms if first_ms is None else first_ms, bins=dict.fromkeys(LATENCIES, bins)
    )


def counts(*periods: PeriodLatencies, awake_ms: int) -> LatencyCounts:
    return LatencyCounts(awake_ms=awake_ms, periods=periods)


def test_a_percentile_is_the_latency_that_so_many_answers_stay_within() -> None:
    found = counts(period(0, {1.0: 98, 5.0: 1, 9.0: 1}), awake_ms=0)
    for percent, expected in ((1, 1.0), (50, 1.0), (98, 1.0), (99, 5.0), (100, 9.0)):
        assert found.percentile_s(AnswerLatency.SEQUENCE, percent) == pytest.approx(expected, rel=1 / 64)


def test_an_answer_of_one_half_life_ago_has_half_the_weight() -> None:
    newest_middle_ms = 3 * PERIOD_MS + PERIOD_MS // 2
    found = counts(period(3, {1.0: 10}), period(2, {2.0: 15}), awake_ms=newest_middle_ms)
    assert found.percentile_s(AnswerLatency.TOKEN, 50) == pytest.approx(2.0, rel=1 / 64)
    assert found.percentile_s(AnswerLatency.TOKEN, 50, half_life_s=PERIOD_MS / 1000) == pytest.approx(1.0, rel=1 / 64)


def test_answers_before_a_change_have_no_part() -> None:
    found = counts(period(3, {1.0: 1}), period(2, {7.0: 5}), awake_ms=4 * PERIOD_MS - 1)
    assert found.since(2 * PERIOD_MS).answers == 6
    assert found.since(2 * PERIOD_MS + 1).answers == 1
    assert found.since(2 * PERIOD_MS + 1).percentile_s(AnswerLatency.REQUEST, 99) == pytest.approx(1.0, rel=1 / 64)


def test_a_reading_has_only_the_answers_after_an_earlier_one() -> None:
    earlier = counts(period(3, {1.0: 4, 2.0: 1}), period(2, {7.0: 5}), awake_ms=3 * PERIOD_MS + 100_000)
    later = counts(
        period(4, {3.0: 2}), period(3, {1.0: 10, 2.0: 1}), period(2, {7.0: 5}), awake_ms=4 * PERIOD_MS + 100_000
    )
    found = later.after(earlier)
    assert [each.answers for each in found.periods] == [2, 6]
    assert found.percentile_s(AnswerLatency.REQUEST, 70) == pytest.approx(1.0, rel=1 / 64)
    assert found.percentile_s(AnswerLatency.REQUEST, 99) == pytest.approx(3.0, rel=1 / 64)
    assert found.per_s() == pytest.approx(8 / (PERIOD_MS / 1000)), "time before the earlier reading does not count"
    assert later.after(earlier.of_running_period()) == found
    assert earlier.after(earlier).answers == 0


def test_a_pool_that_was_emptied_has_only_answers_after_an_earlier_reading() -> None:
    earlier = counts(period(3, {1.0: 4}), awake_ms=3 * PERIOD_MS + 100_000)
    emptied = counts(period(0, {2.0: 3}), awake_ms=200_000)
    assert emptied.after(earlier) == emptied


def test_a_reading_is_kept_as_json() -> None:
    reading = counts(period(3, {1.0: 4, 2.0: 1}), awake_ms=3 * PERIOD_MS + 100_000)
    assert counts_from_json(counts_to_json(reading)) == reading
    too_many = counts_to_json(reading).replace(":4,", f":{2**53 + 1},")
    for broken in (
        too_many,
        counts_to_json(reading).replace('"', '"9', 1),
        "",
        "[]",
        "{}",
        '{"awake_ms": 1, "periods": [{"period": 1}]}',
        '{"awake_ms": "x", "periods": []}',
    ):
        with pytest.raises(ValueError, match=r"."):
            counts_from_json(broken)


def test_without_answers_there_is_no_percentile_and_no_throughput() -> None:
    nothing = counts(awake_ms=PERIOD_MS)
    assert (nothing.answers, nothing.percentile_s(AnswerLatency.SEQUENCE, 99), nothing.per_s()) == (0, None, 0.0)
    only_aged = counts(period(0, {1.0: 5}), awake_ms=1000 * PERIOD_MS)
    assert only_aged.percentile_s(AnswerLatency.SEQUENCE, 99, half_life_s=1) is None, "a weight of 0 is no answer"


def test_throughput_is_that_of_the_newest_periods() -> None:
    window = counts(period(9, {1.0: 300}), period(8, {1.0: 900}), period(3, {1.0: 7}), awake_ms=9 * PERIOD_MS + 400_000)
    assert window.per_s() == pytest.approx(1200 / 1000)
    assert window.per_s(PERIOD_MS) == pytest.approx(300 / 400)
    assert window.per_s(math.ceil(1.5 * PERIOD_MS)) == window.per_s()


def test_time_without_answers_counts_but_for_that_before_the_first_one() -> None:
    assert counts(period(3, {1.0: 5}), awake_ms=9 * PERIOD_MS).per_s() == 0.0
    quiet = counts(period(8, {1.0: 900}), period(7, {1.0: 1}), awake_ms=9 * PERIOD_MS + 300_000)
    assert quiet.per_s() == pytest.approx(1.0)
    started = counts(period(9, {1.0: 50}, first_ms=9 * PERIOD_MS + 100_000), awake_ms=9 * PERIOD_MS + 200_000)
    assert started.per_s() == pytest.approx(0.5)
