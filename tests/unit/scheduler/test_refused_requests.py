"""Requests that the stages refuse, in the real loop on virtual time: each ends with its reason, and no other one does.

A failure of a random simulation names its seed; `run_refusing_world(seed)` repeats it.
"""

import asyncio
import random
from itertools import pairwise

import pytest

from orca.core.domain.request import End, FinishReason
from orca.core.domain.step import Step
from orca.scheduler.dependencies import LoopTimings
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import StepFault, seeded_tokens
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchBounds, Policy
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from support.effort import tries
from support.scheduler.cycles import a_random_cycle
from support.scheduler.scheduler_simulation import (
    Group,
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    steps_of,
    virtually,
)

SEEDS = range(9_000_000, 9_000_000 + tries(150))
WHY = "token 7 is not allowed"


class Refusals:
    """A plan: the index at which each request is refused; 0 is before its first token."""

    def __init__(self, at: dict[str, int]) -> None:
        self.at = at

    def __call__(self, request_id: str, index: int) -> str | None:
        return WHY if index >= self.at.get(request_id, index + 1) else None


async def check_ends(simulation: Simulation, at: dict[str, int]) -> None:
    for request_id, request in simulation.submitted.items():
        tokens, end = await simulation.log_of(request_id)
        expected, reason = simulation.expected(request)
        if request_id in at:
            assert (tokens, end) == (expected[: at[request_id]], End(FinishReason.REFUSED, at[request_id], detail=WHY))
        else:
            assert end is not None
            assert (tokens, end.reason) == (expected, reason), request_id


def check_nobody_noticed(group: Group) -> None:
    """No epoch ended, nobody was blamed, and nobody had to run alone."""
    (log,) = group.logs
    assert (log.reasons, log.failed, log.alone) == ([], [], [])
    assert {record.epoch.number for record in group.records} == {1}


POLICIES: list[Policy] = [
    IterationPolicy(),
    RequestLevelPolicy(),
    RequestLevelPolicy(microbatch_size=2),
    RequestLevelPolicy(habits=Habits.without(["computes_ended", "holds_results"])),
    RoundRobinPolicy(),
]
CYCLE = CycleControls(encode_batch=3, decode_steps=2)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe(BatchBounds(max_batch_size=1)))
@pytest.mark.parametrize(("stages", "prefetch"), [(1, 0), (1, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("index", [0, 1, 5])
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_refused_request_ends_with_its_reason_and_its_neighbours_with_their_tokens(
    policy: Policy, stages: int, prefetch: int, index: int, prefix: int
) -> None:
    """A request with a source has two rows in its first step, and so two refusals in one result. It ends once."""
    virtual_time.run(refuse_one(policy, stages, prefetch, index, prefix))


async def refuse_one(policy: Policy, stages: int, prefetch: int, index: int, prefix: int) -> None:
    choices = SchedulingOptions(max_batch_size=4, prefetch=prefetch, is_encoder_decoder=prefix > 0, cycle=CYCLE)
    simulation = a_simulation(policy=policy, choices=choices)
    plan = Refusals({"B.0": index, "D.0": index})
    group = simulation.add_group(a_shape(stages=stages, slots=256), refusals=plan, cost=LinearCost(step_us=1_000))
    await simulation.queue_up(a_request(name, new=8, prefix=prefix) for name in "ABCDE")
    simulation.start(group)
    await simulation.finish()
    await check_ends(simulation, plan.at)
    check_nobody_noticed(group)
    (log,) = group.logs
    assert sorted(log.ends) == sorted(simulation.submitted)


@pytest.mark.parametrize(("size", "prefetch"), [(1, 0), (1, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("refused", ["A", "AB", "B"])
def test_requests_with_the_prompt_of_a_refused_one_have_their_tokens(size: int, prefetch: int, refused: str) -> None:
    """The others come in the step that frees the refused one if there is a place for only one."""
    virtual_time.run(refuse_a_shared_prompt(size, prefetch, refused))


async def refuse_a_shared_prompt(size: int, prefetch: int, refused: str) -> None:
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=size, prefetch=prefetch, prefix_cache=True))
    plan = Refusals({f"{name}.0": 0 for name in refused})
    group = simulation.add_group(a_shape(slots=512), refusals=plan, cost=LinearCost(step_us=1_000))
    await simulation.queue_up(a_request(name, prompt=40, new=8) for name in "ABCD")
    simulation.start(group)
    await simulation.finish()
    await check_ends(simulation, plan.at)
    check_nobody_noticed(group)


@virtually
async def test_neighbours_have_a_token_in_every_step_while_fifteen_requests_are_refused() -> None:
    """No time is measured: a neighbour that waits for anything leaves a step out."""
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=16))
    plan = Refusals({f"bad{number}.0": number % 3 for number in range(15)})
    group = simulation.add_group(a_shape(slots=1024, max_model_len=256), refusals=plan, cost=LinearCost(step_us=2_000))
    neighbours = [a_request(f"n{number}", new=60) for number in range(8)]
    await simulation.queue_up(neighbours)
    simulation.start(group)
    for number in range(15):
        await asyncio.sleep(0.004)
        await simulation.submit(a_request(f"bad{number}", new=10))
    await simulation.finish()
    await check_ends(simulation, plan.at)
    check_nobody_noticed(group)
    for request in neighbours:
        steps = steps_of(group, request.id)
        assert len(steps) == 60
        assert all(after - before == 1 for before, after in pairwise(steps)), request.id


@virtually
async def test_a_refused_suspect_ends_alone_and_the_others_go_on() -> None:
    """The rule of poison and a refusal meet: it breaks two epochs, runs alone, and is refused there."""
    simulation, crashes = a_simulation(), iter([StepFault.CRASH, StepFault.CRASH])
    plan = Refusals({})

    def breaks_twice(step: Step) -> StepFault | None:
        return next(crashes, None) if step.rows else None

    group = simulation.add_group(a_shape(), faults=breaks_twice, refusals=plan, cost=LinearCost(step_us=10_000))
    await simulation.queue_up(a_request(name, new=4) for name in "AB")
    simulation.start(group)
    await simulation.until(lambda: has_failed(group, 4))
    plan.at["A.0"] = 0
    await simulation.finish()
    await check_ends(simulation, plan.at)


async def has_failed(group: Group, times: int) -> bool:
    return len(group.logs[0].failed) >= times


@virtually
async def test_a_request_that_no_message_can_hold_is_refused_before_it_is_in_a_step() -> None:
    simulation = a_simulation(refuse=lambda request: "top_k is too large" if request.sampling.top_k else None)
    group = simulation.add_group(a_shape())
    simulation.start(group)
    await simulation.submit(a_request("A", new=6))
    await simulation.submit(a_request("B", top_k=1 << 40))
    await simulation.finish()
    assert await simulation.log_of("B.0") == ([], End(FinishReason.REFUSED, 0, detail="top_k is too large"))
    assert steps_of(group, "B.0") == []
    check_nobody_noticed(group)


@virtually
async def test_a_long_reason_is_cut_to_what_the_pool_has_reserved() -> None:
    simulation = a_simulation(refuse=lambda request: "x" * 5_000)  # noqa: ARG005 - shape of the argument
    simulation.start(simulation.add_group(a_shape()))
    await simulation.submit(a_request("A"))
    await simulation.finish()
    _, end = await simulation.log_of("A.0")
    assert end is not None
    assert end.detail == "x" * 300


async def run_refusing_world(seed: int) -> None:
    """Refusals beside crashes of the scheduler, deaths of stages, lost calls and cancels of nobody."""
    chance = random.Random(seed)
    max_batch_size = chance.randint(1, 4)
    policies: list[Policy] = [
        IterationPolicy(),
        RoundRobinPolicy(),
        RequestLevelPolicy(microbatch_size=chance.choice([None, 1, 2])),
    ]
    (policy,) = chance.choices(policies, (4, 3, 3))
    simulation = Simulation(
        tokens=seeded_tokens(chance.randrange(1000), chance.choice([8, 30])),
        choices=SchedulingOptions(
            max_batch_size=max_batch_size,
            prefetch=chance.randint(0, 1),
            cycle=a_random_cycle(chance, max_batch_size),
            prefix_cache=not isinstance(policy, RequestLevelPolicy) and chance.random() < 0.5,
        ),
        policy=policy,
        chance=chance,
        loss=chance.choice([0.0, 0.05]),
        delay_ms=chance.choice([0.0, 5.0]),
        timings=LoopTimings(flush_s=0.5, commit_s=chance.choice([0.0, 0.02])),
    )
    plan, deaths = Refusals({}), chance.randint(0, 3)

    def dies(step: Step) -> StepFault | None:
        nonlocal deaths
        if step.rows and deaths and chance.random() < 0.1:
            deaths -= 1
            return StepFault.DEATH
        return None

    for number in range(chance.randint(1, 2)):
        shape = a_shape(stages=chance.randint(1, 3), slots=chance.choice([32, 96]), max_model_len=32)
        cost = LinearCost(step_us=2_000)
        simulation.start(simulation.add_group(shape, name=f"g{number}", faults=dies, refusals=plan, cost=cost))
    for number in range(chance.randint(3, 10)):
        request = a_request(f"r{number}", prompt=chance.randint(1, 16), new=chance.randint(1, 12))
        if chance.random() < 0.4:
            plan.at[request.id] = chance.randrange(request.max_new_tokens)
        await simulation.submit(request)
        if chance.random() < 0.2:
            group = chance.choice(list(simulation.groups.values()))
            await asyncio.sleep(chance.random() * 0.1)
            await simulation.crash(group)
            simulation.start(group)
    await simulation.finish()
    await check_ends(simulation, plan.at)


def test_in_any_world_a_refused_request_has_the_tokens_before_its_refusal_and_all_others_all_of_theirs() -> None:
    for seed in SEEDS:
        try:
            virtual_time.run(run_refusing_world(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
