"""Interpolation of measured times (planner/profile/tables.py)."""

import pytest

from orca.planner.profile.tables import Grid, Line


@pytest.mark.parametrize(
    ("x", "expected"),
    [(1, 10), (2, 15), (3, 20), (5, 40), (7, 60), (9, 80), (0, 5)],
    ids=["first", "between", "place", "in the second piece", "last", "beyond the last", "before the first"],
)
def test_a_line_is_exact_at_its_places_and_straight_between_and_beyond_them(x: float, expected: float) -> None:
    assert Line((1, 3, 7), (10, 20, 60))(x) == pytest.approx(expected)


def test_a_line_of_one_place_is_constant() -> None:
    line = Line((4,), (7,))
    assert [line(x) for x in (0, 4, 1e6)] == [7, 7, 7]


def test_no_time_is_below_0() -> None:
    falling = Line((0, 10), (10, 5))
    assert falling(30) == 0
    assert Line((0, 1), (-2, -1))(0.5) == 0
    assert Line((1,), (-3,))(1) == 0
    assert Grid((1, 2), (Line((1, 2), (5, 6)), Line((1, 2), (1, 2))))(3, 1) == 0


def test_a_grid_is_bilinear_between_its_corners_and_beyond_them() -> None:
    grid = Grid((1, 3, 5), tuple(Line((10, 30), (2 * x + x * 10, 2 * x + x * 30)) for x in (1, 3, 5)))
    for x in (1, 2, 3, 4.5, 6):
        for y in (5, 10, 20, 30, 50):
            assert grid(x, y) == pytest.approx(2 * x + x * y)


def test_lines_of_a_grid_may_have_different_places() -> None:
    grid = Grid((1, 2), (Line((1, 100), (1, 100)), Line((1, 10), (2, 20))))
    assert grid(2, 100) == pytest.approx(200)
    assert grid(1.5, 50) == pytest.approx(75)


@pytest.mark.parametrize(("at", "values"), [((), ()), ((1, 1), (2, 3)), ((2, 1), (2, 3)), ((1, 2), (3,))])
def test_places_must_rise_with_a_value_each(at: tuple[float, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="places must rise"):
        Line(at, values)
    with pytest.raises(ValueError, match="places must rise"):
        Grid(at, tuple(Line((1,), (value,)) for value in values))
