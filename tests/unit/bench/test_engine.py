"""The engine alone: the same batch, injected until all of it ends (Figure 9)."""

import pytest

from orca.bench.engine import BatchShape, lines, time_batches, time_simulated, to_json
from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError
from orca.core.domain.step import Step
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import SimulatedEngine, StepFault
from orca.scheduler.engines.step_cost import LinearCost

SHAPE = EngineShape(stages=2, slots=4096, block_tokens=16, max_model_len=512)
COST = LinearCost(step_us=1_000, token_us=10)


def test_a_batch_takes_the_sum_of_its_iterations_on_all_stages() -> None:
    batch = BatchShape(requests=4, prompt_tokens=32, new_tokens=8)
    [time] = time_simulated(SHAPE, COST, [batch])
    first_us = 1_000 + 10 * 4 * 32
    others_us = 7 * (1_000 + 10 * 4)
    assert time.first_s == pytest.approx(2 * first_us / 1e6)
    assert time.seconds == pytest.approx(2 * (first_us + others_us) / 1e6)
    assert time.tokens_per_s == pytest.approx(32 / time.seconds)


def test_each_round_is_an_epoch_of_its_own_and_the_median_counts() -> None:
    epochs: list[int] = []

    def slow_at_first_and_last(step: Step) -> StepFault | None:
        epochs.append(step.epoch.number)
        return StepFault.SLOW if step.epoch.number in (1, 4) else None

    batch = BatchShape(requests=1, prompt_tokens=16, new_tokens=1)
    engine = SimulatedEngine(SHAPE, cost=COST, faults=slow_at_first_and_last)
    [time] = virtual_time.run(time_batches(engine, [batch], vocab_size=5, rounds=3, warm_ups=1))
    assert epochs == [1, 2, 3, 4]
    assert time.seconds == pytest.approx(2 * (1_000 + 16 * 10) / 1e6)


def test_every_row_after_the_prompt_runs_the_token_drawn_before() -> None:
    """The simulated engine asserts for each row that its token is the right one."""
    steps: list[Step] = []

    def record(step: Step) -> None:
        steps.append(step)

    batch = BatchShape(requests=2, prompt_tokens=16, new_tokens=4)
    engine = SimulatedEngine(SHAPE, faults=record)
    virtual_time.run(time_batches(engine, [batch], vocab_size=5, rounds=1, warm_ups=0))
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert [row.start for step in steps[1:] for row in step.rows] == [16, 16, 17, 17, 18, 18]
    assert all(row.token is not None for step in steps[1:] for row in step.rows)


def test_the_table_and_the_json_name_every_batch() -> None:
    batches = [BatchShape(requests=size, prompt_tokens=32, new_tokens=2) for size in (1, 16)]
    times = time_simulated(SHAPE, COST, batches)
    assert [row.split()[:2] for row in lines(times)[1:]] == [["32", "1"], ["32", "16"]]
    assert [entry["requests"] for entry in to_json(times)] == [1, 16]


def test_an_engine_that_fails_ends_the_measurement() -> None:
    engine = SimulatedEngine(SHAPE, refuses=lambda epoch: f"no memory for epoch {epoch.number}")
    batch = BatchShape(requests=1, prompt_tokens=1, new_tokens=1)
    with pytest.raises(EngineError, match="no memory"):
        virtual_time.run(time_batches(engine, [batch], vocab_size=5, rounds=1, warm_ups=0))
