"""Requests with sources in the real loop on virtual time: epochs that break, suspects, cancels and deadlines."""

import asyncio

import pytest

from orca.core.domain.request import FinishReason
from orca.core.domain.step import Part, Step
from orca.scheduler.engines.simulated_engine import StepFault
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from support.scheduler.scheduler_simulation import (
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    tokens_at_least,
    virtually,
)


def with_sources(*, prefetch: int = 0, **changes: int) -> Simulation:
    return a_simulation(choices=SchedulingOptions(prefetch=prefetch, is_encoder_decoder=True, **changes))


async def check_tokens(simulation: Simulation) -> None:
    for request_id, request in simulation.submitted.items():
        tokens, end = await simulation.log_of(request_id)
        assert end is not None
        assert (tokens, end.reason) == simulation.expected(request)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("stages", [1, 3])
def test_after_a_broken_epoch_the_source_runs_again_and_the_target_from_its_log(prefetch: int, stages: int) -> None:
    @virtually
    async def run() -> None:
        simulation = with_sources(prefetch=prefetch)
        group = simulation.add_group(
            a_shape(stages=stages),
            faults=lambda step: StepFault.DEATH if (step.epoch.number, step.number) == (1, 6) else None,
            cost=LinearCost(step_us=1_000),
        )
        await simulation.queue_up([a_request("A", prompt=5, prefix=2, new=12)])
        simulation.start(group)
        await simulation.finish()
        await check_tokens(simulation)
        again = next(record for record in group.records if record.epoch.number == 2 and record.rows)
        source, target = again.rows
        assert (source.part, source.start, source.count) == (Part.SOURCE, 0, 5)
        assert (target.part, target.start) == (Part.TARGET, 0)
        assert target.count > 2, "the beginning of the target and its log"
        drawn = [record.rows for record in group.records if record.epoch.number == 1 and record.rows]
        assert target.count == 2 + len(drawn), "one token of each step that returned"

    run()


@virtually
async def test_a_suspect_runs_its_source_alone_and_the_others_go_on() -> None:
    """It breaks two epochs, each time with its first step."""
    simulation = with_sources()
    crashes = iter([StepFault.CRASH, StepFault.CRASH])

    def breaks_twice(step: Step) -> StepFault | None:
        return next(crashes, None) if any(new.request_id == "B.0" for new in step.new) else None

    group = simulation.add_group(a_shape(slots=128), faults=breaks_twice, cost=LinearCost(step_us=1_000))
    await simulation.queue_up(a_request(name, prompt=5, prefix=2, new=9) for name in "ABC")
    simulation.start(group)
    await simulation.finish()
    await check_tokens(simulation)
    assert "B.0" in group.logs[0].alone
    entries = [record.rows for record in group.records if "B.0" in [row.request_id for row in record.rows]]
    assert [row.part for row in entries[0]] == [Part.SOURCE, Part.TARGET], "nothing else is in its first step"
    assert any(len({row.request_id for row in rows}) == 3 for rows in entries), "later all run together"


@virtually
async def test_a_cancelled_request_and_one_past_its_deadline_give_both_tables_back() -> None:
    simulation = with_sources(max_batch_size=4, max_batch_tokens=8)
    group = simulation.add_group(a_shape(slots=128), cost=LinearCost(step_us=20_000))
    requests = [
        a_request("A", prompt=9, prefix=1, new=30),
        a_request("B", prompt=3, prefix=2, new=30, deadline_ms=300),
        a_request("C", prompt=7, prefix=3, new=20),
    ]
    await simulation.queue_up(requests)
    simulation.start(group)
    await tokens_at_least(simulation, "A.0", 2)
    await simulation.pool.cancel("A")
    await simulation.finish()
    reasons = {}
    for request_id, request in simulation.submitted.items():
        tokens, end = await simulation.log_of(request_id)
        assert end is not None
        reasons[request_id] = end.reason
        assert tokens == simulation.expected(request)[0][: len(tokens)]
    assert reasons == {
        "A.0": FinishReason.CANCELLED,
        "B.0": FinishReason.DEADLINE_EXCEEDED,
        "C.0": FinishReason.LENGTH,
    }


@virtually
async def test_a_request_that_arrives_late_shares_a_step_with_targets_and_an_early_one_leaves() -> None:
    simulation = with_sources()
    group = simulation.add_group(a_shape(slots=128), cost=LinearCost(step_us=10_000))
    await simulation.queue_up([a_request("A", prefix=1, new=12), a_request("B", prefix=1, new=3)])
    simulation.start(group)
    await asyncio.sleep(0.045)
    await simulation.submit(a_request("C", prefix=1, new=3))
    await simulation.finish()
    await check_tokens(simulation)
    (entry,) = [
        record.rows
        for record in group.records
        if any(row.request_id == "C.0" and row.part is Part.SOURCE for row in record.rows)
    ]
    assert [(row.request_id, row.part) for row in entry] == [
        ("C.0", Part.SOURCE),
        ("A.0", Part.TARGET),
        ("C.0", Part.TARGET),
    ]
