"""The cost of a step: the linear one, and any other one in the simulated engine."""

import asyncio
from dataclasses import dataclass

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.engine import EngineShape
from orca.core.domain.step import Epoch, Part, Row, Step
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.engines.step_cost import LinearCost, StepCost
from support.worker.engine_builders import next_result

EPOCH = Epoch(1, "test")
PROMPT = Step(
    epoch=EPOCH,
    number=1,
    new=(new_request(1, (5, 6, 7), 2),),
    rows=(Row(handle=1, start=0, count=3, sample=True),),
)
TOKEN = Step(epoch=EPOCH, number=2, rows=(Row(handle=1, start=3, count=1, sample=True),))
END = Step(epoch=EPOCH, number=3, freed=(1,))


def test_the_linear_cost_counts_the_step_its_tokens_and_the_kv_that_it_reads() -> None:
    cost = LinearCost(step_us=1_000, token_us=10, context_ns=1_500)
    assert cost.stage_us(PROMPT) == 1_000 + 3 * 10 + 4  # 3 tokens of KV: 4.5 microseconds, rounded down
    assert cost.stage_us(TOKEN) == 1_000 + 10 + 6


def test_tokens_of_sources_may_have_a_cost_of_their_own() -> None:
    rows = (Row(1, 0, 5, False, part=Part.SOURCE), Row(1, 0, 2, True, part=Part.TARGET))
    step = Step(epoch=EPOCH, number=1, rows=rows)
    assert LinearCost(step_us=0, token_us=10).stage_us(step) == 7 * 10
    assert LinearCost(step_us=0, token_us=10, source_token_us=3).stage_us(step) == 5 * 3 + 2 * 10


def test_a_step_without_rows_costs_nothing() -> None:
    assert LinearCost(step_us=1_000, token_us=10, context_ns=1_500).stage_us(END) == 0


@dataclass(frozen=True)
class StepsOfTheTable:
    """A cost by the number of tokens, as a measured table would give it."""

    us_by_tokens: dict[int, int]

    def stage_us(self, step: Step) -> int:
        return self.us_by_tokens[step.tokens]


def test_the_simulated_engine_takes_the_time_of_any_cost() -> None:
    cost: StepCost = StepsOfTheTable({3: 7_000, 1: 2_000, 0: 0})

    async def run() -> list[int]:
        engine = SimulatedEngine(EngineShape(stages=2, slots=64, block_tokens=16, max_model_len=64), cost=cost)
        await engine.form(EPOCH)
        clock, times = asyncio.get_running_loop().time, []
        for step in (PROMPT, TOKEN, END):
            started_s = clock()
            await engine.submit(step)
            await next_result(engine)
            times.append(round((clock() - started_s) * 1e6))
        return times

    assert virtual_time.run(run()) == [2 * 7_000, 2 * 2_000, 0]
