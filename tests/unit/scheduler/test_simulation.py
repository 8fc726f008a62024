"""The real loop, pool and policies on virtual time, over thousands of seeded simulations with faults.

Each simulation checks on the way: the group's state after every step, what the simulated stages accept, all limits. At
the end it checks that every request ended exactly once with exactly the model's tokens, no slot is reserved, and
nothing hangs. A failure names its seed; `run_simulation(seed)` repeats it.
"""

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from orca.core.domain.engine import EngineShape, PrefixCharge
from orca.core.domain.request import FinishReason, Request
from orca.core.domain.step import Epoch, Step
from orca.pool.poison import FAILURES_MAX
from orca.scheduler.dependencies import LoopTimings
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import StepFault, seeded_tokens
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import Policy
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from support.effort import tries
from support.scheduler.cycles import a_random_cycle
from support.scheduler.scheduler_simulation import Simulation, a_request

SEEDS_PER_TEST = tries(150)
EOS = 0


def random_simulation(chance: random.Random, *, has_sources: bool, prefix_cache: bool) -> Simulation:
    max_batch_size = chance.randint(1, 4)
    policy: Policy = IterationPolicy()
    max_batch_tokens = max_batch_size + chance.randint(1, 8) if chance.random() < 0.3 else None
    cycle: CycleControls | None = None
    if (kind := chance.random()) < 0.2:
        habits = Habits(**{name: chance.random() < 0.5 for name in Habits.__dataclass_fields__})
        policy, max_batch_tokens = RequestLevelPolicy(microbatch_size=chance.choice([None, 1, 2]), habits=habits), None
    elif kind < 0.5:
        # Groups of this simulation may have one stage only.
        policy, max_batch_tokens, cycle = RoundRobinPolicy(), None, a_random_cycle(chance, max_batch_size)
    return Simulation(
        tokens=seeded_tokens(chance.randrange(1000), chance.choice([8, 30])),
        eos=(EOS,) if chance.random() < 0.7 else (),
        choices=SchedulingOptions(
            max_batch_size=max_batch_size,
            prefetch=chance.randint(0, 1),
            max_batch_tokens=max_batch_tokens,
            is_encoder_decoder=has_sources,
            cycle=cycle,
            prefix_cache=prefix_cache and not has_sources and not isinstance(policy, RequestLevelPolicy),
            prefix_charge=chance.choice([*PrefixCharge]),
        ),
        policy=policy,
        chance=chance,
        delay_ms=chance.choice([0.0, 0.0, 1.0, 5.0]),
        timings=LoopTimings(flush_s=0.5, commit_s=chance.choice([0.0, 0.0, 0.02, 0.5])),
    )


def add_random_group(simulation: Simulation, name: str, *, is_faulty: bool, slots: int) -> None:
    chance = simulation.chance
    faults_left = chance.randint(1, 4) if is_faulty else 0

    def faults(step: Step) -> StepFault | None:  # noqa: ARG001 - the engine's shape
        nonlocal faults_left
        if faults_left and chance.random() < 0.1:
            faults_left -= 1
            return chance.choice(list(StepFault))
        return None

    def refuses(epoch: Epoch) -> str | None:  # noqa: ARG001 - the engine's shape
        return "a stage is still loading" if is_faulty and chance.random() < 0.2 else None

    shape = EngineShape(stages=chance.randint(1, 3), slots=slots, block_tokens=4, max_model_len=32)
    cost = LinearCost(step_us=chance.choice([0, 500, 5_000]), token_us=chance.choice([0, 100]))
    simulation.start(simulation.add_group(shape, name=name, cost=cost, faults=faults, refuses=refuses))


async def submit_at_random(simulation: Simulation, *, cancels: bool) -> set[str]:
    """Submit a dozen requests over some time. Returns: the parents that were cancelled."""
    chance, cancelled = simulation.chance, set()
    for number in range(chance.randint(3, 12)):
        request = a_request(
            f"r{number}",
            prompt=chance.randint(1, 16),
            new=chance.randint(1, 12),
            prefix=chance.randint(1, 3) if simulation.choices.is_encoder_decoder else 0,
            ignore_eos=chance.random() < 0.2,
        )
        if simulation.choices.prefix_cache:
            request = with_other_end(request, chance)
        await simulation.submit(request)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.05)
        if cancels and chance.random() < 0.3:
            cancelled.add(parent := f"r{chance.randint(0, number)}")
            await simulation.pool.cancel(parent)
    return cancelled


def with_other_end(request: Request, chance: random.Random) -> Request:
    """Return a request whose prompt has a prefix in common with some of the others, and perhaps a salt."""
    common = chance.randint(0, len(request.prompt))
    end = tuple(chance.randint(200, 201) for _ in request.prompt[common:])
    return replace(request, prompt=request.prompt[:common] + end, cache_salt=chance.choice([None, None, None, "s"]))


async def crash_at_random(simulation: Simulation) -> None:
    """Let schedulers die and be started again, for a while."""
    for _ in range(simulation.chance.randint(1, 3)):
        await asyncio.sleep(simulation.chance.random() * 0.3)
        group = simulation.chance.choice(list(simulation.groups.values()))
        await simulation.crash(group)
        await asyncio.sleep(simulation.chance.choice([0.0, 0.5, 4.0]))
        simulation.start(group)


async def check_ends(simulation: Simulation, cancelled: set[str]) -> None:
    for request_id, request in simulation.submitted.items():
        tokens, end = await simulation.log_of(request_id)
        expected, reason = simulation.expected(request)
        assert end is not None
        assert end.count == len(tokens)
        if end.reason is FinishReason.CANCELLED:
            assert request.parent in cancelled
            assert tokens == expected[: len(tokens)]
        elif end.reason is FinishReason.ERROR:
            # Chance hit it so often that it counts as poison: one in some thousand simulations.
            assert simulation.pool.state.records[request_id].failures == FAILURES_MAX
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, end.reason) == (expected, reason), request_id


async def run_simulation(
    seed: int, *, groups: int = 1, faults: bool = False, crashes: bool = False, has_sources: bool = False
) -> Simulation:
    """Run the simulation of a seed. Every second one has a prefix cache, as far as its policy and model can."""
    chance = random.Random(seed)
    simulation = random_simulation(chance, has_sources=has_sources, prefix_cache=seed % 2 == 1)
    simulation.loss = chance.choice([0.0, 0.02, 0.1]) if faults else 0.0
    # The least is what a request of the model's length needs: with sources in the split that needs most.
    slots = chance.choice([36, 48, 96] if has_sources else [32, 48, 96])
    for number in range(groups):
        add_random_group(simulation, f"g{number}", is_faulty=faults, slots=slots)
    crashing = asyncio.create_task(crash_at_random(simulation)) if crashes else None
    cancelled = await submit_at_random(simulation, cancels=faults)
    if crashing is not None:
        await crashing
    await simulation.finish()
    await check_ends(simulation, cancelled)
    return simulation


def in_simulations(seeds: range, **kinds: object) -> list[Simulation]:
    simulations = []
    for seed in seeds:
        try:
            simulations.append(virtual_time.run(run_simulation(seed, **kinds)))  # type: ignore[arg-type]
        except BaseException as error:
            error.add_note(f"seed {seed}, {kinds}")
            raise
    return simulations


def seeds(test: int) -> range:
    """A block of seeds for each test; ORCA_SEEDS=n makes the blocks n long."""
    length = int(os.environ.get("ORCA_SEEDS", SEEDS_PER_TEST))
    return range(test * 1_000_000, test * 1_000_000 + length)


def test_without_faults_every_request_ends_once_with_the_models_tokens() -> None:
    for simulation in in_simulations(seeds(1)):
        (group,) = simulation.groups.values()
        ends = [request_id for log in group.logs for request_id in log.ends]
        assert Counter(ends) == Counter(list(simulation.submitted)), "an end was decided twice or never"


def test_failing_steps_epochs_calls_and_cancels_lose_and_repeat_nothing() -> None:
    in_simulations(seeds(2), faults=True)


def test_dead_schedulers_lose_and_repeat_nothing() -> None:
    in_simulations(seeds(3), groups=2, crashes=True)


def test_dead_schedulers_of_groups_with_faults_lose_and_repeat_nothing() -> None:
    in_simulations(seeds(4), groups=2, crashes=True, faults=True)


def test_requests_with_sources_end_once_with_the_models_tokens() -> None:
    for simulation in in_simulations(seeds(7), has_sources=True):
        (group,) = simulation.groups.values()
        ends = [request_id for log in group.logs for request_id in log.ends]
        assert Counter(ends) == Counter(list(simulation.submitted)), "an end was decided twice or never"


def test_requests_with_sources_survive_dead_schedulers_and_failing_steps() -> None:
    in_simulations(seeds(8), groups=2, crashes=True, faults=True, has_sources=True)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("has_sources", [False, True])
def test_many_more_simulations_lose_and_repeat_nothing(groups: int, crashes: bool, has_sources: bool) -> None:
    in_simulations(range(10_000_000, 10_003_000), groups=groups, crashes=crashes, faults=True, has_sources=has_sources)


@pytest.mark.parametrize("has_sources", [False, True])
def test_within_a_group_an_earlier_request_has_run_at_least_as_many_iterations(has_sources: bool) -> None:
    for seed in seeds(5):
        simulation = virtual_time.run(run_simulation(seed, has_sources=has_sources))
        if simulation.choices.max_batch_tokens is None and isinstance(simulation.policy, IterationPolicy):
            check_order(simulation, seed)


def check_order(simulation: Simulation, seed: int) -> None:
    (group,) = simulation.groups.values()
    records = [record for record in group.records if record.rows]
    last = {row.request_id: record.step for record in records for row in record.rows}
    runs: Counter[str] = Counter()
    for record in records:
        runs.update(row.request_id for row in record.rows)
        # A request that has run and will run again; those that have not come yet are not in the pool.
        alive = [request_id for request_id in runs if last[request_id] > record.step]
        alive.sort(key=lambda request_id: simulation.submitted[request_id].arrival)
        counts = [runs[request_id] for request_id in alive]
        assert all(older >= younger for older, younger in pairwise(counts)), f"seed {seed}, step {record.step}"


def test_two_runs_with_one_seed_take_the_same_steps() -> None:
    def steps(seed: int) -> list[object]:
        simulation = virtual_time.run(run_simulation(seed, groups=2, crashes=True, faults=True))
        return [(r.step, r.rows, r.submitted_ns) for group in simulation.groups.values() for r in group.records]

    for seed in seeds(6)[:10]:
        assert steps(seed) == steps(seed)
