"""The simulated engine in real time, where the loop may come late; most tests of the loop run it on virtual time."""

import time

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.engine import EngineShape
from orca.core.domain.step import Epoch, Row, Step
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.engines.step_cost import LinearCost
from support.worker.engine_builders import next_result

EPOCH = Epoch(1, "test")
SHAPE = EngineShape(stages=1, slots=64, block_tokens=16, max_model_len=64)


async def test_a_step_that_is_due_at_once_does_not_overtake_the_one_whose_timer_is_late() -> None:
    engine = SimulatedEngine(SHAPE, cost=LinearCost(step_us=1_000))
    await engine.form(EPOCH)
    new = new_request(1, (5, 6), 1)
    await engine.submit(Step(epoch=EPOCH, number=1, new=(new,), rows=(Row(handle=1, start=0, count=2, sample=True),)))
    time.sleep(0.005)  # noqa: ASYNC251 - the loop is busy for longer than the step
    await engine.submit(Step(epoch=EPOCH, number=2, freed=(1,)))
    assert [(await next_result(engine, limit_s=10)).number for _ in range(2)] == [1, 2]
