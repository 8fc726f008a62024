"""Spaces in which larger values bring less throughput, against exhaustive search."""

import math
from random import Random

import pytest

from orca.bench.plan.random_functions import SPACES, a_bound, every_point, exhaustive, random_costs
from orca.planner.search.branch_and_bound import Perform, Performance, Point, SearchBlock, Tolerance, search
from orca.planner.search.soundings import divided, sounded_search

TOLERANCE = 0.02
LARGE = (SearchBlock((1,), (1024,)), SearchBlock((1, -79), (128, -1)))


def with_a_peak(seed: int, space: SearchBlock) -> Perform:
    """Return costs whose throughput rises to a peak in the first variable, and falls from there on."""
    numbers = Random(seed)
    low, high = space.lower[0], space.upper[0]
    peak = low + (high - low + 1) ** numbers.uniform(0.2, 0.8)
    fall = numbers.uniform(0.1, 0.6)

    def perform(point: Point) -> Performance:
        size, others = point[0], 1 + sum((at - low) / 1000 for at, low in zip(point[1:], space.lower[1:], strict=True))
        of_size = size / (4 + size) if size <= peak else peak / (4 + peak) * (peak / size) ** fall
        throughput = of_size * others
        return Performance(size / throughput, throughput)

    return perform


@pytest.mark.parametrize("space", LARGE, ids=["1024", "128x79"])
@pytest.mark.parametrize("seed", range(10))
def test_a_peak_is_found_under_any_bound(space: SearchBlock, seed: int) -> None:
    perform = with_a_peak(seed, space)
    latencies = sorted(perform(point).latency for point in every_point(space))
    for bound in (latencies[len(latencies) // 10], latencies[len(latencies) // 2], math.inf):
        found = sounded_search(space, perform, latency_bound=bound, tolerance=Tolerance(throughput=TOLERANCE))
        assert found.best is not None
        assert perform(found.best).latency <= bound
        assert perform(found.best).throughput >= (1 - TOLERANCE) * exhaustive(space, perform, bound)
        assert len(found.evaluated) <= 0.05 * space.points


@pytest.mark.parametrize("space", LARGE, ids=["1024", "128x79"])
@pytest.mark.parametrize("seed", range(5))
def test_points_that_cannot_run_are_no_answer_where_there_is_no_bound(space: SearchBlock, seed: int) -> None:
    of_peak, fitting = with_a_peak(seed, space), (space.lower[0] + space.upper[0]) // 3

    def perform(point: Point) -> Performance:
        found = of_peak(point)
        return found if point[0] <= fitting else Performance(math.inf, found.throughput)

    found = sounded_search(space, perform, latency_bound=math.inf, tolerance=Tolerance(throughput=TOLERANCE))
    assert found.best is not None
    assert perform(found.best).latency < math.inf
    assert all(perform(point).latency < math.inf for point in found.ranking(math.inf))


@pytest.mark.parametrize("space", [*SPACES, *LARGE])
def test_blocks_hold_each_point_once(space: SearchBlock) -> None:
    blocks = divided(space, lambda point: -float(sum(point)), tolerance=0.0)
    held = [point for block in blocks for point in every_point(block)]
    assert sorted(held) == sorted(every_point(space))
    assert len(held) == len(set(held))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("space", SPACES)
def test_a_monotone_space_stays_whole_and_costs_few_points(space: SearchBlock, seed: int) -> None:
    perform, asked = random_costs(seed, space), []

    def throughput(point: Point) -> float:
        asked.append(point)
        return perform(point).throughput

    assert divided(space, throughput, tolerance=TOLERANCE) == [space]
    assert len(asked) <= 1 + (len(space.sides) + 1) * 7
    bound = a_bound(seed, space, perform)
    found = sounded_search(space, perform, latency_bound=bound, tolerance=Tolerance())
    assert found.best == search(space, perform, latency_bound=bound).best
