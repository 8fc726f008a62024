"""The loop and its pool, on virtual time: claims, heartbeats, and calls that are lost, late or pass each other."""

import asyncio
import random
from typing import Any

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.step import Claim
from orca.pool.records import Caller, ClaimAnswer, Heartbeat, OwnershipState
from orca.scheduler.dependencies import LoopTimings
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.rra import RoundRobinPolicy
from support.scheduler.scheduler_simulation import (
    REVISION,
    a_request,
    a_shape,
    a_simulation,
    serving,
    tokens_at_least,
    virtually,
)


@virtually
async def test_an_idle_scheduler_polls_the_pool_only_a_few_times_a_second() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape())
    calls: list[str] = []
    inner = simulation.pool.claim
    simulation.pool.claim = lambda *args, **kwargs: calls.append("claim") or inner(*args, **kwargs)  # type: ignore[method-assign, func-returns-value]
    simulation.start(group)
    await serving(simulation, group)
    await asyncio.sleep(10)
    await simulation.stop()
    assert 30 <= len(calls) <= 60


@virtually
async def test_a_claim_that_the_scheduler_does_not_know_is_given_back() -> None:
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=1))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=100_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=60))
    await tokens_at_least(simulation, "A.0", 1)
    await simulation.submit(a_request("B", new=1))
    caller = Caller(group="g0", process="g0-p1", revision=REVISION)
    stray = await simulation.pool.claim(caller, 10_000, free_slots=64, total_slots=64, block_tokens=4, most=1)
    assert [claimed.request.id for claimed in stray.claimed] == ["B.0"]
    await asyncio.sleep(1.1)
    assert (await simulation.pool.status("B.0")).state is OwnershipState.QUEUED


@virtually
async def test_a_claim_whose_answer_was_lost_is_repeated_under_its_number() -> None:
    simulation = a_simulation()
    answers: list[str] = []
    claim = simulation.pool.claim

    async def lossy_claim(caller: Caller, call: int, **rest: Any) -> ClaimAnswer:
        answer = await claim(caller, call, **rest)
        if answer.claimed and not answers:
            answers.append("lost")
            raise PoolUnavailable("the answer was lost")
        return answer

    simulation.pool.claim = lossy_claim  # type: ignore[method-assign]
    simulation.start(simulation.add_group(a_shape()))
    await simulation.submit(a_request("A", new=40))
    await tokens_at_least(simulation, "A.0", 1)
    claimed = (await simulation.pool.status("A.0")).claim
    assert answers == ["lost"]
    assert claimed is not None
    assert claimed.number == 1, "it was not taken back in between"
    await simulation.finish()


@pytest.mark.parametrize("slow", ["heartbeat to the pool", "heartbeat from the pool", "claim from the pool"])
@virtually
async def test_concurrent_heartbeats_and_claims_give_no_request_back(slow: str) -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000))
    heartbeat, claim = simulation.pool.heartbeat, simulation.pool.claim

    async def slow_heartbeat(*args: Any, **rest: Any) -> Heartbeat:
        await asyncio.sleep(0.3 if slow == "heartbeat to the pool" else 0)
        answer = await heartbeat(*args, **rest)
        await asyncio.sleep(0.3 if slow == "heartbeat from the pool" else 0)
        return answer

    async def slow_claim(*args: Any, **rest: Any) -> ClaimAnswer:
        answer = await claim(*args, **rest)
        await asyncio.sleep(0.3 if slow == "claim from the pool" else 0)
        return answer

    simulation.pool.heartbeat = slow_heartbeat  # type: ignore[method-assign]
    simulation.pool.claim = slow_claim  # type: ignore[method-assign]
    simulation.start(group)
    for name in "ABCDEFGHIJKL":
        await simulation.submit(a_request(name, new=3))
        await asyncio.sleep(0.17)
    await simulation.finish()
    began = [row.request_id[0] for record in group.records for row in record.rows if row.start == 0]
    assert "".join(began) == "ABCDEFGHIJKL", "each began once"


@virtually
async def test_a_request_claimed_again_gets_a_new_handle_on_the_stages() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=100_000))
    simulation.start(group)
    request = await simulation.submit(a_request("A", new=6))
    await tokens_at_least(simulation, "A.0", 2)
    status = await simulation.pool.status("A.0")
    assert isinstance(status.claim, Claim)
    await simulation.pool.give_back({"A.0": status.claim})
    await simulation.finish()
    assert (await simulation.log_of("A.0"))[0] == simulation.expected(request)[0]
    starts = [record.step for record in group.records if record.rows and record.rows[0].start == 0]
    assert len(starts) == 2, "it began twice, the second time with its log"


@virtually
async def test_an_outage_of_the_pool_costs_only_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "orca.scheduler")
    simulation = a_simulation(chance=random.Random(3))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=20_000))
    scheduler = simulation.start(group)
    request = await simulation.submit(a_request("A", new=10))
    await tokens_at_least(simulation, "A.0", 2)
    scheduler._dependencies.pool.__dict__["_loss"] = 1.0
    await asyncio.sleep(20)
    scheduler._dependencies.pool.__dict__["_loss"] = 0.0
    await asyncio.sleep(1)  # a sweep is made twice a second
    await simulation.finish()
    assert (await simulation.log_of("A.0"))[0] == simulation.expected(request)[0]
    assert {record.epoch.number for record in group.records} == {1}, "the seat was not lost"
    said = [record.message for record in caplog.records if record.message in ("pool away", "first commit", "pool back")]
    assert said == ["first commit", "pool away", "pool back"]


@virtually
async def test_younger_requests_are_claimed_soon_after_a_blocking_head_is_gone_even_under_load() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(slots=2000, max_model_len=2000), cost=LinearCost(step_us=1_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=1500))
    await tokens_at_least(simulation, "A.0", 1)
    await simulation.submit(a_request("B", new=1000))
    await simulation.submit(a_request("C", new=1))
    await asyncio.sleep(0.2)
    await simulation.pool.cancel("B")
    await asyncio.sleep(0.1)
    assert (await simulation.pool.status("C.0")).state is OwnershipState.ENDED, "it fits beside A"
    await simulation.finish()


@virtually
async def test_a_head_that_does_not_fit_stays_refused_when_the_turn_has_moved_on_meanwhile() -> None:
    """The answer comes in the decode phase of rra, in which the group has no place for any request."""
    simulation = a_simulation(
        policy=RoundRobinPolicy(),
        choices=SchedulingOptions(
            max_batch_size=3, prefetch=0, cycle=CycleControls(encode_batch=1, decode_steps=10, decode_batch=3)
        ),
        timings=LoopTimings(head_s=60.0),
    )
    group = simulation.add_group(a_shape(slots=100, max_model_len=100), cost=LinearCost(step_us=20_000))
    claim, refused = simulation.pool.claim, []

    async def slow_claim(*args: Any, **rest: Any) -> ClaimAnswer:
        answer = await claim(*args, **rest)
        if answer.waiting and not answer.claimed:
            refused.append(rest["free_slots"])
            await asyncio.sleep(0.12)  # a step waits 0.05 s for it
        return answer

    simulation.pool.claim = slow_claim  # type: ignore[method-assign]
    simulation.start(group)
    await simulation.submit(a_request("A", new=60))
    await tokens_at_least(simulation, "A.0", 1)
    await simulation.submit(a_request("B", new=60))
    await tokens_at_least(simulation, "A.0", 59)
    assert len(refused) == 1, "the slots of A are taken until it ends"
    await simulation.finish()
