"""The lives of a group, on virtual time: engines that break or do not fit, seats lost and taken, stops."""

import asyncio

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import EngineError, NeverFits, SettingError
from orca.core.domain.request import End, FinishReason
from orca.core.domain.step import Epoch, Step
from orca.pool.records import Caller, OwnershipState, SeatEntered
from orca.scheduler.engines.simulated_engine import StepFault
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.request_level import RequestLevelPolicy
from support.scheduler.scheduler_simulation import (
    REVISION,
    a_request,
    a_shape,
    a_simulation,
    is_formed,
    serving,
    tokens_at_least,
    virtually,
)


@virtually
async def test_a_broken_engine_costs_an_epoch_and_no_token() -> None:
    broken: list[int] = []

    def faults(step: Step) -> StepFault | None:
        if step.number == 4 and not broken:
            broken.append(step.epoch.number)
            return StepFault.DEATH
        return None

    simulation = a_simulation()
    group = simulation.add_group(a_shape(), faults=faults)
    simulation.start(group)
    request = await simulation.submit(a_request("A", new=10))
    await simulation.finish()
    assert [record.epoch.number for record in group.records if record.rows] == [1] * 3 + [2] * 7
    assert (await simulation.log_of("A.0"))[0] == simulation.expected(request)[0]


@virtually
async def test_slow_steps_are_waited_for_while_stages_make_progress() -> None:
    simulation = a_simulation(choices=SchedulingOptions(prefetch=1))
    group = simulation.add_group(a_shape(stages=3), cost=LinearCost(step_us=700_000))
    simulation.start(group)
    request = await simulation.submit(a_request("A", new=6))
    await simulation.finish()
    assert group.logs[0].reasons == []
    assert {record.epoch.number for record in group.records} == {1}
    assert (await simulation.log_of("A.0"))[0] == simulation.expected(request)[0]


@virtually
async def test_a_lost_step_ends_the_epoch_after_its_bound_without_progress() -> None:
    simulation = a_simulation()
    lost: list[float] = []

    def faults(step: Step) -> StepFault | None:
        if step.number == 2 and not lost:
            lost.append(asyncio.get_running_loop().time())
            return StepFault.LOST
        return None

    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=700_000), faults=faults)
    simulation.start(group)
    await simulation.submit(a_request("A", new=3))
    await serving(simulation, group)
    while not group.logs[0].reasons:
        await asyncio.sleep(0.01)
    assert 0.99 < asyncio.get_running_loop().time() - lost[0] < 1.05
    assert "step 2 did not come back" in group.logs[0].reasons[0]
    await simulation.finish()


@virtually
async def test_results_read_before_the_engine_broke_are_committed_and_not_recomputed() -> None:
    simulation = a_simulation(delay_ms=40.0)
    group = simulation.add_group(a_shape(), faults=lambda step: StepFault.DEATH if step.number == 6 else None)
    simulation.start(group)
    await simulation.submit(a_request("A", new=10))
    await simulation.finish()
    starts = [record.rows[0].start for record in group.records if record.step == 1]
    assert starts == [0, 0]
    assert [record.rows[0].count for record in group.records if record.step == 1] == [3, 3 + 5]


@virtually
async def test_stages_in_a_higher_epoch_than_the_pool_knows_are_entered_above_it() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape())
    await group.engine.form(Epoch(41, "before the pool was lost"))
    original = group.engine.form

    async def form(epoch: Epoch) -> EngineShape:
        if epoch.number <= 41:
            raise EngineError("a stage knows epoch 41", reported_epoch=41)
        return await original(epoch)

    group.engine.form = form  # type: ignore[method-assign]
    simulation.start(group)
    await simulation.submit(a_request("A"))
    await simulation.finish()
    assert group.records[0].epoch.number == 42


@virtually
async def test_a_group_with_fewer_slots_than_promised_is_not_formed_and_reports_it() -> None:
    simulation = a_simulation()
    await simulation.pool.promise_slots(REVISION, 128)
    await simulation.pool.set_revision(REVISION, 1)
    group = simulation.add_group(a_shape(slots=64))
    simulation.start(group)
    await simulation.submit(a_request("A"))
    await asyncio.sleep(30)
    assert not await is_formed(group)
    assert "64 slots" in group.logs[0].reasons[0]
    assert "128 were promised" in group.logs[0].reasons[0]
    assert len(group.logs[0].reasons) < 20, "it tries again ever more slowly"
    assert (await simulation.pool.status("A.0")).state is OwnershipState.QUEUED
    stats = await simulation.pool.stats()
    assert (stats.groups, stats.groups_formed) == (("g0",), ())
    await simulation.stop()


@virtually
async def test_a_group_with_other_blocks_than_a_living_one_is_not_formed_and_reports_it() -> None:
    simulation = a_simulation()
    first = simulation.add_group(a_shape())
    simulation.start(first)
    await asyncio.sleep(5)
    second = simulation.add_group(a_shape(block_tokens=8), name="g1")
    simulation.start(second)
    await asyncio.sleep(30)
    assert await is_formed(first)
    assert not await is_formed(second)
    assert "has 8 tokens in a KV block" in second.logs[0].reasons[0]
    assert "--block-tokens 4" in second.logs[0].reasons[0]
    await simulation.stop()


@virtually
async def test_forming_a_group_is_retried_for_hours() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), refuses=lambda _: "stage 0 does not answer")
    simulation.start(group)
    await asyncio.sleep(6_000)
    assert len(group.logs[0].reasons) > 1_100
    assert not group.task.done()
    await simulation.stop()


@virtually
async def test_a_group_with_fewer_slots_skips_larger_requests_and_a_larger_group_runs_them() -> None:
    simulation = a_simulation()
    large = simulation.add_group(a_shape(slots=128, max_model_len=128), name="large", cost=LinearCost(step_us=20_000))
    simulation.start(large)
    for name in "AB":
        await simulation.submit(a_request(name, new=90))
    await tokens_at_least(simulation, "A.0", 1)
    assert await simulation.pool.set_promise(REVISION, 64, expected=128) == 64
    small = simulation.add_group(a_shape(slots=64, max_model_len=128), name="small", cost=LinearCost(step_us=20_000))
    simulation.start(small)
    with pytest.raises(NeverFits):
        await simulation.submit(a_request("C", new=90))
    for name in "DEFG":
        await simulation.submit(a_request(name, new=9))
    await tokens_at_least(simulation, "G.0", 1)
    assert (await simulation.pool.larger_requests(REVISION, 64)).unfinished == 2
    await simulation.finish()
    assert {"A.0", "B.0"} <= set(large.logs[0].ends)
    assert {"D.0", "E.0"} <= set(small.logs[0].ends)
    assert (await simulation.pool.larger_requests(REVISION, 64)).unfinished == 0
    assert {(await simulation.pool.read(f"{name}.0", 0)).end for name in "AB"} == {End(FinishReason.LENGTH, 90)}


@virtually
async def test_the_pool_learns_within_one_heartbeat_that_the_group_serves() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape())
    simulation.start(group)
    await serving(simulation, group)
    await asyncio.sleep(0.6)
    stats = await simulation.pool.stats()
    assert (stats.groups_formed, stats.offered_slots) == (("g0",), group.engine.shape.slots)
    await simulation.stop()


@virtually
@pytest.mark.parametrize(("chosen", "offered"), [(True, 64), (False, None)])
async def test_slots_that_depend_on_free_memory_are_not_offered_permanently(chosen: bool, offered: int | None) -> None:
    simulation = a_simulation(choices=SchedulingOptions(are_slots_chosen=chosen))
    group = simulation.add_group(a_shape(slots=64, max_model_len=128))
    simulation.start(group)
    await serving(simulation, group)
    await asyncio.sleep(0.6)
    assert (await simulation.pool.stats()).offered_slots == offered
    await simulation.stop()


@virtually
async def test_a_group_promises_no_more_slots_than_the_longest_request_needs() -> None:
    simulation = a_simulation()
    simulation.start(simulation.add_group(a_shape(slots=128, max_model_len=48)))
    await simulation.submit(a_request("A"))
    await simulation.finish()
    assert (await simulation.pool.stats()).promised_slots == 48


@virtually
async def test_a_policy_that_cannot_work_on_the_group_ends_the_scheduler_with_a_reason() -> None:
    simulation = a_simulation(policy=RequestLevelPolicy())
    group = simulation.add_group(a_shape(slots=32, max_model_len=64))
    simulation.start(group)
    assert group.task is not None
    with pytest.raises(ExceptionGroup) as caught:
        await group.task
    assert caught.group_contains(SettingError, match="64")


@virtually
async def test_a_scheduler_that_ends_by_such_a_refusal_releases_its_seat() -> None:
    simulation = a_simulation(policy=RequestLevelPolicy())
    group = simulation.add_group(a_shape(slots=32, max_model_len=64))
    simulation.start(group)
    assert group.task is not None
    await asyncio.wait((group.task,))
    simulation.policy = IterationPolicy()
    refused_s = asyncio.get_running_loop().time()
    group.task = None
    simulation.start(group)
    await serving(simulation, group)
    assert asyncio.get_running_loop().time() - refused_s < 0.2
    await simulation.stop()


@virtually
async def test_stop_commits_the_step_in_flight_and_gives_the_rest_back() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=200_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=10))
    await tokens_at_least(simulation, "A.0", 3)
    await asyncio.sleep(0.1)
    await simulation.stop()
    status = await simulation.pool.status("A.0")
    assert (status.state, status.tokens) == (OwnershipState.QUEUED, 4)
    assert (await simulation.pool.stats()).groups == ()


@virtually
async def test_a_scheduler_cancelled_while_it_drains_ends_at_once() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=200_000))
    scheduler = simulation.start(group)
    await simulation.submit(a_request("A", new=10))
    await tokens_at_least(simulation, "A.0", 3)
    simulation.lose_all_calls(group)
    await asyncio.sleep(0.3)
    scheduler.stop()
    await asyncio.sleep(0.01)
    cancelled_s = asyncio.get_running_loop().time()
    assert group.task is not None
    group.task.cancel()
    await asyncio.wait((group.task,))
    assert asyncio.get_running_loop().time() == cancelled_s


@virtually
async def test_a_scheduler_cancelled_during_a_step_ends_at_once() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=200_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=10))
    await tokens_at_least(simulation, "A.0", 3)
    simulation.lose_all_calls(group)
    await asyncio.sleep(0.3)
    cancelled_s = asyncio.get_running_loop().time()
    await simulation.crash(group)
    assert asyncio.get_running_loop().time() == cancelled_s


@virtually
async def test_a_stopping_scheduler_claims_nothing_more() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=500_000))
    scheduler = simulation.start(group)
    await simulation.submit(a_request("A", new=10))
    await tokens_at_least(simulation, "A.0", 1)
    scheduler.stop()
    await simulation.submit(a_request("B", new=1))
    await simulation.stop()
    assert (await simulation.pool.status("B.0")).first_claimed_ms is None


@virtually
async def test_stop_while_another_process_holds_the_seat_returns_at_once() -> None:
    simulation = a_simulation()
    other = Caller(group="g0", process="other", revision=REVISION)
    assert isinstance(await simulation.pool.enter(other, 1, reported_epoch=0), SeatEntered)
    group = simulation.add_group(a_shape())
    simulation.start(group)
    await asyncio.sleep(0.2)
    before_s = asyncio.get_running_loop().time()
    await simulation.stop()
    assert asyncio.get_running_loop().time() - before_s < 0.1


@virtually
async def test_a_second_process_waits_for_the_end_of_the_lease_and_continues_the_requests() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000))
    simulation.start(group)
    request = await simulation.submit(a_request("A", new=10))
    await tokens_at_least(simulation, "A.0", 2)
    await simulation.crash(group)
    crashed_s = asyncio.get_running_loop().time()
    simulation.start(group)
    await serving(simulation, group)
    assert 2.0 < asyncio.get_running_loop().time() - crashed_s < 5.0
    await simulation.finish()
    assert (await simulation.log_of("A.0"))[0] == simulation.expected(request)[0]


@virtually
async def test_a_successor_that_knows_its_predecessor_exited_takes_the_seat_at_once() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000))
    simulation.start(group)
    await serving(simulation, group)
    await simulation.crash(group)
    simulation.choices = SchedulingOptions(is_predecessor_dead=True)
    crashed_s = asyncio.get_running_loop().time()
    simulation.start(group)
    await serving(simulation, group)
    assert asyncio.get_running_loop().time() - crashed_s < 0.2
    await simulation.stop()


@virtually
async def test_a_process_that_lost_its_seat_drops_everything_and_waits_for_the_lease() -> None:
    simulation = a_simulation(choices=SchedulingOptions(is_predecessor_dead=True))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=40))
    await tokens_at_least(simulation, "A.0", 2)
    other = Caller(group="g0", process="other", revision=REVISION)
    taken = await simulation.pool.enter(other, 1, reported_epoch=0, is_holder_dead=True)
    assert isinstance(taken, SeatEntered)
    for _ in range(20):
        await asyncio.sleep(0.5)
        await simulation.pool.heartbeat(other)
    assert not await is_formed(group)
    assert (await simulation.pool.status("A.0")).state is OwnershipState.QUEUED
    await simulation.pool.leave(other)
    await simulation.finish()
