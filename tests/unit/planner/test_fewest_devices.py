"""The fewest devices that would meet a goal that is out of reach."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from orca.planner.search.fewest_devices import DEVICES_MAX, fewest_devices
from orca.planner.search.goal import PlanGoal
from orca.planner.search.planner import Candidate, PlacedLayout, PlanProblem
from orca.planner.search.strategies import STRATEGIES
from orca.planner.simulate.layout import GroupCapacity, Layout
from orca.planner.workload.lengths import Range
from orca.planner.workload.workload import Workload
from support.planner.linear_shapes import linear_shapes

WORKLOAD = Workload.of_lengths(Range(16, 32), Range(4, 8))


@dataclass(frozen=True)
class Figures:
    throughput: float
    latency_s: float
    ttft_s: float
    tpot_s: float


def layouts_on(devices: int) -> list[PlacedLayout]:
    """Return one stage of so many ranks, each of which takes its part of the work."""
    cost = linear_shapes(step_us=64_000 // devices)
    return [
        PlacedLayout(
            layout=Layout((8,), devices),
            costs=[cost],
            capacity=GroupCapacity(slots=4_096, max_model_len=256, is_chosen=True),
        )
    ]


def problem(goal: PlanGoal) -> PlanProblem:
    return PlanProblem(workload=WORKLOAD, goal=goal, layouts=layouts_on(1), strategies=[STRATEGIES["iteration"]])


def judge(error: float = 1.0) -> Callable[[Candidate], Figures]:
    """Judge schedules as their formulas do, times an error."""

    def judged(candidate: Candidate) -> Figures:
        found = candidate.expected
        return Figures(found.throughput, error * found.latency_s, found.ttft_s, found.tpot_s)

    return judged


def least_latency_s(devices: int) -> float:
    """Return the latency of one request at a time."""
    [placed] = layouts_on(devices)
    wanted = problem(PlanGoal(latency_ms=1.0))
    return STRATEGIES["iteration"].estimate(wanted.scenario(placed), (1, -1), None).latency_s


@pytest.mark.parametrize("devices", [2, 5, 16])
def test_the_fewest_devices_are_found(devices: int) -> None:
    wanted = problem(PlanGoal(latency_ms=1_000 * least_latency_s(devices) * 1.001))
    assert fewest_devices(wanted, layouts_on, judge(), above=1) == devices


def test_the_simulation_decides() -> None:
    wanted = problem(PlanGoal(latency_ms=1_000 * least_latency_s(4) * 1.001))
    assert fewest_devices(wanted, layouts_on, judge(1.3), above=1) == 6


def test_no_number_may_be_enough() -> None:
    wanted = problem(PlanGoal(latency_ms=1_000 * least_latency_s(DEVICES_MAX) * 0.5))
    assert fewest_devices(wanted, layouts_on, judge(), above=1) is None
    assert fewest_devices(wanted, lambda _: [], judge(), above=1) is None


def test_at_an_arrival_rate_enough_capacity_is_found() -> None:
    [one] = layouts_on(1)
    alone = problem(PlanGoal(latency_ms=1.0))
    capacity = STRATEGIES["iteration"].estimate(alone.scenario(one), (8, -1), None).capacity
    goal = PlanGoal(latency_ms=4_000, kind="requests", rate=2 * capacity)
    found = fewest_devices(problem(goal), layouts_on, judge(), above=1)
    assert found is not None
    assert 1 < found <= 4
