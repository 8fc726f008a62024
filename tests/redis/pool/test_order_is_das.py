"""The order of a claim is that of DAS (scheduler/policy/das.py) on random queues, in the twin and in each Redis."""

import asyncio

import pytest

from orca.pool.records import Submission
from support.pool.beds import REVISION, Bed, RedisBed, Scheduler
from support.pool.random_queues import BLOCK, by_das, random_queue


async def claimed_by_order(bed: Bed, scheduler: Scheduler, seed: int) -> tuple[list[str], list[str]]:
    """Return what a claim takes from a random queue, and what DAS takes. The queue is empty afterwards."""
    queue = random_queue(seed, REVISION)
    submissions = [Submission(parent=each.parent, requests=(each,), reader="reader") for each in queue.requests]
    stored = [each for accepted in await asyncio.gather(*map(bed.pool.submit, submissions)) for each in accepted]
    answer = await bed.pool.claim(
        scheduler.caller,
        scheduler.next_call(),
        free_slots=queue.slots,
        total_slots=10_000,
        block_tokens=BLOCK,
        most=queue.most,
        order=queue.order,
    )
    await asyncio.gather(*(bed.pool.forget(request.parent) for request in queue.requests))
    return [claimed.request.id for claimed in answer.claimed], by_das(queue, stored)


async def check(bed: Bed, seeds: range) -> None:
    await bed.pool.set_revision(REVISION, 1)
    scheduler = Scheduler(bed)
    await scheduler.enter()
    for seed in seeds:
        found, expected = await claimed_by_order(bed, scheduler, seed)
        assert found == expected, f"seed {seed}"
        if seed % 10 == 0:
            await scheduler.heartbeat()


async def test_a_claim_takes_what_das_takes(bed: Bed) -> None:
    await check(bed, range(60))


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, 100_000, 10_000))
async def test_a_claim_in_redis_takes_what_das_takes_from_many_queues(redis_bed: RedisBed, start: int) -> None:
    await check(redis_bed, range(start, start + 10_000))
