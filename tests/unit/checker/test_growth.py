"""Growth counts by the slopes of steady samples, per role, against a bound."""

from itertools import count

import pytest

from checker.history.records import Sample
from checker.rules.evidence import Evidence
from checker.rules.growth import MIB, does_not_grow, growth_table, measure_growth, slope


def life(
    *values: float,
    part: str = "gateway",
    pid: int = 7,
    what: str = "rss_bytes",
    every_s: float = 60.0,
    start: float = 0.0,
) -> list[Sample]:
    times = count(start, every_s)
    return [Sample(at=next(times), part=part, pid=pid, is_steady=True, held={what: value}) for value in values]


def test_the_slope_is_the_median_of_pairs_and_ignores_outliers() -> None:
    points = [(float(x), 3.0 * x) for x in range(30)]
    points[7], points[20] = (7.0, 900.0), (20.0, -900.0)
    assert slope(points) == pytest.approx(3.0)


def test_many_samples_are_thinned_out_with_the_same_slope() -> None:
    assert slope([(x / 10, float(x)) for x in range(5000)]) == pytest.approx(10.0)


def test_a_process_that_grows_steadily_past_both_bounds_is_a_leak() -> None:
    samples = life(*(100 * MIB + minute * MIB for minute in range(30)))
    [found] = does_not_grow(Evidence(samples=samples, least_life_s=600))
    assert (found.rule, found.harm.value) == ("does_not_grow", "leaked")
    assert found.expected.startswith("gateway rss_bytes")
    assert "LEAK" in growth_table(measure_growth(samples, least_life_s=600))


def test_steep_noise_of_a_short_process_is_no_leak() -> None:
    samples = life(*(100 * MIB + step * MIB / 4 for step in range(12)), every_s=5)
    [growth] = measure_growth(samples, least_life_s=50)
    assert growth.per_hour > 100 * MIB
    assert not growth.is_leak


def test_slow_growth_over_days_is_no_leak() -> None:
    [growth] = measure_growth(life(*(hour * MIB for hour in range(40)), every_s=3600), least_life_s=600)
    assert growth.grown == pytest.approx(39 * MIB)
    assert not growth.is_leak


def test_a_roles_growth_is_the_median_of_its_processes() -> None:
    flat, also = life(*[5.0] * 12, pid=1, what="threads"), life(*[6.0] * 12, pid=2, what="threads", start=9000)
    steep = life(*map(float, range(12)), pid=3, what="threads", start=18_000)
    [growth] = measure_growth([*flat, *also, *steep], least_life_s=600)
    assert (growth.lives, growth.per_hour) == (3, 0.0)


def test_short_processes_and_unsteady_samples_are_ignored() -> None:
    restless = [Sample(at=s.at, part=s.part, pid=s.pid, is_steady=False, held=s.held) for s in life(*[1e9] * 30)]
    assert measure_growth([*restless, *life(*[1.0] * 12, pid=9)], least_life_s=1000) == []
    assert "no process lived long enough" in growth_table([])
