"""The formulas of round-robin allocation agree with hand calculations, with the paper, and with played requests."""

from dataclasses import replace
from math import inf
from random import Random

import pytest

from orca.core.domain.engine import EngineShape
from orca.planner.profile.step_shape import ShapeCost
from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.exact import measure_exact
from orca.planner.simulate.layout import GroupCapacity
from orca.planner.simulate.rra import estimate_rra
from orca.planner.simulate.rra_phases import decode_phases, paper_phases
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.lengths import Range
from orca.planner.workload.tasks import TASKS, task_workload
from orca.planner.workload.trace import TraceSpec, generate
from orca.planner.workload.workload import Workload, parse_workload
from orca.scheduler.policy.cycle import CycleControls
from support.planner.linear_shapes import linear_shapes
from support.planner.rra_events import count_decode_batches, play_rra

COST = linear_shapes(step_us=2_000, token_us=100, context_ns=200)


def scenario(workload: Workload, costs: tuple[ShapeCost, ...] = (COST,), **changes: object) -> Scenario:
    capacity = GroupCapacity(slots=1_000_000, max_model_len=4096)
    return replace(Scenario(workload=workload, costs=costs, capacity=capacity, prefetch=0), **changes)


def test_an_answer_decodes_one_token_less_than_it_has() -> None:
    phases = decode_phases(parse_workload("4/6"), 2)
    assert (phases.phases(1), phases.phases(2), phases.phases(3), phases.phases(4), phases.phases(6)) == (0, 1, 1, 2, 3)
    assert (phases.last_iteration(2), phases.last_iteration(3), phases.last_iteration(4)) == (1, 2, 1)
    # Five decode iterations: 1 and 2, 3 and 4, 5. The last phase has one, after which the request is gone.
    assert phases.requests == (3.0, 2.0)
    assert phases.generated == ((1 + 3 + 5) / 3, (2 + 4) / 2)
    assert phases.prompts == (4.0, 4.0)


@pytest.mark.parametrize("decode_steps", [1, 2, 3, 5, 50])
def test_the_batch_of_each_iteration_is_that_of_all_answers_counted_one_by_one(decode_steps: int) -> None:
    cells = [(Range(5, 5), Range(1, 1), 2.0), (Range(9, 9), Range(4, 4), 1.0), (Range(2, 2), Range(8, 8), 3.0)]
    phases = decode_phases(Workload.of_cells(cells, source="three"), decode_steps)
    for iteration in range(len(phases.requests)):
        there = [
            (weight / 6, prompts.low, decoded)
            for prompts, outputs, weight in cells
            for decoded in range(1, outputs.low)
            if (decoded - 1) % decode_steps == iteration
        ]
        requests = sum(weight for weight, _, _ in there)
        assert phases.requests[iteration] == pytest.approx(requests)
        assert phases.prompts[iteration] == pytest.approx(sum(w * prompt for w, prompt, _ in there) / requests)
        assert phases.generated[iteration] == pytest.approx(sum(w * decoded for w, _, decoded in there) / requests)
    assert phases.mean_phases == pytest.approx(phases.requests[0])


SHORTFALL = {"S": 0.158, "T": 0.412, "G": 0.379, "C1": 0.277, "C2": 0.454}
"""The share of the decode batch that is missing in the paper's, with N_D = 8."""


@pytest.mark.parametrize("task", ["S", "C2"])
def test_the_decode_batch_is_that_of_counted_requests_and_the_papers_is_smaller(task: str) -> None:
    workload = task_workload(task)
    counted = count_decode_batches(workload, 10, 8, requests=50_000, seed=1)
    assert decode_phases(workload, 8).mean_phases * 10 == pytest.approx(counted, rel=0.01)
    assert 1 - paper_phases(workload, 8).mean_phases * 10 / counted == pytest.approx(SHORTFALL[task], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("decode_steps", [1, 8, 32])
def test_the_decode_batch_is_within_half_a_per_cent_of_a_million_requests(task: str, decode_steps: int) -> None:
    workload = task_workload(task)
    counted = count_decode_batches(workload, 10, decode_steps, requests=1_000_000, seed=1)
    ours, paper = (find(workload, decode_steps).mean_phases * 10 for find in (decode_phases, paper_phases))
    print(f"{task}, N_D {decode_steps}: counted {counted:.2f}, ours {ours:.2f}, the paper's {paper:.2f}")
    assert ours == pytest.approx(counted, rel=0.005)
    assert 0.09 < 1 - paper / counted < 0.57
    if decode_steps == 8:
        assert 1 - paper / counted == pytest.approx(SHORTFALL[task], abs=0.005)


@pytest.mark.parametrize(
    ("encode_batch", "decode_steps", "rate", "latency_s"), [(52, 13, 25.23, 10.23), (49, 7, 26.15, 16.87)]
)
def test_table_6_of_the_paper_follows_from_its_formulas(
    encode_batch: int, decode_steps: int, rate: float, latency_s: float
) -> None:
    length = task_workload("S").outputs.percentile(99)
    assert encode_batch / rate * -(-length // decode_steps) == pytest.approx(latency_s, rel=0.01)


def test_the_papers_formula_rounds_the_last_phase_up_to_a_cycle() -> None:
    settings = scenario(parse_workload("64/1:63"))
    paper = estimate_rra(settings, 8, 13, formula="paper")
    assert paper.latency_s == pytest.approx(5 * paper.cycle_s)
    ours = estimate_rra(settings, 8, 13)
    assert paper.decode_batch < 0.95 * ours.decode_batch
    assert ours.latency_s < 5 * ours.cycle_s


def test_equal_lengths_have_the_times_of_their_steps() -> None:
    # Prompts of 10, three tokens each: one step of encode, two of decode, 4 requests in all of them.
    found = estimate_rra(scenario(parse_workload("10/3")), 4, 2)
    encode = 2_000 + 40 * 100 + 40 * 0.2
    decodes = 2_000 + 4 * 100 + 44 * 0.2, 2_000 + 4 * 100 + 48 * 0.2
    assert found.cycle_s * 1e6 == pytest.approx(encode + sum(decodes), rel=1e-6)
    assert found.latency_s == pytest.approx(found.cycle_s, rel=1e-6)
    assert found.throughput == pytest.approx(4 / found.cycle_s)
    assert found.tokens_per_s == pytest.approx(12 / found.cycle_s)
    assert found.ttft_s * 1e6 == pytest.approx(encode)
    assert found.tpot_s * 1e6 == pytest.approx(sum(decodes) / 2, rel=1e-6)
    assert (found.decode_batch, found.bubbles) == (4.0, pytest.approx(0.0, abs=1e-6))


def test_answers_of_one_token_have_no_decode_phase() -> None:
    found = estimate_rra(scenario(parse_workload("10/1")), 4, 5)
    assert (found.decode_batch, found.tpot_s) == (0.0, 0.0)
    assert found.latency_s == found.ttft_s == pytest.approx(found.cycle_s)
    assert found.slots_needed == 4 * 16


SETTINGS = [
    # task, stages, B_E, N_D, factor of the last stage, host_us
    ("S", 1, 8, 8, 1.0, 0),
    ("T", 1, 4, 2, 1.0, 1_000),
    ("T", 2, 12, 8, 1.0, 0),
    ("C1", 3, 6, 16, 1.0, 300),
    ("C2", 2, 8, 32, 1.5, 0),
    ("S", 4, 24, 4, 1.0, 0),
    ("C1", 4, 2, 4, 1.0, 0),
]


@pytest.mark.parametrize(("task", "stages", "encode_batch", "decode_steps", "factor", "host_us"), SETTINGS)
@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_the_estimate_is_that_of_played_requests(
    task: str, stages: int, encode_batch: int, decode_steps: int, factor: float, host_us: int, is_encoder_decoder: bool
) -> None:
    workload = task_workload(task, 0.25)
    last = linear_shapes(step_us=round(2_000 * factor), token_us=round(100 * factor), context_ns=200)
    costs = (COST,) * (stages - 1) + (COST if factor == 1 else last,)
    settings = scenario(workload, costs, host_us=host_us, is_encoder_decoder=is_encoder_decoder)
    found = estimate_rra(settings, encode_batch, decode_steps)
    played = play_rra(
        workload,
        costs,
        encode_batch,
        decode_steps,
        requests=1_500,
        host_us=host_us,
        is_encoder_decoder=is_encoder_decoder,
    )
    assert found.throughput == pytest.approx(played.throughput, rel=0.1)
    # Latencies rise in steps of a cycle, and where a step lies exactly at the percentile chance decides.
    assert played.percentile(98) * 0.9 <= found.latency_s <= played.percentile(99.6) * 1.1


def test_the_estimate_is_that_of_the_real_scheduler() -> None:
    workload, costs = task_workload("S", 0.25), (COST, COST)
    simulation = Simulation(
        shape=EngineShape(stages=2, slots=160_000, block_tokens=16, max_model_len=4096),
        cost=costs,
        cycle=CycleControls(encode_batch=8, decode_steps=4),
    )
    measured = measure_exact(simulation, "rra", 32, generate(TraceSpec.of_workload(workload, requests=600)))
    found = estimate_rra(scenario(workload, costs), 8, 4)
    assert found.throughput == pytest.approx(measured.throughput, rel=0.1)
    assert found.latency_s == pytest.approx(measured.sequence_s, rel=0.12)


def test_prefetch_hides_the_host_time() -> None:
    workload = task_workload("S", 0.25)
    without = estimate_rra(scenario(workload, host_us=0), 8, 8)
    hidden = estimate_rra(scenario(workload, host_us=500, prefetch=1), 8, 8)
    added = estimate_rra(scenario(workload, host_us=500, prefetch=0), 8, 8)
    assert hidden.cycle_s == pytest.approx(without.cycle_s, rel=0.001)
    assert added.cycle_s - without.cycle_s == pytest.approx(9 * 500e-6, rel=0.05)


def test_a_group_with_too_few_slots_does_not_fit() -> None:
    workload = parse_workload("10/22")
    needed = estimate_rra(scenario(workload), 4, 7).slots_needed
    # Three phases of four requests, each with two blocks.
    assert needed == 4 * 3 * 32
    for slots, fits in ((needed, True), (needed - 1, False)):
        few = scenario(workload, capacity=GroupCapacity(slots=slots, max_model_len=4096))
        assert estimate_rra(few, 4, 7).fits is fits


def test_slots_have_a_margin_for_their_spread() -> None:
    workload, numbers = task_workload("T"), Random(4)
    found = estimate_rra(scenario(workload), 16, 8)
    requests, needs = round(found.decode_batch), []
    # A request is in flight as often as it has phases.
    pairs = [workload.sample(numbers) for _ in range(2_000)]
    phases = [-(-(output - 1) // 8) for _, output in pairs]
    for _ in range(300):
        batch = numbers.choices(pairs, weights=phases, k=requests)
        needs.append(sum(-(-(prompt + output) // 16) * 16 for prompt, output in batch))
    assert sum(need > found.slots_needed for need in needs) <= 3
    assert found.slots_needed < 1.15 * sum(needs) / len(needs)


def test_more_arrivals_than_can_be_served_wait_for_ever() -> None:
    settings = scenario(task_workload("S", 0.25))
    full = estimate_rra(settings, 8, 8)
    over = estimate_rra(settings, 8, 8, rate=full.throughput * 1.01)
    assert (over.latency_s, over.ttft_s) == (inf, inf)
    assert over.throughput == over.capacity == full.throughput


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_latency_from_the_submission_is_near_that_of_played_arrivals(load: float) -> None:
    workload, costs = task_workload("C1", 0.25), (linear_shapes(step_us=10_000, token_us=100),)
    rate = load * estimate_rra(scenario(workload, costs), 8, 8).capacity
    found = estimate_rra(scenario(workload, costs), 8, 8, rate=rate)
    played = play_rra(workload, costs, 8, 8, requests=3_000, rate=rate)
    assert found.throughput == rate
    assert found.latency_s == pytest.approx(played.percentile(99), rel=0.2)


def test_latency_from_the_submission_rises_with_the_rate() -> None:
    settings = scenario(task_workload("T", 0.25))
    capacity = estimate_rra(settings, 8, 8).capacity
    found = [estimate_rra(settings, 8, 8, rate=capacity * share) for share in (0.01, 0.2, 0.5, 0.8, 0.95)]
    assert [each.latency_s for each in found] == sorted(each.latency_s for each in found)
    assert [each.decode_batch for each in found] == sorted(each.decode_batch for each in found)
