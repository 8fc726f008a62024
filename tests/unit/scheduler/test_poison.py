"""Requests that break every engine which runs them, in the real loop on virtual time: they end, and nobody else does.

A failure of a random simulation names its seed; `run_poisoned_simulation(seed)` repeats it.
"""

import asyncio
import random
from collections import defaultdict

from orca.core.domain.request import End, FinishReason
from orca.core.domain.step import Epoch, Step
from orca.pool.poison import FAILURES_MAX
from orca.scheduler.dependencies import LoopTimings
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import StepFault, seeded_tokens
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import Policy
from orca.scheduler.policy.request_level import RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from support.effort import tries
from support.scheduler.cycles import a_random_cycle
from support.scheduler.scheduler_simulation import Simulation, a_request, a_shape, a_simulation, virtually

SEEDS = range(7_000_000, 7_000_000 + tries(150))
INNOCENT = 1_000
# A claim that got a token further before its death restarts the count: pipelined steps bring it to a few more.
DEATHS_MAX = 2 * FAILURES_MAX


class Poison:
    """A fault plan: an engine fails from inside when it draws the token that is fatal for a request."""

    def __init__(self, fatal: dict[str, int]) -> None:
        self.fatal = fatal  # request -> index of the token that no engine survives
        self.crashes: defaultdict[str, set[Epoch]] = defaultdict(set)  # request -> the epochs that it ended
        self._drawn: dict[
            tuple[Epoch, int], tuple[str, int]
        ] = {}  # epoch and handle -> request, its next token's index

    def __call__(self, step: Step) -> StepFault | None:
        for new in step.new:
            self._drawn[step.epoch, new.handle] = new.request_id, len(new.tokens) - new.prompt_length
        killers = [request_id for row in step.rows if row.sample and (request_id := self._draw(step, row.handle))]
        for request_id in killers:
            self.crashes[request_id].add(step.epoch)
        return StepFault.CRASH if killers else None

    def _draw(self, step: Step, handle: int) -> str | None:
        request_id, index = self._drawn[step.epoch, handle]
        self._drawn[step.epoch, handle] = request_id, index + 1
        return request_id if index >= self.fatal.get(request_id, INNOCENT) else None


async def check_ends(simulation: Simulation, fatal: dict[str, int]) -> None:
    for request_id, request in simulation.submitted.items():
        tokens, end = await simulation.log_of(request_id)
        expected, reason = simulation.expected(request)
        if request_id in fatal:
            assert end == End(FinishReason.ERROR, len(tokens)), request_id
            assert tokens == expected[: len(tokens)]
            assert len(tokens) <= fatal[request_id]
        else:
            assert end is not None
            assert (tokens, end.reason) == (expected, reason), request_id


@virtually
async def test_a_poisoned_request_ends_with_an_error_and_the_others_with_their_tokens() -> None:
    simulation, poison = a_simulation(), Poison({"B.0": 2})
    group = simulation.add_group(a_shape(), faults=poison)
    simulation.start(group)
    for name in "ABC":
        await simulation.submit(a_request(name, new=6))
    await simulation.finish()
    await check_ends(simulation, poison.fatal)
    assert len(poison.crashes["B.0"]) <= FAILURES_MAX + 1, "the first one followed two commits and is not counted"


@virtually
async def test_a_suspect_runs_alone_until_its_first_commit_and_then_with_others() -> None:
    simulation = a_simulation(delay_ms=20.0)
    crashes = 0

    def faults(step: Step) -> StepFault | None:
        nonlocal crashes
        crashes += bool(step.rows)
        return StepFault.CRASH if step.rows and crashes <= 2 else None

    group = simulation.add_group(a_shape(), faults=faults, cost=LinearCost(step_us=10_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=40))
    await simulation.until(lambda: is_blamed(group.logs[0].failed, 2))
    await simulation.submit(a_request("B", new=4))
    await simulation.finish()
    await check_ends(simulation, {})
    assert group.logs[0].alone == ["A.0"]
    names = ["".join(row.request_id[0] for row in record.rows) for record in group.records if record.rows]
    assert names[0] == "A"
    assert "AB" in names, "B joined when A was acquitted, long before A's end"


@virtually
async def test_many_suspects_are_acquitted_one_by_one_and_continue_together() -> None:
    """Each suspect takes a prompt and one step; if the group were emptied for each, fifteen would take their 60 s in
    turn.
    """
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=16, prefetch=1))
    shape = a_shape(slots=8192, max_model_len=1024)

    def breaks_twice(step: Step) -> StepFault | None:
        return StepFault.CRASH if step.rows and step.epoch.number <= 2 else None

    group = simulation.add_group(shape, faults=breaks_twice, cost=LinearCost(step_us=20_000))
    await simulation.pool.set_revision("r1", 1)
    for name in "ABCDEFGHIJKLMNO":
        await simulation.submit(a_request(name, new=200))
    simulation.start(group)
    start_s = asyncio.get_running_loop().time()
    await simulation.finish()
    assert asyncio.get_running_loop().time() - start_s < 8
    assert len(group.logs[0].alone) == 15
    await check_ends(simulation, {})


async def is_blamed(failed: list[str], times: int) -> bool:
    return len(failed) == times


@virtually
async def test_deaths_with_an_external_cause_blame_no_request() -> None:
    simulation = a_simulation()
    faults = iter([StepFault.DEATH] * (2 * FAILURES_MAX))
    group = simulation.add_group(a_shape(), faults=lambda step: next(faults, None))  # noqa: ARG005 - shape of the argument
    simulation.start(group)
    await simulation.submit(a_request("A", new=4))
    await simulation.finish()
    assert (group.logs[0].failed, group.logs[0].alone) == ([], [])
    await check_ends(simulation, {})


@virtually
async def test_a_request_that_only_waited_in_the_group_is_not_blamed() -> None:
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=1))
    poison = Poison({"A.0": 0})
    group = simulation.add_group(a_shape(stages=2), faults=poison, cost=LinearCost(step_us=5_000))
    await simulation.pool.set_revision("r1", 1)
    for name in "ABCD":
        await simulation.submit(a_request(name, prompt=20, new=8))
    simulation.start(group)
    await simulation.finish()
    await check_ends(simulation, poison.fatal)
    assert "D.0" not in group.logs[0].failed


@virtually
async def test_a_scheduler_that_dies_with_its_engine_blames_no_request() -> None:
    simulation, poison = a_simulation(), Poison({"A.0": 0})
    group = simulation.add_group(a_shape(), faults=poison, cost=LinearCost(step_us=100_000))
    simulation.start(group)
    await simulation.submit(a_request("A"))
    await simulation.until(lambda: has_crashed(poison, 1))
    await simulation.crash(group)
    simulation.start(group)
    await simulation.finish()
    assert len(poison.crashes["A.0"]) == FAILURES_MAX + 1
    await check_ends(simulation, poison.fatal)


async def has_crashed(poison: Poison, times: int) -> bool:
    return sum(map(len, poison.crashes.values())) >= times


async def run_poisoned_simulation(seed: int) -> None:
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
        ),
        policy=policy,
        chance=chance,
        delay_ms=chance.choice([0.0, 5.0]),
        timings=LoopTimings(flush_s=0.5),
    )
    poison = Poison({})
    for number in range(chance.randint(1, 2)):
        shape = a_shape(stages=chance.randint(1, 3), slots=chance.choice([32, 96]), max_model_len=32)
        simulation.start(simulation.add_group(shape, name=f"g{number}", faults=poison, cost=LinearCost(step_us=2_000)))
    for number in range(chance.randint(3, 10)):
        request = a_request(f"r{number}", prompt=chance.randint(1, 16), new=chance.randint(1, 12))
        if chance.random() < 0.25:
            poison.fatal[request.id] = chance.randrange(request.max_new_tokens)
        await simulation.submit(request)
    await simulation.finish()
    await check_ends(simulation, poison.fatal)
    assert all(len(ended) <= DEATHS_MAX for ended in poison.crashes.values()), poison.crashes


def test_in_every_simulation_poisoned_requests_end_and_all_others_get_the_models_tokens() -> None:
    for seed in SEEDS:
        try:
            virtual_time.run(run_poisoned_simulation(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
