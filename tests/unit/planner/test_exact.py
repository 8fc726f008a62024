"""The exact figures are those of the steady state: neither a group that fills up nor one that runs empty counts."""

from math import isfinite
from typing import Any

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.planner.simulate.exact import measure_exact
from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.lengths import Range
from orca.planner.workload.percentiles import at_percent
from orca.planner.workload.trace import Trace, TraceSpec, generate
from orca.planner.workload.workload import Workload, parse_workload
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.policy.cycle import CycleControls

SHAPE = EngineShape(stages=1, slots=16_000, block_tokens=16, max_model_len=512)


def trace(text: str, requests: int, rate: float | None = None) -> Trace:
    return generate(TraceSpec.of_workload(parse_workload(text), requests=requests, rate=rate))


def test_steps_of_one_length_give_exact_figures() -> None:
    figures = measure_exact(Simulation(shape=SHAPE, cost=LinearCost(step_us=1_000)), "iteration", 4, trace("5/10", 400))
    # Four requests of ten steps, each of a millisecond.
    assert figures.throughput == pytest.approx(400, rel=0.03)
    assert figures.tokens_per_s == pytest.approx(4_000, rel=0.03)
    assert figures.sequence_s == pytest.approx(0.010)
    assert figures.first_token_s == pytest.approx(0.001)
    assert figures.token_s == pytest.approx(0.001)
    assert figures.step_requests == pytest.approx(4, rel=0.02)
    assert figures.request_s > 0.5, "most requests wait in the queue"
    assert 200 < figures.requests < 300


def test_the_first_step_begins_when_it_is_submitted() -> None:
    simulation = Simulation(shape=SHAPE, cost=LinearCost(step_us=1_000), host_us=200)
    figures = measure_exact(simulation, "iteration", 4, trace("5/10", 400))
    assert figures.sequence_s == pytest.approx(0.012)


def test_a_trace_with_a_rate_is_measured_while_requests_arrive() -> None:
    simulation = Simulation(shape=SHAPE, cost=LinearCost(step_us=1_000))
    figures = measure_exact(simulation, "iteration", 8, trace("5/10", 300, rate=100))
    assert figures.throughput == pytest.approx(100, rel=0.2)
    assert figures.sequence_s == pytest.approx(0.010, abs=1e-5)
    assert 0.010 < figures.request_s <= 0.0111, "a request waits for the end of a step"
    assert 0.001 < figures.request_first_token_s <= 0.0021


def test_a_saturated_trace_may_be_longer_than_the_queue_of_a_pool() -> None:
    simulation = Simulation(shape=SHAPE, cost=LinearCost(step_us=1_000))
    assert measure_exact(simulation, "iteration", 16, trace("5/2", 1_500)).requests > 1_000


def test_prompts_run_in_chunks_under_a_bound_of_tokens() -> None:
    simulation = Simulation(shape=SHAPE, cost=LinearCost(step_us=1_000), max_batch_tokens=12)
    figures = measure_exact(simulation, "iteration", 2, trace("40/2", 100))
    assert figures.first_token_s >= 0.004


def test_rare_long_answers_count_as_often_as_they_come() -> None:
    """Two of a hundred answers have 200 tokens, a step of a millisecond each. Few of them end while others enter."""
    rare = Workload.of_cells([(Range(5, 5), Range(10, 10), 98.0), (Range(5, 5), Range(200, 200), 2.0)], source="")
    simulation = Simulation(shape=SHAPE, cost=LinearCost(step_us=1_000))
    for seed in range(3):
        requests = generate(TraceSpec.of_workload(rare, requests=800, seed=seed, stratum=100))
        figures = {
            percent: measure_exact(simulation, "iteration", 16, requests, percent=percent).sequence_s
            for percent in (97, 99)
        }
        assert figures == {97: pytest.approx(0.010), 99: pytest.approx(0.200)}


def test_a_trace_without_a_steady_state_is_refused() -> None:
    with pytest.raises(SettingError, match=r"of 30 requests finished in the steady state, which needs 20"):
        measure_exact(Simulation(shape=SHAPE, cost=LinearCost()), "iteration", 16, trace("5/10", 30))


@pytest.mark.parametrize(
    ("policy", "rate", "max_batch_tokens", "cycle"),
    [
        ("iteration", None, None, None),
        ("iteration", None, 40, None),
        ("iteration", 90.0, None, None),
        ("rra", None, None, CycleControls(encode_batch=6, decode_steps=4)),
        ("rra", 90.0, None, CycleControls(encode_batch=6, decode_steps=4)),
    ],
)
def test_a_run_ends_when_no_later_step_counts(
    policy: str, rate: float | None, max_batch_tokens: int | None, cycle: CycleControls | None
) -> None:
    ended: list[int] = []

    class Counted(Simulation):
        def run(self, *args: Any, **options: Any) -> list[RequestOutcome]:
            outcomes = super().run(*args, **options)
            ended.append(sum(isfinite(outcome.end_s) for outcome in outcomes))
            return outcomes

    class Whole(Counted):
        def run(self, *args: Any, **options: Any) -> list[RequestOutcome]:
            return super().run(*args, **options | {"is_over": None})

    cut, whole = (
        measure_exact(
            kind(
                shape=EngineShape(stages=2, slots=64_000, block_tokens=16, max_model_len=512),
                cost=LinearCost(step_us=900, token_us=30),
                host_us=100,
                prefetch=1,
                max_batch_tokens=max_batch_tokens,
                cycle=cycle,
            ),
            policy,
            16,
            trace("5:90/1:20", 150, rate),
        )
        for kind in (Counted, Whole)
    )
    assert cut == whole
    assert ended[0] < ended[1] == 150


@pytest.mark.parametrize(("percent", "value"), [(99, 99), (99.5, 100), (50, 50), (1, 1), (0.5, 1)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, value: int) -> None:
    assert at_percent(list(range(100, 0, -1)), percent) == value
