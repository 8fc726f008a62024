"""The loop on a real Redis and real time, with simulated stages: what the in-memory pool may have hidden."""

import asyncio
import random
import time
from itertools import count
from pathlib import Path

import pytest

from orca.core.domain.engine import EngineShape
from orca.core.domain.request import Request, Token
from orca.pool.records import Caller, OnDisconnect, OwnershipState, Submission
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.engines.simulated_engine import SimulatedEngine, StepFault, seeded_tokens
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import Observer
from orca.scheduler.policy.iteration import IterationPolicy
from support.scheduler.scheduler_simulation import REVISION, a_request
from support.waiting import PATIENT_POOL, until

TOKENS = seeded_tokens(7)


def a_group(pool: RedisPool, name: str, chance: random.Random, *, has_sources: bool) -> GroupScheduler:
    """A group whose stages die now and then."""
    engine = SimulatedEngine(
        EngineShape(stages=2, slots=512, block_tokens=16, max_model_len=128),
        cost=LinearCost(step_us=500),
        tokens=TOKENS,
        faults=lambda step: StepFault.DEATH if step.number > 20 and chance.random() < 0.02 else None,
    )
    dependencies = Dependencies(
        pool=pool,
        engine=engine,
        policy=IterationPolicy(),
        caller=Caller(group=name, process=f"{name}-p1", revision=REVISION),
        calls=count(1),
        clock_ns=time.monotonic_ns,
        observer=Observer(),
    )
    options = SchedulingOptions(max_batch_size=4, prefetch=1, is_encoder_decoder=has_sources)
    return GroupScheduler(dependencies, options)


async def submit(pool: RedisPool, request: Request) -> None:
    await pool.submit(
        Submission(parent=request.parent, requests=(request,), reader="r", on_disconnect=OnDisconnect.KEEP)
    )


async def wait_until_ended(pool: RedisPool, count: int) -> None:
    async def have_ended() -> bool:
        return (await pool.stats()).ended >= count

    await until(have_ended, limit_s=60)


@pytest.mark.parametrize(("groups", "prefix"), [(1, 0), (2, 0), (2, 2)])
async def test_every_log_has_the_models_tokens_even_if_stages_die(tmp_path: Path, groups: int, prefix: int) -> None:
    """Requests with a prefix are those of an encoder-decoder model: a claim counts the slots of both tables."""
    chance = random.Random(groups)
    with EmbeddedRedis(tmp_path) as redis:
        pool = RedisPool(redis.url, "test", PATIENT_POOL)
        await pool.promise_slots(REVISION, 512)
        await pool.set_revision(REVISION, 1)
        sizes = [(chance.randint(1, 64), chance.randint(1, 32)) for _ in range(40)]
        requests = [a_request(f"r{n}", prompt=prompt, new=new, prefix=prefix) for n, (prompt, new) in enumerate(sizes)]
        for request in requests:
            await submit(pool, request)
        schedulers = [a_group(pool, f"g{n}", chance, has_sources=prefix > 0) for n in range(groups)]
        async with asyncio.TaskGroup() as tasks:
            for scheduler in schedulers:
                tasks.create_task(scheduler.run())
            await wait_until_ended(pool, len(requests))
            for scheduler in schedulers:
                scheduler.stop()
        for request in requests:
            log = await pool.read(request.id, 0)
            assert log.tokens == tuple(Token(TOKENS(request.id, i)) for i in range(request.max_new_tokens))
            assert (await pool.status(request.id)).state is OwnershipState.ENDED
        await pool.close()
