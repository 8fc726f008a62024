"""Deadline-aware scheduling: Algorithms 1 and 2 as the paper writes them, the points that it leaves open, bad input."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.errors import SettingError
from orca.scheduler.policy.das import FilledRow, WaitingRequest, das, open_windows, slotted_das

LATE = 99

Queue = tuple[list[WaitingRequest], list[tuple[int, ...]]]
"""Requests that wait, and rows."""


def a_request(arrival: int, length: int = 1, deadline: int | None = LATE, **changes: Any) -> WaitingRequest:
    """Return a request of the paper: one dimension, and a utility of 1 / length."""
    fields: dict[str, Any] = {"sizes": (length,), "utility": 1 / length} | changes
    return WaitingRequest(arrival=arrival, length=length, deadline=deadline, **fields)


def of_lengths(*lengths: int, deadlines: dict[int, int] | None = None) -> list[WaitingRequest]:
    """Return requests with the arrivals 1, 2 and so on. Args: deadlines: by arrival, where not the latest one."""
    return [a_request(number, length, (deadlines or {}).get(number, LATE)) for number, length in enumerate(lengths, 1)]


def names(requests: Iterable[WaitingRequest]) -> list[int]:
    return [request.arrival for request in requests]


def filled(waiting: Iterable[WaitingRequest], *row: int, **shares: float) -> FilledRow:
    """Return a batch of one row."""
    (found,) = das(waiting, [row], **shares)
    return found


# Figure 8. Its cases differ in the relation of s to |U| + |D|.


def test_figure_8_more_in_u_and_d_than_fit_and_the_most_urgent_of_d_win() -> None:
    # Order 1..8: s = 5, p = 3, mean 1/2. D: 4, 5, 6, 7, 8, which have at least 1/4. |U| + |D| = 8 > s.
    waiting = of_lengths(2, 2, 2, 2, 4, 4, 4, 4, deadlines={7: 1, 8: 2})
    row = filled(waiting, 12)
    assert (row.s, row.p, names(row.utility_set)) == (5, 3, [1, 2, 3])
    # The urgent request 7 displaces 5, which utility alone would take. Request 8 does not fit any more, and 4 does.
    assert names(row.chosen) == [1, 2, 3, 7, 4]


def test_figure_8_as_many_in_u_and_d_as_fit_and_the_row_is_that_of_utility() -> None:
    # Order 1..6: s = 5, p = 3. D: 4 and 5; the utility 1/5 of 6 is below 1/4. |U| + |D| = 5 = s.
    waiting = of_lengths(2, 2, 2, 2, 4, 5, deadlines={6: 1, 5: 2})
    row = filled(waiting, 12)
    assert (row.s, row.p) == (5, 3)
    assert names(row.chosen) == [1, 2, 3, 5, 4]


def test_figure_8_fewer_in_u_and_d_than_fit_and_the_densest_of_the_rest_follow() -> None:
    # Order 1..9: s = 8, p = 4. D: 5 alone. |U| + |D| = 5 < s.
    waiting = of_lengths(2, 2, 2, 2, 2, 5, 6, 7, 8, deadlines={9: 1, 8: 2})
    row = filled(waiting, 30)
    assert (row.s, row.p) == (8, 4)
    assert names(row.chosen) == [1, 2, 3, 4, 5, 6, 7, 8], "the urgent request 9 has too little utility"


# Algorithm 1: the points that the paper leaves open


def test_all_requests_of_a_queue_that_fits_enter_in_the_order_of_the_three_parts() -> None:
    row = filled(of_lengths(9, 3, 1, 2, deadlines={2: 1}), 15)
    assert (row.s, row.p) == (4, 2)
    assert names(row.chosen) == [3, 4, 2, 1]


def test_placed_requests_leave_the_queue_after_each_row() -> None:
    rows = das(of_lengths(*[2] * 7), [(4,), (6,), (2,)])
    assert [names(row.chosen) for row in rows] == [[1, 2], [3, 4, 5], [6]]
    assert [row.s for row in rows] == [2, 3, 1]


def test_s_ends_at_the_first_request_that_does_not_fit() -> None:
    waiting = [a_request(1, 2, sizes=(1, 5)), a_request(2, 3, sizes=(1, 6)), a_request(3, 4, sizes=(1, 1))]
    row = filled(waiting, 3, 10)
    assert row.s == 1
    assert names(row.chosen) == [1, 3]


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_a_prefix_fits_if_it_fits_in_every_dimension(dimension: int) -> None:
    waiting = [a_request(number, sizes=(1, 1, 1)) for number in range(1, 6)]
    row = [9, 9, 9]
    row[dimension] = 3
    found = filled(waiting, *row)
    assert (found.s, found.p, names(found.chosen)) == (3, 2, [1, 2, 3])


@pytest.mark.parametrize(
    ("eta", "s", "p"),
    [
        (0.5, 1, 1),
        (0.5, 4, 2),
        (0.5, 5, 3),
        (0.1, 10, 1),
        (0.1, 11, 2),
        (0.9, 9, 9),
        (0.9, 10, 9),
        (0.01, 1, 1),
        (1e-10, 1, 1),
        # The products of these doubles are above 7 and above 55.
        (0.28, 25, 7),
        (0.55, 100, 55),
    ],
)
def test_u_is_the_share_eta_of_s_rounded_up(eta: float, s: int, p: int) -> None:
    row = filled(of_lengths(*[1] * 200), s, eta=eta, q=1 - eta)
    assert (row.s, row.p) == (s, p)
    assert names(row.utility_set) == list(range(1, p + 1))


def test_every_share_of_whole_percent_is_rounded_up_exactly() -> None:
    waiting = of_lengths(*[1] * 60)
    for percent in range(1, 100):
        for s in range(1, 61):
            p = filled(waiting, s, eta=percent / 100, q=(100 - percent) / 100).p
            assert p == math.ceil(Fraction(percent * s, 100)), (percent, s)


def test_u_is_empty_where_the_densest_request_alone_does_not_fit_and_d_is_all_the_others_then() -> None:
    heavy = a_request(1, 9, utility=1000)
    row = filled([heavy, *of_lengths(1, 4, 3, deadlines={3: 1})[1:]], 5)
    assert (row.s, row.p, row.utility_set) == (0, 0, ())
    assert names(row.chosen) == [3], "the most urgent one, whatever its utility"


def test_a_utility_at_its_bound_is_in_d_although_the_mean_of_doubles_is_above_the_true_mean() -> None:
    # U: three utilities of 0.1, whose sum in doubles is above 0.3. So half of their mean is above 1 / 20.
    assert (0.1 + 0.1 + 0.1) / 3 / 2 > 1 / 20
    row = filled(of_lengths(*[10] * 6, 20, 21, deadlines={7: 1, 8: 0}), 60)
    assert names(row.chosen) == [1, 2, 3, 7, 4], "21 is too long for D, and 20 is not"


@pytest.mark.parametrize(("q", "expected"), [(0.5, [1, 3]), (0.75, [1, 2])])
def test_d_begins_at_the_share_q_of_the_mean_utility_of_u(q: float, expected: list[int]) -> None:
    # For q = 1/2 it begins at 1/4, for q = 3/4 at 3/8.
    waiting = of_lengths(2, 2, 4, deadlines={3: 1})
    assert names(filled(waiting, 6, eta=1 - q, q=q).chosen) == expected


def test_d_begins_at_a_share_of_the_mean_and_not_of_the_best() -> None:
    # U: 1/2 and 1/4. Half of their mean is 3/16, half of the best is 1/4, and request 4 has 1/5.
    row = filled(of_lengths(2, 4, 4, 5, deadlines={4: 1}), 11)
    assert (row.p, names(row.chosen)) == (2, [1, 2, 4])


def test_d_goes_by_deadline_and_then_by_arrival_and_none_is_the_last_deadline() -> None:
    waiting = [
        a_request(1, 1),
        a_request(2, 2, None, utility=1),
        a_request(3, 2, 7, utility=1),
        a_request(4, 3, 5, utility=1),
        a_request(5, 2, 5, utility=1),
        a_request(6, 2, -3, utility=1),
        a_request(7, 3, None, utility=1),
        a_request(8, 40, 0, utility=1),
    ]
    row = filled(waiting, 15, eta=0.1, q=0.9)
    assert names(row.utility_set) == [1]
    assert names(row.chosen) == [1, 6, 4, 5, 3, 2, 7]


def test_a_request_of_d_that_does_not_fit_is_passed_over() -> None:
    row = filled(of_lengths(2, 2, 2, 4, 3, deadlines={4: 1, 5: 2}), 7)
    assert (row.s, row.p) == (3, 2)
    assert names(row.chosen) == [1, 2, 5]


def test_a_request_of_the_rest_that_does_not_fit_is_passed_over() -> None:
    waiting = [a_request(1, 2), a_request(2, 5, sizes=(9,)), a_request(3, 6)]
    assert names(filled(waiting, 8).chosen) == [1, 3]


def test_the_rest_goes_by_density_and_not_by_deadline() -> None:
    row = filled(of_lengths(1, 8, 6, 5, deadlines={2: 1, 3: 2}), 12, eta=0.25, q=0.75)
    assert names(row.chosen) == [1, 4, 3]


def test_a_tie_of_density_goes_by_deadline_and_then_by_arrival() -> None:
    waiting = [
        a_request(1, deadline=None),
        a_request(2, deadline=7),
        a_request(3, deadline=5),
        a_request(4, deadline=5),
    ]
    assert names(filled(waiting, 4, eta=0.9, q=0.1).utility_set) == [3, 4, 2, 1]


def test_a_deadline_is_that_of_the_start() -> None:
    waiting = [
        a_request(1, deadline=10),
        a_request(2, deadline=20, own_time=11),
        a_request(3, own_time=7, deadline=None),
    ]
    assert names(filled(waiting, 3).chosen) == [2, 1, 3]
    assert [request.latest_start for request in waiting] == [10, 9, math.inf]


def test_one_heavy_and_long_request_does_not_keep_out_light_ones() -> None:
    heavy = a_request(1, 100, utility=4)
    light = [a_request(number, 10, utility=1) for number in range(2, 12)]
    row = filled([heavy, *light], 100)
    assert (row.s, names(row.chosen)) == (10, list(range(2, 12)))


def test_a_heavier_request_of_the_same_length_precedes() -> None:
    waiting = [a_request(1, 4, utility=1), a_request(2, 4, utility=2), a_request(3, 4, utility=4)]
    assert names(filled(waiting, 4).chosen) == [3]


def test_an_empty_queue_gives_empty_rows() -> None:
    assert das([], [(5,), (3,)]) == [FilledRow((), p=0, s=0)] * 2


def test_a_row_with_no_room_left_takes_nothing() -> None:
    assert filled(of_lengths(1, 2), 0) == FilledRow((), p=0, s=0)
    assert filled(of_lengths(1, 2), -1) == FilledRow((), p=0, s=0)


def test_a_window_is_open_up_to_the_last_moment_for_a_start() -> None:
    waiting = [a_request(1, deadline=5), a_request(2, deadline=8, own_time=3), a_request(3, deadline=None, own_time=9)]
    assert names(open_windows(waiting, 5)) == [1, 2, 3]
    assert names(open_windows(waiting, 6)) == [3]


# Algorithm 2


def test_algorithm_2_gives_all_rows_slots_of_the_largest_request_of_the_utility_sets() -> None:
    waiting = of_lengths(2, 2, 3, 3, 4, 6, deadlines={5: 1, 3: 2, 4: 3})
    rows = das(waiting, [(10,), (10,)])
    assert [names(row.utility_set) for row in rows] == [[1, 2], [3]]
    assert [names(row.chosen) for row in rows] == [[1, 2, 5], [3, 4]]

    batch = slotted_das(waiting, [10, 10])

    # Slots of 3, 3, 3 and 1. Request 5 has length 4.
    assert batch.z == 3
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[1], [2], [], []], [[3], [4], [], []]]
    assert names(batch.returned) == [5]


def test_algorithm_2_puts_a_request_into_the_first_slot_with_room_for_it() -> None:
    # Order 1, 5, 2, 3, 4: s = 5, p = 3, so z = 2.
    batch = slotted_das(of_lengths(1, 2, 2, 2, 1), [8])
    assert batch.z == 2
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[1, 5], [2], [3], [4]]]
    assert batch.returned == ()


def test_algorithm_2_returns_a_request_for_which_no_slot_has_room() -> None:
    # Slots of 2, 2, 2 and 1.
    batch = slotted_das(of_lengths(1, 2, 2, 2), [7])
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[1], [2], [3], []]]
    assert names(batch.returned) == [4]


def test_algorithm_2_uses_the_end_of_a_row_as_a_smaller_slot() -> None:
    waiting = [a_request(1, 2, utility=4), a_request(2, 2, utility=4), a_request(3, 1, utility=1)]
    batch = slotted_das(waiting, [5])
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[1], [2], [3]]]


def test_algorithm_2_gives_rows_of_other_lengths_slots_of_the_same_size() -> None:
    batch = slotted_das(of_lengths(2, 2, 2, 2, 2), [4, 7, 1])
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[1], [2]], [[3], [4], [5], []], [[]]]


def test_algorithm_2_leaves_rows_whole_where_all_utility_sets_are_empty() -> None:
    heavy = a_request(1, 9, utility=1000)
    batch = slotted_das([heavy, a_request(2, 2), a_request(3, 3)], [5, 4])
    assert (batch.z, batch.returned) == (5, ())
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[2, 3]], [[]]]


def test_algorithm_2_of_an_empty_queue_or_of_rows_without_room_is_empty() -> None:
    assert slotted_das([], [5, 3]).rows == (((),), ((),))
    batch = slotted_das(of_lengths(1), [0])
    assert (batch.rows, batch.returned) == (((),), ())


def test_algorithm_2_has_slots_even_where_the_utility_sets_take_no_room() -> None:
    batch = slotted_das([a_request(1, sizes=(0,)), a_request(2, 9, sizes=(4,))], [5])
    assert [[names(slot) for slot in row] for row in batch.rows] == [[[1, 2]]]


# Bad input


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1.5, math.nan])
@pytest.mark.parametrize("name", ["eta", "q"])
def test_a_share_outside_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"^{name} must be above 0 and below 1, not {value}$"):
        das([], [(1,)], **{name: value})


@pytest.mark.parametrize(("eta", "q"), [(0.5, 0.4), (0.6, 0.5)])
def test_shares_whose_sum_is_not_one_are_refused(eta: float, q: float) -> None:
    with pytest.raises(SettingError, match=rf"^eta \+ q must be 1, not {eta} \+ {q}$"):
        das([], [(1,)], eta=eta, q=q)


def test_all_shares_of_whole_percent_and_what_is_left_of_one_are_accepted() -> None:
    for percent in range(1, 100):
        for q in (1 - percent / 100, (100 - percent) / 100):
            assert das([], [(1,)], eta=percent / 100, q=q)
    assert das([], [(1,)], eta=1 / 3, q=0.66666666667)


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a batch must have at least one row$"):
        das([], [])
    with pytest.raises(ValueError, match=r"^a batch must have at least one row$"):
        slotted_das([], [])


def test_rows_without_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^a row must have at least one dimension$"):
        das([], [()])


def test_rows_of_different_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^all rows must have the same dimensions, not 2 and 1$"):
        das([], [(1, 2), (3,)])


def test_a_request_of_other_dimensions_than_the_rows_is_refused_by_its_arrival() -> None:
    with pytest.raises(ValueError, match=r"^request 4: 1 sizes, but a row has 2 dimensions$"):
        das([a_request(4)], [(1, 2)])
    with pytest.raises(ValueError, match=r"^request 4: 2 sizes, but a row has 1 dimensions$"):
        slotted_das([a_request(4, sizes=(1, 1))], [3])


def test_two_requests_with_one_arrival_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^two requests have the arrival 2$"):
        das([a_request(1), a_request(2, 5), a_request(2, 6)], [(9,)])


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("name", ["utility", "length"])
def test_a_utility_or_length_that_is_not_above_zero_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^request 3: {name} must be above 0 and finite, not {value}$"):
        replace(a_request(3), **dict[str, Any]({name: value}))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^request 3: a size must be at least 0, not -2$"):
        a_request(3, sizes=(4, -2))


def test_a_negative_own_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^request 3: own_time must be at least 0, not -1$"):
        a_request(3, own_time=-1)


# Properties


@st.composite
def queues(draw: st.DrawFn, dimensions: int | None = None) -> Queue:
    """Return requests of random weights, some without a deadline, and rows."""
    dimensions = dimensions or draw(st.integers(1, 3))
    waiting = []
    for arrival in draw(st.lists(st.integers(1, 99), unique=True, max_size=12)):
        length = draw(st.integers(1, 12))
        weight = 2.0 ** draw(st.sampled_from([0, 0, 0, 1, 8, -8]))
        sizes = (length, *draw(st.tuples(*[st.integers(0, 6)] * (dimensions - 1))))
        utility = weight * draw(st.sampled_from([1, 1 / length]))
        deadline = draw(st.none() | st.integers(0, 9))
        waiting.append(
            a_request(arrival, length, deadline, sizes=sizes, utility=utility, own_time=draw(st.integers(0, 9)))
        )
    rows = draw(st.lists(st.tuples(*[st.integers(0, 30)] * dimensions), min_size=1, max_size=3))
    return waiting, rows


percents = st.integers(1, 99)


def shares(percent: int) -> dict[str, float]:
    return {"eta": percent / 100, "q": (100 - percent) / 100}


@given(queues(), percents)
def test_no_request_is_placed_twice_and_every_row_holds(queue: Queue, percent: int) -> None:
    waiting, rows = queue
    found = das(waiting, rows, **shares(percent))
    placed = [request for row in found for request in row.chosen]
    assert len(set(names(placed))) == len(placed)
    assert set(placed) <= set(waiting)
    for row, room in zip(found, rows, strict=True):
        for dimension, most in enumerate(room):
            assert sum(request.sizes[dimension] for request in row.chosen) <= most


@given(queues(), percents, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(queue: Queue, percent: int, chance: Random) -> None:
    waiting, rows = queue
    shuffled = chance.sample(waiting, len(waiting))
    assert das(shuffled, rows, **shares(percent)) == das(waiting, rows, **shares(percent))


@given(queues(), percents)
def test_a_request_that_is_left_out_fits_into_no_row(queue: Queue, percent: int) -> None:
    waiting, rows = queue
    found = das(waiting, rows, **shares(percent))
    left_out = set(waiting) - {request for row in found for request in row.chosen}
    for row, room in zip(found, rows, strict=True):
        for request in left_out:
            assert not fits([*row.chosen, request], room)


@given(queues(), percents)
def test_the_rows_are_those_of_algorithm_1_in_exact_fractions(queue: Queue, percent: int) -> None:
    waiting, rows = queue
    found = das(waiting, rows, **shares(percent))
    assert [row.chosen for row in found] == literally(waiting, rows, Fraction(percent, 100))


@given(queues(dimensions=1), percents)
def test_a_slotted_batch_is_that_of_das_in_slots_that_hold(queue: Queue, percent: int) -> None:
    waiting, rows = queue
    lengths = [length for (length,) in rows]
    batch = slotted_das(waiting, lengths, **shares(percent))
    found = das(waiting, rows, **shares(percent))
    in_slots = [request for row in batch.rows for slot in row for request in slot]
    assert sorted(names([*in_slots, *batch.returned])) == sorted(names(n for row in found for n in row.chosen))
    for slots, length in zip(batch.rows, lengths, strict=True):
        sizes = [batch.z] * (length // batch.z) + [length % batch.z] * (length % batch.z > 0)
        used = [sum(request.sizes[0] for request in slot) for slot in slots]
        assert len(used) == len(sizes)
        assert all(taken <= size for taken, size in zip(used, sizes, strict=True))
    assert all(request.sizes[0] <= batch.z for row in found for request in row.utility_set)


def literally(
    waiting: Sequence[WaitingRequest], rows: Sequence[tuple[int, ...]], eta: Fraction
) -> list[tuple[WaitingRequest, ...]]:
    """Return the rows of Algorithm 1, line by line. Utilities are those without rounding: 1 / length times a weight."""
    left, result = set(waiting), []
    for row in rows:
        ordered = sorted(left, key=lambda n: (-exact(n) / Fraction(n.length), n.latest_start, n.arrival))
        s = max(count for count in range(len(ordered) + 1) if fits(ordered[:count], row))
        p = math.ceil(eta * s)
        mean = sum(map(exact, ordered[:p])) / Fraction(p) if p else Fraction(0)
        chosen = ordered[:p]
        in_d = [n for n in ordered[p:] if exact(n) >= (1 - eta) * mean]
        for n in sorted(in_d, key=lambda n: (n.latest_start, n.arrival)):
            if fits([*chosen, n], row):
                chosen.append(n)
        for n in ordered[p:]:
            if n not in in_d and fits([*chosen, n], row):
                chosen.append(n)
        if fits(ordered, row):
            assert set(chosen) == left, "lines 4 to 6"
        left -= set(chosen)
        result.append(tuple(chosen))
    return result


def exact(request: WaitingRequest) -> Fraction:
    """Return the utility that its double stands for: a power of two, or that divided by a length up to 12."""
    return Fraction(request.utility).limit_denominator(12 * 2**8)


def fits(requests: Sequence[WaitingRequest], row: tuple[int, ...]) -> bool:
    return all(sum(request.sizes[dimension] for request in requests) <= most for dimension, most in enumerate(row))
