"""Branch and bound (ExeGPT, Algorithm 1 and Figure 5), against exhaustive search."""

import math
from random import Random

import pytest

from orca.bench.plan.random_functions import SPACES, a_bound, exhaustive, random_costs
from orca.planner.search.branch_and_bound import Found, Perform, Performance, Point, SearchBlock, Tolerance, search


def always(latency: float, throughput: float) -> Perform:
    return lambda point: Performance(latency, throughput)  # noqa: ARG005 - the shape of the function


def check_found(found: Found, space: SearchBlock, perform: Perform, bound: float, *, tolerance: float) -> None:
    best = exhaustive(space, perform, bound)
    assert (found.best is None) == (best == -math.inf)
    if found.best is not None:
        figures = perform(found.best)
        assert figures.latency <= bound, "the point breaks the bound"
        assert figures.throughput >= best * (1 - tolerance) - 1e-12


@pytest.mark.parametrize("space", SPACES, ids=lambda space: "x".join(str(side + 1) for side in space.sides))
@pytest.mark.parametrize("noise", [0.0, 0.02], ids=["monotone", "nearly-monotone"])
def test_as_good_as_exhaustive_search(space: SearchBlock, noise: float) -> None:
    # Two neighbours may be off in opposite directions.
    tolerance = 2 * noise / (1 - noise)
    for seed in range(125):
        perform = random_costs(seed, space, noise=noise)
        bound = a_bound(seed, space, perform)
        allowed = Tolerance(throughput=tolerance, latency=tolerance)
        found = search(space, perform, latency_bound=bound, tolerance=allowed)
        check_found(found, space, perform, bound, tolerance=tolerance)


def test_latencies_in_whole_steps_that_end_at_the_bound() -> None:
    """Many points have just the latency of the bound."""
    space = SearchBlock((0, 0), (6, 6))
    for seed in range(60):
        numbers = Random(seed)
        steps = [sorted(numbers.choices(range(4), k=7)) for _ in range(2)]
        weights = numbers.random(), numbers.random()

        def perform(
            point: Point, steps: list[list[int]] = steps, weights: tuple[float, float] = weights
        ) -> Performance:
            latency = float(sum(step[at] for step, at in zip(steps, point, strict=True)))
            return Performance(latency, 1 + sum(weight * at for weight, at in zip(weights, point, strict=True)))

        bound = float(numbers.randint(0, 6))
        check_found(search(space, perform, latency_bound=bound), space, perform, bound, tolerance=0.0)


def test_few_points_of_a_large_space_are_evaluated() -> None:
    space = SearchBlock((1, 1), (256, 128))
    shares = []
    for seed in range(4):
        perform = random_costs(seed, space)
        bound = a_bound(seed, space, perform)
        found = search(space, perform, latency_bound=bound)
        check_found(found, space, perform, bound, tolerance=0.0)
        shares.append(len(found.evaluated) / space.points)
    assert max(shares) <= 0.05


def test_the_top_right_corner_is_the_answer_if_it_meets_the_bound() -> None:
    calls: list[Point] = []

    def perform(point: Point) -> Performance:
        calls.append(point)
        return Performance(latency=float(sum(point)), throughput=float(sum(point)))

    assert search(SearchBlock((1, 1), (50, 70)), perform, latency_bound=120.0).best == (50, 70)
    assert calls == [(50, 70)]


def test_without_a_bound_the_top_right_corner_is_the_answer() -> None:
    found = search(
        SearchBlock((1, 1), (9, 9)), lambda point: Performance(sum(point), sum(point)), latency_bound=math.inf
    )
    assert found.best == (9, 9)
    assert len(found.evaluated) == 1


def test_a_point_that_breaks_the_bound_is_never_the_best() -> None:
    found = search(SearchBlock((1, 1), (30, 30)), lambda point: Performance(1 + sum(point), 1.0), latency_bound=2.0)
    assert found.best is None
    assert found.ranking(2.0) == []


def test_a_point_that_cannot_run_is_never_the_best() -> None:
    found = search(SearchBlock((1,), (8,)), always(math.inf, 9.0), latency_bound=math.inf)
    assert found.best is None


def test_a_single_point() -> None:
    found = search(SearchBlock((4, 2), (4, 2)), always(3.0, 5.0), latency_bound=3.0)
    assert found.best == (4, 2)
    assert search(SearchBlock((4, 2), (4, 2)), always(3.0, 5.0), latency_bound=2.9).best is None


def test_all_points_are_equal() -> None:
    found = search(SearchBlock((1, 1), (100, 100)), always(1.0, 1.0), latency_bound=1.0)
    assert found.best == (100, 100)


def test_a_floor_drops_what_another_search_has_beaten() -> None:
    calls: list[Point] = []

    def perform(point: Point) -> Performance:
        calls.append(point)
        return Performance(float(sum(point)), float(sum(point)))

    found = search(SearchBlock((1, 1), (50, 50)), perform, latency_bound=40.0, throughput_floor=101.0)
    assert found.best is None
    assert calls == [(50, 50)]


def test_the_ranking_names_all_that_meet_the_bound() -> None:
    space = SearchBlock((1, 1), (12, 9))
    perform = random_costs(3, space)
    bound = a_bound(1, space, perform)
    found = search(space, perform, latency_bound=bound)
    ranking = found.ranking(bound)
    assert ranking[0] == found.best
    throughputs = [perform(point).throughput for point in ranking]
    assert throughputs == sorted(throughputs, reverse=True)
    assert all(perform(point).latency <= bound for point in ranking)


def test_figure_5() -> None:
    """The steps of Figure 5 on one space: select, split vertically or horizontally, update T*, prune."""
    space = SearchBlock((1, 1), (8, 8))
    log: list[Point] = []

    def perform(point: Point) -> Performance:
        """Latency depends on the sum. Throughput gains more from the second variable."""
        log.append(point)
        return Performance(latency=float(sum(point)), throughput=float(point[0] + 2 * point[1]))

    found = search(space, perform, latency_bound=10.0, tolerance=Tolerance(throughput=0.01))

    # The top right corner breaks the bound (16 > 10), the bottom left one meets it: the block is worth splitting.
    assert log[:2] == [(8, 8), (1, 1)]
    # Select B0: its top left corner (1, 8) and its bottom right one (8, 1) both meet the bound.
    assert log[2:4] == [(1, 8), (8, 1)]
    # The top left one has more throughput (17 > 10), so B0 is split vertically. The halves are [1..4] and [5..8] in the
    # first variable. Their upper corners are new, and the lower one of the second half. That one has a latency of 6.
    assert log[4:6] == [(4, 8), (5, 1)]
    # Update: T* = 17 at (1, 8). Neither upper corner meets the bound (12 and 16), so both halves are queued.
    # Select the half with the higher lower bound: [5..8] x [1..8], with a throughput of 7 at (5, 1).
    # Its top left corner (5, 8) breaks the bound, its bottom right one (8, 1) meets it: it is split horizontally.
    assert log[6:8] == [(5, 8), (8, 4)]
    # The lower half has its upper corner (8, 4) at a throughput of 16: pruned, as 16 + 0.17 < 17. The upper half begins
    # at (5, 5), whose latency is just 10: it may hold more points that meet the bound.
    assert log[8] == (5, 5)
    assert found.best == (2, 8)
    assert found.evaluated[(2, 8)] == Performance(10.0, 18.0)
    # Of 64 points, few were evaluated, and no block below T* was split again.
    assert len(found.evaluated) <= 30
