"""Measures claims by arrival and by order deadline while many requests wait, and the memory of the index by class."""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from redis.asyncio import Redis

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.core.domain.request import Request, SamplingParams
from orca.pool.order.order_class import DeadlineKind, class_of
from orca.pool.order.order_rules import ClaimOrder, OrderRules, RunEstimates
from orca.pool.records import Caller, OnDisconnect, Submission
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.settings import PoolSettings

CALLER = Caller(group="g", process="p", revision="r")
LEVELS = (1_000, 100_000, 1_000_000)
BATCHES = ((1, 100), (16, 20))
"""Requests that a claim takes at most, and claims of this size."""

ORDER = ClaimOrder(
    rules=OrderRules(),
    estimates=RunEstimates(prompt_token_ms=0.2, step_ms=20.0, least_step_ms=15.0, prompt_cost=0.4),
    free_prompt_tokens=100_000,
    total_prompt_tokens=100_000,
)
SLOTS: dict[str, Any] = {"free_slots": 10**9, "total_slots": 10**9, "block_tokens": 16}
CALL_MS_MAX = 600_000
"""Time for one call."""

LEASE_MS = 100 * CALL_MS_MAX
"""Lease of the group, which sends no heartbeats."""

SUBMITTED_AT_ONCE = 64

ALONE = 10_000
"""Most requests of calls with one choice, whose memory is measured. The others come as calls of many choices."""

CHOICES = 100


@dataclass(frozen=True, slots=True)
class ClaimTime:
    """The time of a claim."""

    order: str
    taken: int
    caller_us: float  # median
    server_us: float  # mean processor time of the server


@dataclass(frozen=True, slots=True)
class LevelFigures:
    """The figures of one number of waiting requests."""

    waiting: int
    classes: int
    claims: Sequence[ClaimTime]
    build_ms: Sequence[float]  # claims by an order until the index was whole
    request_bytes: float  # of Redis for each waiting request, without the index
    index_bytes: float  # the same for the index


def submission(number: int, choices: int = 1) -> Submission:
    """Return requests of mixed lengths. Every second one has a deadline, which no run of this bench reaches."""
    parent = f"cmpl-{number:032x}"
    requests = tuple(_request(parent, choice, number + choice) for choice in range(choices))
    render = '{"kind":"chat","model":"m","created":1700000000,"stream":true}'
    return Submission(parent=parent, requests=requests, reader="g1/1", on_disconnect=OnDisconnect.KEEP, render=render)


def _request(parent: str, choice: int, number: int) -> Request:
    numbers = Random(number)
    return Request(
        parent=parent,
        choice=choice,
        revision=CALLER.revision,
        prompt=tuple(numbers.choices(range(32_000), k=numbers.randint(16, 128))),
        max_new_tokens=numbers.randint(1, 64),
        sampling=SamplingParams(),
        deadline_ms=None if number % 2 else 10**8 + numbers.randrange(10**8),
    )


def measure(levels: Sequence[int]) -> list[LevelFigures]:
    """Measure each level on a new server."""
    return [asyncio.run(_measure_level(level)) for level in levels]


async def _measure_level(waiting: int) -> LevelFigures:
    settings = PoolSettings(
        max_queued=10**8,
        max_queued_prompt_tokens=10**12,
        bytes_max=10**12,
        seat_lease_ms=LEASE_MS,
        call_timeout_ms=CALL_MS_MAX,
    )
    with tempfile.TemporaryDirectory(prefix="orca-pool-") as folder, EmbeddedRedis(Path(folder)) as server:
        redis = Redis.from_url(server.url, socket_timeout=CALL_MS_MAX / 1_000)
        pool = await open_redis_pool(server.url, "measured", settings)
        try:
            return await _measure_claims(pool, redis, waiting)
        finally:
            await pool.close()
            await redis.aclose()


async def _measure_claims(pool: RedisPool, redis: Redis, waiting: int) -> LevelFigures:
    calls = itertools.count(2)
    await pool.set_revision(CALLER.revision, 1)
    await pool.enter(CALLER, 1, reported_epoch=0)
    empty = await _used_bytes(redis)
    submissions = [submission(number) for number in range(min(waiting, 1_000))]
    classes = {
        class_of(each.requests[0], DeadlineKind.END if each.requests[0].deadline_ms else DeadlineKind.NONE)
        for each in submissions
    }
    alone = min(waiting, ALONE)
    for start in range(0, alone, SUBMITTED_AT_ONCE):
        numbers = range(start, min(start + SUBMITTED_AT_ONCE, alone))
        await asyncio.gather(*(pool.submit(submission(number)) for number in numbers))
    full = await _used_bytes(redis)
    for start in range(alone, waiting, CHOICES):
        await pool.submit(submission(start, min(CHOICES, waiting - start)))
    claims = [await _time_claims(pool, redis, calls, "arrival", None, *batch) for batch in BATCHES]
    before, left = await _used_bytes(redis), (await pool.stats()).queued
    build_ms = await _build_index(pool, calls)
    indexed = await _used_bytes(redis)
    claims += [await _time_claims(pool, redis, calls, "deadline", ORDER, *batch) for batch in BATCHES]
    return LevelFigures(
        waiting=waiting,
        classes=len(classes),
        claims=claims,
        build_ms=build_ms,
        request_bytes=(full - empty) / alone,
        index_bytes=(indexed - before) / (left - len(build_ms)),
    )


async def _build_index(pool: RedisPool, calls: "itertools.count[int]") -> list[float]:
    """Claim requests until the index is whole. Returns: the time of each claim, in ms."""
    took_ms = []
    while (await pool.stats()).by_order is None:
        start_s = time.perf_counter()
        await pool.claim(CALLER, next(calls), most=1, order=ORDER, **SLOTS)
        took_ms.append(1_000 * (time.perf_counter() - start_s))
    return took_ms


async def _time_claims(
    pool: RedisPool,
    redis: Redis,
    calls: "itertools.count[int]",
    name: str,
    order: ClaimOrder | None,
    most: int,
    times: int,
) -> ClaimTime:
    took_s, before_us = [], await _processor_us(redis)
    for _ in range(times):
        start_s = time.perf_counter()
        answer = await pool.claim(CALLER, next(calls), most=most, order=order, **SLOTS)
        took_s.append(time.perf_counter() - start_s)
        assert len(answer.claimed) == most, "a claim found fewer requests than wait"
        assert answer.is_by_order == (order is not None), "the pool claims by another order"
    server_us = (await _processor_us(redis) - before_us) / times
    return ClaimTime(name, most, 1e6 * statistics.median(took_s), server_us)


async def _processor_us(redis: Redis) -> float:
    """Return the processor time of the server's main thread so far. It does not count waits for a processor."""
    found = await redis.info("cpu")
    return 1e6 * float(found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])


async def _used_bytes(redis: Redis) -> int:
    """Return the memory of the data alone: buffers of connections and of the append-only file come and go."""
    return int((await redis.info("memory"))["used_memory_dataset"])


def lines(found: Sequence[LevelFigures]) -> list[str]:
    """Return the figures as text for a terminal."""
    shown = []
    for level in found:
        shown.append(f"{level.waiting} waiting, {level.classes} classes")
        for claim in level.claims:
            times = f"{claim.caller_us:8.0f} us, server {claim.server_us:8.0f} us"
            shown.append(f"  claim of {claim.taken:<3} by {claim.order:<9} {times}")
        built = (
            f"{sum(level.build_ms):.0f} ms in {len(level.build_ms)} claims, at most {max(level.build_ms):.1f} ms each"
        )
        shown.append(f"  building the index: {built}")
        shown.append(
            f"  bytes per waiting request: {level.request_bytes:.0f}, and {level.index_bytes:.0f} of the index"
        )
    return shown


def figures(found: Sequence[LevelFigures]) -> list[Measured]:
    """Return the figures for the benchmark pages."""
    records = []
    for level in found:
        settings: dict[str, Setting] = {"waiting": level.waiting}
        for claim in level.claims:
            chosen: dict[str, Setting] = {**settings, "order": claim.order, "taken": claim.taken}
            records.append(measured("Time of a claim", claim.caller_us, "us", chosen))
            records.append(measured("Time of a claim in the server", claim.server_us, "us", chosen))
        records.append(measured("Time to build the index", sum(level.build_ms), "ms", settings))
        records.append(measured("Longest claim of these", max(level.build_ms), "ms", settings))
        records.append(measured("Memory of a waiting request", level.request_bytes, "bytes", settings))
        records.append(measured("Memory of its place in the index", level.index_bytes, "bytes", settings))
    return records
