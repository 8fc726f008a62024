"""The time of claims beside the time of steps, by arrival rate (TCB, section 6.2.5, Figure 16).

The real scheduler claims from a real Redis, in real time. Its stages are simulated, so a step takes its time and no
processor. The slow log of Redis has the time of every call of the script `claim`. Order deadline drops requests that
are too late in the same script, so this time is part of it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis.asyncio import Redis

from orca.bench.deadlines.choices import OrderChoice
from orca.bench.deadlines.compare import Report, survey
from orca.bench.deadlines.engines import SimulatedRuns
from orca.bench.deadlines.workload import DeadlineMix, deadline_trace
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.core.domain.errors import OrcaError
from orca.core.domain.request import Request, SamplingParams
from orca.planner.workload.trace import Trace
from orca.pool.records import Caller, OnDisconnect, Submission
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.redis.transitions import all_transitions
from orca.pool.schemas import SCHEMAS
from orca.pool.settings import PoolSettings
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.engines.simulated_engine import SimulatedEngine
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import IterationRecord, Observer, Observers
from orca.scheduler.order.claim_orders import ClaimOrders
from orca.scheduler.policy.policies import policy_of

CALLER = Caller(group="measured", process="measured-1", revision="measured")
SURVEY_REQUESTS = 400
CALLS_MAX = 10**6
"""Calls that the slow log keeps."""

STOP_S = 30.0
"""Time limit for the scheduler's stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadPlan:
    """The runs to make: every order at every rate."""

    mix: DeadlineMix
    choices: Sequence[OrderChoice]
    rates: Sequence[float]  # requests per second
    seconds: float  # of arrivals, in each run


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOverhead:
    """The claims of one run."""

    choice: OrderChoice
    rate: float
    waiting: int  # at the end of the arrivals
    steps: int
    step_ms: float  # mean
    claim_us: Sequence[float]  # the server's own time of each claim

    @property
    def share(self) -> float:
        """The time of claims, as a share of the time of steps."""
        return sum(self.claim_us) / 1_000 / (self.steps * self.step_ms)


class TotalStepTime(Observer):
    """Adds up the times of steps, from submit to return."""

    def __init__(self) -> None:
        self.steps, self.total_ns = 0, 0

    def iterated(self, record: IterationRecord) -> None:
        self.steps += 1
        self.total_ns += record.returned_ns - record.submitted_ns


def measure_overhead(runs: SimulatedRuns, plan: OverheadPlan, report: Report) -> list[ClaimOverhead]:
    """Make all runs. Raises: OrcaError."""
    own = survey(runs, plan.mix, requests=SURVEY_REQUESTS, seed=0).own
    found = []
    for rate in plan.rates:
        trace = deadline_trace(plan.mix, own, requests=max(1, round(rate * plan.seconds)), rate=rate, seed=0)
        for choice in plan.choices:
            found.append(asyncio.run(_measure(runs, choice, rate, trace)))
            report(f"{rate:g} requests/s, {choice.name}: {100 * found[-1].share:.2f} % of {found[-1].steps} steps")
    return found


async def _measure(runs: SimulatedRuns, choice: OrderChoice, rate: float, trace: Trace) -> ClaimOverhead:
    settings = PoolSettings(max_queued=10**7, max_queued_prompt_tokens=10**12, bytes_max=10**12)
    with TemporaryDirectory(prefix="orca-overhead-") as folder, EmbeddedRedis(Path(folder)) as server:
        redis = Redis.from_url(server.url)
        pool = await open_redis_pool(server.url, "measured", settings)
        try:
            await pool.set_revision(CALLER.revision, 1)
            await redis.config_set("slowlog-max-len", CALLS_MAX)
            await redis.config_set("slowlog-log-slower-than", 0)
            times = TotalStepTime()
            scheduler = _scheduler(runs, choice, pool, times)
            running = asyncio.create_task(scheduler.run())
            await _submit_all(pool, trace)
            waiting = (await pool.stats()).queued
            scheduler.stop()
            async with asyncio.timeout(STOP_S):
                await running
            claim_us = await _claim_times_us(redis)
        finally:
            await pool.close()
            await redis.aclose()
    if not times.steps:
        raise OrcaError(f"no step ended within {trace.requests[-1].arrival_s:.0f} s: use more --seconds")
    return ClaimOverhead(
        choice=choice,
        rate=rate,
        waiting=waiting,
        steps=times.steps,
        step_ms=times.total_ns / 1e6 / times.steps,
        claim_us=claim_us,
    )


def _scheduler(runs: SimulatedRuns, choice: OrderChoice, pool: RedisPool, times: TotalStepTime) -> GroupScheduler:
    simulation = replace(runs.simulation, rules=choice.rules)
    orders = None if simulation.rules is None else ClaimOrders(simulation.rules)
    return GroupScheduler(
        Dependencies(
            pool=pool,
            engine=SimulatedEngine(simulation.shape, cost=simulation.cost, host_us=simulation.host_us),
            policy=policy_of("iteration", simulation.baseline),
            caller=CALLER,
            calls=count(1),
            clock_ns=time.monotonic_ns,
            observer=times if orders is None else Observers([times, orders.times]),
            orders=orders,
        ),
        SchedulingOptions(
            max_batch_size=runs.max_batch_size,
            prefetch=simulation.prefetch,
            max_batch_tokens=simulation.max_batch_tokens,
        ),
    )


async def _submit_all(pool: RedisPool, trace: Trace) -> None:
    """Submit each request when it is due."""
    clock = asyncio.get_running_loop().time
    start_s = clock()
    async with asyncio.TaskGroup() as tasks:
        for each in trace.requests:
            await asyncio.sleep(start_s + each.arrival_s - clock())
            request = Request(
                parent=f"cmpl-{each.index:032x}",
                choice=0,
                revision=CALLER.revision,
                prompt=(1,) * each.prompt_tokens,
                max_new_tokens=each.new_tokens,
                sampling=SamplingParams(ignore_eos=True),
                deadline_ms=each.deadline_ms,
            )
            submission = Submission(
                parent=request.parent, requests=(request,), reader="client", on_disconnect=OnDisconnect.KEEP
            )
            tasks.create_task(pool.submit(submission))


async def _claim_times_us(redis: Redis) -> list[float]:
    """Return the server's own time of each claim, from the slow log."""
    sha = all_transitions(SCHEMAS)["claim"].sha.encode()
    calls: list[dict[str, Any]] = await redis.slowlog_get(CALLS_MAX)
    return [call["duration"] for call in calls if sha in call["command"][:64]]


def lines(found: Sequence[ClaimOverhead]) -> list[str]:
    """Return a table for a terminal."""
    head = f"{'rate':<8}{'order':<20}{'waiting':>9}{'steps':>8}{'step, ms':>10}{'claims':>8}{'claim, us':>11}"
    shown = [f"{head}{'share, %':>10}"]
    for each in found:
        mean_us = sum(each.claim_us) / max(1, len(each.claim_us))
        shown.append(
            f"{each.rate:<8g}{each.choice.name:<20}{each.waiting:>9}{each.steps:>8}{each.step_ms:>10.1f}"
            f"{len(each.claim_us):>8}{mean_us:>11.0f}{100 * each.share:>10.2f}"
        )
    return shown


def figures(found: Sequence[ClaimOverhead], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the times as figures for the benchmark pages."""
    records = []
    for each in found:
        chosen = {**settings, "rate": each.rate, "order": each.choice.order.value}
        records.append(measured("Time of claims in that of steps", each.share, "%", chosen, scale=100))
        records.append(measured("Requests that wait", each.waiting, "requests", chosen))
    return records
