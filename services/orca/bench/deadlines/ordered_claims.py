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
from orca.pool.order.order_rules import ClaimOrder, OrderRules, RunEstimates
from orca.pool.records import Caller, OnDisconnect, Submission
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.settings import PoolSettings

CALLER = Caller(group="g", process="p", revision="r")
LEVELS = (1_000, 100_000, 1_000_000)
BATCHES = ((1, 20), (16, 3))
"""Requests that a claim takes at most, and claims of this size until requests are added, so that as many wait."""

ROUNDS = 3

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
    await pool.set_revision(CALLER.revision, 1)
    await pool.enter(CALLER, 1, reported_epoch=0)
    alone = min(waiting, ALONE)
    level = WaitingLevel(pool, redis, waiting, itertools.count(2), itertools.count(alone, CHOICES))
    empty = await level.used_bytes()
    for start in range(0, alone, SUBMITTED_AT_ONCE):
        numbers = range(start, min(start + SUBMITTED_AT_ONCE, alone))
        await asyncio.gather(*(pool.submit(submission(number)) for number in numbers))
    full = await level.used_bytes()
    claims = [await level.time_claims("arrival", None, *batch) for batch in BATCHES]
    await level.fill()
    before = await level.used_bytes()
    build_ms = await level.build_index()
    indexed = await level.used_bytes()
    claims += [await level.time_claims("deadline", ORDER, *batch) for batch in BATCHES]
    stats = await pool.stats()
    assert stats.by_order is not None, "the index is whole"
    assert stats.by_order.classes is not None, "the index is whole"
    return LevelFigures(
        waiting=waiting,
        classes=len(stats.by_order.classes),
        claims=claims,
        build_ms=build_ms,
        request_bytes=(full - empty) / alone,
        index_bytes=(indexed - before) / (waiting - len(build_ms)),
    )


@dataclass(frozen=True, slots=True)
class WaitingLevel:
    """A server on which so many requests wait."""

    pool: RedisPool
    redis: Redis
    waiting: int
    calls: "itertools.count[int]"
    numbers: "itertools.count[int]"  # of the requests that it still gets

    async def fill(self) -> None:
        """Submit requests until as many wait again."""
        while (missing := self.waiting - (await self.pool.stats()).queued) > 0:
            await self.pool.submit(submission(next(self.numbers), min(CHOICES, missing)))

    async def claim(self, most: int, order: ClaimOrder | None) -> float:
        """Claim requests. Returns: the time of the call, in s."""
        start_s = time.perf_counter()
        answer = await self.pool.claim(CALLER, next(self.calls), most=most, order=order, **SLOTS)
        took_s = time.perf_counter() - start_s
        assert len(answer.claimed) == most, "a claim found fewer requests than wait"
        assert answer.is_by_order == (order is not None), "the pool claims by another order"
        return took_s

    async def time_claims(self, name: str, order: ClaimOrder | None, most: int, times: int) -> ClaimTime:
        """Time some claims, several times, while as many requests wait."""
        took_s: list[float] = []
        server_us = 0.0
        for _ in range(ROUNDS):
            await self.fill()
            before_us = await self._processor_us()
            took_s += [await self.claim(most, order) for _ in range(times)]
            server_us += await self._processor_us() - before_us
        return ClaimTime(name, most, 1e6 * statistics.median(took_s), server_us / len(took_s))

    async def build_index(self) -> list[float]:
        """Claim requests until the index is whole. Returns: the time of each claim, in ms."""
        took_ms = []
        while (found := (await self.pool.stats()).by_order) is None or found.classes is None:
            took_ms.append(1_000 * await self.claim(1, ORDER))
        return took_ms

    async def used_bytes(self) -> int:
        """Return the memory of the data alone: buffers of connections and of the append-only file come and go."""
        return int((await self.redis.info("memory"))["used_memory_dataset"])

    async def _processor_us(self) -> float:
        """Return the processor time of the server's main thread so far. It does not count waits for a processor."""
        found = await self.redis.info("cpu")
        return 1e6 * float(found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])


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
