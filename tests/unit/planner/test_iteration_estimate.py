"""The estimate of iteration-level scheduling agrees with hand calculations, and with the real scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

import pytest

from orca.core.domain.engine import EngineShape
from orca.planner.profile.step_shape import ShapeCost
from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.exact import ExactFigures, measure_exact
from orca.planner.simulate.iteration import estimate_iteration
from orca.planner.simulate.iteration_times import iteration_times
from orca.planner.simulate.layout import GroupCapacity
from orca.planner.simulate.queues.iteration_loads import loads_at_rate
from orca.planner.simulate.queues.prompt_queue import batch_members
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.tasks import TASKS, task_workload
from orca.planner.workload.trace import TraceSpec, generate
from orca.planner.workload.workload import Workload, parse_workload
from support.planner.linear_shapes import linear_shapes

COST = linear_shapes(step_us=2_000, token_us=100, context_ns=200)


def scenario(workload: Workload, costs: Sequence[ShapeCost] = (COST,), **changes: object) -> Scenario:
    capacity = GroupCapacity(slots=1_000_000, max_model_len=4096)
    return replace(Scenario(workload=workload, costs=costs, capacity=capacity, prefetch=0), **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A scenario that both levels of the simulator can run."""

    workload: Workload
    costs: tuple[ShapeCost, ...]
    batch_size: int
    batch_tokens: int | None = None
    host_us: int = 0
    prefetch: int = 0

    def estimate(self, rate: float | None = None) -> Estimate:
        settings = scenario(self.workload, self.costs, host_us=self.host_us, prefetch=self.prefetch)
        return estimate_iteration(settings, self.batch_size, self.batch_tokens, rate=rate)

    def measure(self, requests: int, *, seed: int = 0, rate: float | None = None) -> ExactFigures:
        stages = len(self.costs)
        simulation = Simulation(
            shape=EngineShape(stages=stages, slots=1_600_000, block_tokens=16, max_model_len=4096),
            cost=self.costs,
            host_us=self.host_us,
            prefetch=self.prefetch,
            max_batch_tokens=self.batch_tokens,
        )
        spec = TraceSpec.of_workload(self.workload, requests=requests, seed=seed, rate=rate)
        return measure_exact(simulation, "iteration", self.batch_size, generate(spec))


def test_one_request_at_a_time_has_the_times_of_its_steps() -> None:
    found = estimate_iteration(scenario(parse_workload("10/5")), 1)
    prompt = 2_000 + 10 * 100 + 10 * 0.2
    decodes = [2_000 + 100 + context * 0.2 for context in (11, 12, 13, 14)]
    assert 1e6 / found.throughput == pytest.approx(prompt + sum(decodes), rel=0.005)
    assert found.latency_s == pytest.approx(1 / found.throughput, rel=0.005)
    assert found.ttft_s * 1e6 == pytest.approx(prompt, rel=0.02)
    assert found.tpot_s * 1e6 == pytest.approx(sum(decodes) / 4, rel=0.001)


def test_requests_enter_as_often_as_they_end() -> None:
    members = batch_members(scenario(parse_workload("10/1:9")), 12.0, None)
    assert members.entering == pytest.approx(12 / 5)
    assert members.decoding == pytest.approx(12 * 4 / 5)
    # Decoding rows of answers of s tokens read 1 to s - 1 of them: 4/36 of the rows are the first of one, and so on.
    rows = [decoded for output in range(1, 10) for decoded in range(1, output)]
    assert members.generated == pytest.approx(sum(rows) / len(rows))
    assert members.read_prompt == pytest.approx(10)


def test_prompts_that_are_the_bottleneck_fill_every_step() -> None:
    members = batch_members(scenario(parse_workload("400/4")), 8.0, 16)
    assert members.room == pytest.approx(16 - 3 * members.entering)
    assert members.entering * 400 == pytest.approx(members.room, rel=0.01)
    assert members.prompt_steps == pytest.approx(8 / members.entering - 3)
    assert members.chunks == pytest.approx(400 / members.room, rel=0.06)


def test_short_prompts_are_not_cut_where_a_step_has_room() -> None:
    members = batch_members(scenario(parse_workload("4/30")), 4.0, 512)
    assert (members.prompt_steps, members.chunks) == (pytest.approx(1.0), 1.0)
    assert members.entering == pytest.approx(4 / 30)


def test_slots_are_those_of_all_batches_in_flight() -> None:
    found = estimate_iteration(scenario(parse_workload("10/22"), (COST, COST)), 4)
    assert (found.slots_needed, found.fits) == (2 * 4 * 32, True)
    few = scenario(parse_workload("10/22"), capacity=GroupCapacity(slots=4 * 32 - 16, max_model_len=64))
    assert estimate_iteration(few, 4).fits is False


def test_prefetch_hides_the_host_time() -> None:
    times = [
        estimate_iteration(scenario(parse_workload("10/1:20"), host_us=host_us, prefetch=prefetch), 4).cycle_s
        for host_us, prefetch in ((0, 0), (500, 1), (500, 0))
    ]
    assert times[1] == pytest.approx(times[0], rel=0.001)
    assert times[2] == pytest.approx(times[0] + 500e-6, rel=0.02)


def test_more_arrivals_than_can_be_served_wait_for_ever() -> None:
    settings = scenario(task_workload("S", 0.25))
    capacity = estimate_iteration(settings, 4).capacity
    over = estimate_iteration(settings, 4, rate=capacity * 1.01)
    assert (over.latency_s, over.throughput) == (inf, capacity)


def test_latency_from_the_submission_rises_with_the_rate() -> None:
    settings = scenario(task_workload("T", 0.25), (COST, COST))
    capacity = estimate_iteration(settings, 8).capacity
    found = [estimate_iteration(settings, 8, rate=capacity * share) for share in (0.01, 0.2, 0.5, 0.8, 0.95)]
    assert [each.latency_s for each in found] == sorted(each.latency_s for each in found)
    assert found[0].latency_s > estimate_iteration(settings, 1).latency_s * 0.8


def test_the_requests_in_flight_obey_littles_law() -> None:
    settings = scenario(task_workload("T", 0.25))
    full = iteration_times(settings, 8, None)
    for load in (0.1, 0.5, 0.8):
        rate = load * full.throughput
        loads = loads_at_rate(settings, 8, None, rate, full)
        shares = [share for _, share in loads.found]
        assert sum(shares) + loads.queued_share == pytest.approx(1.0)
        # All that arrive are served, and each stays for the mean time of those that are in flight.
        mean = sum(number * share for number, share in loads.found) + 8 * loads.queued_share
        assert loads.mean == pytest.approx(mean)
        stays = [times.stay(32.0) for times in loads.times]
        assert rate * min(stays) / 1e6 <= loads.mean <= rate * max(stays) / 1e6


SETTINGS = {
    "one stage": Setting(workload=task_workload("T", 0.125), costs=(COST,), batch_size=8),
    "three stages": Setting(workload=task_workload("T", 0.125), costs=(COST,) * 3, batch_size=4),
    "stages that differ": Setting(
        workload=task_workload("C1", 0.125),
        costs=(COST, linear_shapes(step_us=3_000, token_us=150, context_ns=300)),
        batch_size=4,
        host_us=300,
    ),
    "prefetch": Setting(workload=task_workload("S", 0.25), costs=(COST,) * 2, batch_size=4, host_us=500, prefetch=1),
    "chunks": Setting(workload=task_workload("C1", 0.125), costs=(COST,) * 2, batch_size=4, batch_tokens=16),
    "few chunks": Setting(workload=task_workload("S", 0.25), costs=(COST,), batch_size=8, batch_tokens=72),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_estimate_is_that_of_the_real_scheduler(name: str) -> None:
    found, measured = SETTINGS[name].estimate(), SETTINGS[name].measure(600)
    assert found.throughput == pytest.approx(measured.throughput, rel=0.1)
    assert found.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=0.1)
    assert found.latency_s == pytest.approx(measured.sequence_s, rel=0.12)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_latency_from_the_submission_is_near_that_of_the_real_scheduler(load: float) -> None:
    setting = SETTINGS["one stage"]
    rate = load * setting.estimate().capacity
    found, measured = setting.estimate(rate), setting.measure(800, rate=rate)
    assert found.throughput == rate
    assert found.latency_s == pytest.approx(measured.request_s, rel=0.2)


@pytest.mark.prove
def test_nine_of_ten_random_settings_are_within_a_tenth_of_the_real_scheduler() -> None:
    numbers = Random(44)
    errors: list[tuple[float, float]] = []
    for seed in range(200):
        setting = random_setting(numbers)
        found, measured = setting.estimate(), setting.measure(max(600, 12 * setting.batch_size * 4), seed=seed)
        errors.append((found.throughput / measured.throughput - 1, found.latency_s / measured.sequence_s - 1))
    for place, name in enumerate(("throughput", "latency")):
        ordered = sorted(abs(error[place]) for error in errors)
        print(f"{name}: median {ordered[100]:.1%}, p90 {ordered[180]:.1%}, largest {ordered[-1]:.1%}")
        assert ordered[180] <= 0.1, name


def random_setting(numbers: Random) -> Setting:
    """Return a setting of 1 to 4 stages that need not be equal, with chunks or without."""
    step_us, token_us = numbers.choice((500, 2_000, 10_000, 30_000)), numbers.choice((20, 100, 230))
    context_ns, batch_size = numbers.choice((0, 200, 1_500)), numbers.choice((1, 2, 4, 8, 16, 32))
    factors = [numbers.choice((1.0, 1.0, 1.0, 1.3, 0.7)) for _ in range(numbers.randint(1, 4))]
    return Setting(
        workload=task_workload(numbers.choice(tuple(TASKS)), numbers.choice((0.25, 0.25, 0.5))),
        costs=tuple(
            linear_shapes(
                step_us=round(step_us * factor),
                token_us=round(token_us * factor),
                context_ns=round(context_ns * factor),
            )
            for factor in factors
        ),
        batch_size=batch_size,
        batch_tokens=numbers.choice((None, batch_size + numbers.choice((8, 32, 64, 128, 256)))),
        host_us=numbers.choice((0, 0, 300, 2_000)),
        prefetch=numbers.choice((0, 1)),
    )
