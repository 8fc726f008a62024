"""Bins and periods of lengths, and what a reader makes of the counts."""

import itertools
import math

import pytest

from orca.core.domain.request import FinishReason
from orca.pool.length_bins import OWN_ENDS, PERIOD_MS, PERIODS_KEPT, age_ms, bin_of, bounds_of, kept_periods, period_of
from orca.pool.records import LengthCounts, PeriodLengths

LONGEST = 2**31 - 1


def test_bins_cover_all_lengths_in_order_and_without_a_gap() -> None:
    bounds = [bounds_of(number) for number in range(bin_of(LONGEST) + 1)]
    assert (bounds[0][0], bounds[-1][1]) == (0, LONGEST)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(bounds))
    for number, (low, high) in enumerate(bounds):
        assert bin_of(low) == bin_of((low + high) // 2) == bin_of(high) == number


def test_short_lengths_have_a_bin_each_and_others_at_most_an_eighth_of_their_length() -> None:
    assert [bounds_of(bin_of(tokens)) for tokens in range(16)] == [(tokens, tokens) for tokens in range(16)]
    for low, high in map(bounds_of, range(16, bin_of(LONGEST) + 1)):
        assert (high - low + 1) * 8 <= low
    assert bin_of(32) - bin_of(16) == bin_of(64) - bin_of(32) == 8


def test_only_the_ends_of_a_generation_itself_are_counted() -> None:
    assert OWN_ENDS == (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("awake_ms", [0, PERIOD_MS - 1, PERIOD_MS, 40 * PERIOD_MS, 40 * PERIOD_MS + 7])
def test_the_kept_periods_cover_four_hours(awake_ms: int) -> None:
    kept = kept_periods(awake_ms)
    assert kept[0] == period_of(awake_ms)
    assert kept[-1] == max(0, kept[0] - PERIODS_KEPT + 1)
    assert kept[-1] * PERIOD_MS <= max(0, awake_ms - 4 * 3_600_000)


def test_the_age_is_that_of_the_middle_of_a_period() -> None:
    middle = 3 * PERIOD_MS + PERIOD_MS // 2
    assert age_ms(3, 3 * PERIOD_MS) == age_ms(3, middle) == 0
    assert age_ms(3, middle + 1234) == 1234


def period(age_s: int, cells: dict[tuple[int, int], int], cut: int = 0) -> PeriodLengths:
    return PeriodLengths(age_ms=age_s * 1000, cells=cells, cut=cut)


def test_an_answer_of_one_half_life_ago_has_half_the_weight() -> None:
    counts = LengthCounts(periods=(period(0, {(1, 2): 4}, cut=1), period(600, {(1, 2): 2, (3, 4): 6}, cut=2)))
    assert (counts.answers, counts.cut_share) == (12, 0.25)
    assert counts.weighed(600) == {(1, 2): 5.0, (3, 4): 3.0}
    assert counts.weighed(math.inf) == {(1, 2): 6.0, (3, 4): 6.0}


def test_without_answers_there_is_nothing_to_weigh() -> None:
    nothing = LengthCounts(periods=())
    assert (nothing.answers, nothing.cut_share, nothing.weighed(1)) == (0, 0.0, {})
