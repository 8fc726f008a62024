"""The least latency at nearly all of a throughput, against exhaustive search."""

import math
from random import Random

import pytest

from orca.bench.plan.random_functions import SPACES, every_point, random_costs
from orca.planner.search.branch_and_bound import Perform, Performance, Point, SearchBlock
from orca.planner.search.least_latency import (
    NEGLIGIBLE_SHARE,
    SPARED_SHARE,
    STEP_SHARE,
    WORTH_SHARE,
    least_latency,
    preferred,
)


def saturating(seed: int, space: SearchBlock, *, noise: float = 0.0) -> Perform:
    """Return random costs whose throughput hardly rises in the upper part of the space."""
    costs = random_costs(seed, space, noise=noise)
    most = 0.3 + 1.1 * len(space.sides)

    def perform(point: Point) -> Performance:
        found = costs(point)
        return Performance(found.latency, 1 - math.exp(-12 * found.throughput / most))

    return perform


def a_best_point(seed: int, space: SearchBlock) -> Point:
    """Return the upper corner, or for some seeds a point anywhere: the best one under a bound."""
    numbers = Random(seed)
    if numbers.random() < 0.5:
        return space.upper
    return tuple(numbers.randint(low, high) for low, high in zip(space.lower, space.upper, strict=True))


@pytest.mark.parametrize("space", SPACES, ids=lambda space: "x".join(str(side + 1) for side in space.sides))
def test_no_other_point_with_the_throughput_has_much_less_latency(space: SearchBlock) -> None:
    saved = 0
    for seed in range(60):
        perform, best = saturating(seed, space), a_best_point(seed, space)
        wanted = (1 - SPARED_SHARE) * perform(best).throughput
        found = least_latency(space.lower, best, perform, throughput=wanted)
        least = min(
            perform(point).latency
            for point in every_point(SearchBlock(space.lower, best))
            if perform(point).throughput >= wanted
        )
        worth = (1 - WORTH_SHARE) * perform(best).latency
        if found is None:
            assert least >= worth * (1 - NEGLIGIBLE_SHARE)
            continue
        saved += 1
        assert perform(found).throughput >= wanted * (1 - 1e-12)
        assert perform(found).latency <= worth
        assert perform(found).latency * (1 - NEGLIGIBLE_SHARE) <= least * (1 + 1e-12)
    assert saved > 20


@pytest.mark.parametrize("space", SPACES, ids=lambda space: "x".join(str(side + 1) for side in space.sides))
def test_costs_that_are_not_monotone_lead_to_no_point_that_is_not_allowed(space: SearchBlock) -> None:
    for seed in range(60):
        perform, best = saturating(seed, space, noise=0.05), a_best_point(seed, space)
        bound = perform(best).latency

        def allowed(point: Point, perform: Perform = perform, bound: float = bound) -> Performance:
            figures = perform(point)
            return figures if figures.latency <= bound else Performance(math.inf, figures.throughput)

        wanted = (1 - SPARED_SHARE) * perform(best).throughput
        found = least_latency(space.lower, best, allowed, throughput=wanted)
        if found is not None:
            assert all(low <= at <= high for low, at, high in zip(space.lower, found, best, strict=True))
            assert perform(found).throughput >= wanted * (1 - 1e-12)
            assert perform(found).latency <= (1 - WORTH_SHARE) * bound


def test_few_points_are_evaluated() -> None:
    points: set[Point] = set()

    def perform(point: Point) -> Performance:
        points.add(point)
        batch, often = point[0], 1 + point[1] / 4
        return Performance(
            latency=(2 + 0.1 * batch) * often, throughput=batch / (2 + 0.1 * batch) * often / (1 + often)
        )

    best = (1024, 512)
    wanted = (1 - SPARED_SHARE) * perform(best).throughput
    found = least_latency((1, 1), best, perform, throughput=wanted)
    assert found is not None
    assert perform(found).latency < 0.5 * perform(best).latency
    assert len(points) <= 400


def test_a_tight_bound_keeps_its_best_point() -> None:
    """Latency and throughput rise alike, so one percent of the one is worth one percent of the other."""
    assert least_latency((1,), (500,), lambda point: Performance(point[0], point[0]), throughput=495.0) is None


def test_a_single_point_is_kept() -> None:
    assert least_latency((3, 4), (3, 4), lambda point: Performance(2.0, 5.0), throughput=4.9) is None  # noqa: ARG005


def test_the_item_with_the_least_latency_is_preferred_if_it_has_nearly_all_of_the_throughput() -> None:
    def choose(*items: tuple[float, float]) -> tuple[float, float]:
        return preferred(items, lambda item: item[0], lambda item: item[1])

    assert choose((100.0, 9.0), (99.8, 5.0), (99.5, 4.0), (99.4, 1.0)) == (99.5, 4.0)
    # Less than a tenth of the latency is not worth it.
    assert choose((100.0, 9.0), (99.8, 8.5)) == (100.0, 9.0)
    assert choose((100.0, 9.0)) == (100.0, 9.0)


def test_both_steps_together_give_up_at_most_the_spared_share() -> None:
    assert (1 - STEP_SHARE) ** 2 >= 1 - SPARED_SHARE
