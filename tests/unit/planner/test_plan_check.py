"""Checks of a plan in force by simulation, on a profile with times made by hand."""

import dataclasses

import pytest

from orca.planner.follow.check import PlanCheck, PlanLimits, check_plan
from orca.planner.search.device_layouts import DeviceMemory, Shape
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan, PlannedBounds, PlannedDevice
from orca.planner.workload.lengths import Range
from orca.planner.workload.workload import Workload
from support.planner.profiles import profile

SHORT = Workload.of_lengths(Range(4, 12), Range(2, 10))
LONG = Workload.of_lengths(Range(4, 12), Range(20, 40))
LIMITS = PlanLimits(devices=1, shape=Shape(stages=1, ranks=1), memory=DeviceMemory(slots=256))
PROFILE = profile(ranks=(1,))
GOAL = PlanGoal(latency_ms=60_000)


def run(plan: Plan | None, workload: Workload = SHORT, goal: PlanGoal = GOAL, **changes: bool) -> PlanCheck:
    return check_plan(PROFILE, workload, goal, LIMITS, plan, **changes)


@pytest.fixture(scope="module", params=["iteration", "rra"])
def planned(request: pytest.FixtureRequest) -> Plan:
    limits = dataclasses.replace(LIMITS, strategies=(request.param,))
    found = check_plan(PROFILE, SHORT, GOAL, limits, None)
    assert (found.current, found.is_met, found.complaint) == (None, False, "")
    assert found.best is not None
    return found.best


def test_a_plan_on_its_own_lengths_has_the_figures_that_it_was_chosen_for(planned: Plan) -> None:
    found = run(planned, is_searching=False)
    assert (found.current, found.is_met, found.best) == (planned.predicted, True, None)


def test_a_plan_is_simulated_with_the_bounds_that_run(planned: Plan) -> None:
    """The bounds of the same point would be others on longer answers."""
    bounds = PlannedBounds(**dataclasses.asdict(planned.schedule.bounds) | {"max_batch_size": 1})
    if bounds.encode_batch is not None:
        bounds = dataclasses.replace(bounds, encode_batch=1, decode_batch=1)
    slower = dataclasses.replace(planned, schedule=dataclasses.replace(planned.schedule, bounds=bounds))
    found, whole = run(slower, is_searching=False).current, run(planned, is_searching=False).current
    assert found is not None
    assert whole is not None
    assert found.throughput < whole.throughput / 2


def test_longer_answers_are_a_miss_of_a_tight_bound(planned: Plan) -> None:
    latency_s = planned.predicted.latency_s
    assert latency_s is not None
    tight = PlanGoal(latency_ms=1100 * latency_s)
    assert run(planned, SHORT, tight, is_searching=False).is_met
    missed = run(planned, LONG, tight, is_searching=False)
    assert not missed.is_met
    assert missed.current is not None
    assert missed.current.latency_s is not None
    assert missed.current.latency_s > 1.1 * latency_s


def test_a_margin_is_for_new_plans_and_no_reason_to_replace_one(planned: Plan) -> None:
    latency_s = planned.predicted.latency_s
    assert latency_s is not None
    bare, with_margin = (PlanGoal(latency_ms=1010 * latency_s, margin_percent=margin) for margin in (0.0, 20.0))
    assert planned.predicted.pressure(with_margin) > 1 >= planned.predicted.pressure(bare)
    assert run(planned, SHORT, with_margin, is_searching=False).is_met


def test_a_plan_that_cannot_hold_the_requests_has_no_figures(planned: Plan) -> None:
    small = dataclasses.replace(planned, schedule=dataclasses.replace(planned.schedule, slots=16))
    found = run(small, is_searching=False)
    assert (found.current, found.is_met) == (None, False)
    assert found.complaint.startswith("the plan in force cannot be simulated: ")


def test_a_plan_for_another_shape_has_no_figures(planned: Plan) -> None:
    key = dataclasses.replace(planned.device.key, hidden_size=64)
    other = dataclasses.replace(planned, device=PlannedDevice(key=key))
    assert "the plan is for another model: its hidden_size is 64, not 32" in run(other, is_searching=False).complaint


def test_lengths_that_fit_nowhere_leave_no_best_plan(planned: Plan) -> None:
    limits = dataclasses.replace(LIMITS, memory=DeviceMemory(slots=32))
    found = check_plan(PROFILE, LONG, GOAL, limits, planned)
    assert found.best is None
    assert "KV slots" in found.complaint


def test_the_best_plan_keeps_to_the_largest_batch() -> None:
    limits = dataclasses.replace(LIMITS, strategies=("iteration",), max_batch_size=2)
    found = check_plan(PROFILE, SHORT, GOAL, limits, None)
    assert found.best is not None
    assert found.best.schedule.bounds.max_batch_size == 2


def test_the_best_plan_has_room_for_the_least_slots(planned: Plan) -> None:
    """All six layers on one device leave room for 1.4 million slots. The plan in force may be such a one."""
    wide = profile()
    memory = DeviceMemory(device_bytes=wide.device_bytes, least_slots=2_000_000)
    limits = PlanLimits(devices=2, shape=Shape(), memory=memory, strategies=("iteration",), max_batch_size=4)
    found = check_plan(wide, SHORT, GOAL, limits, planned)
    assert found.current is not None
    assert found.best is not None
    assert found.best.schedule.stages * found.best.schedule.ranks == 2
