"""Overloads a server with clients that follow Retry-After, and measures goodput and the cost of refusals.

First a bounded number of clients measures the capacity: each of them sends a call after its previous one has ended.
Then calls arrive at a multiple of the capacity, independent of earlier ones. A refused call is tried again as the
official clients do: after Retry-After, otherwise after a pause that doubles, up to a number of retries. Goodput counts
the calls that ended with all tokens while calls arrived. Every accepted call is read to its end, so that a figure is
valid only if every accepted call got all its tokens.

The clients run in their own process, and their work is not part of the server's. But on one machine they take processor
time from the server, and a late client measures a late refusal. The output shows both.
"""

import asyncio
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

from orca.bench.client import EventStream, LoadTarget, request_bytes, token_count_error
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.planner.workload.trace import Trace

RETRYABLE = frozenset((429, 500, 502, 503, 504))
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Pause after a refusal without Retry-After: doubled each time, then reduced by up to a quarter at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSettings:
    """The load that the server gets."""

    seconds: float  # of overload; measuring the capacity takes a third of it
    factor: float  # arrival rate as a multiple of the capacity
    clients: int  # concurrent ones while the capacity is measured
    retries: int  # of a refused call, at most
    seed: int


@dataclass(slots=True)
class OverloadFigures:
    """The measurements of both phases."""

    capacity_per_s: float = 0.0  # requests
    goodput_per_s: float = 0.0
    offered_per_s: float = 0.0  # first attempts
    attempts: int = 0  # under overload
    retries: int = 0  # attempts under overload after the first of a call
    accepted: int = 0  # attempts with status 200, in both phases
    broken: list[str] = field(default_factory=list)  # error of each accepted call that did not get all its tokens
    refusal_s: list[float] = field(default_factory=list)  # from connecting to the end of the answer
    late_s: list[float] = field(default_factory=list)  # delay between the due time of a call and its start
    client_processors: float = 0.0  # processors that the clients kept busy under overload
    statuses: Counter[str] = field(default_factory=Counter)  # of attempts under overload


def quantile_ms(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds; NaN for less than two values."""
    return 1000 * statistics.quantiles(seconds, n=100)[percent - 1] if len(seconds) > 1 else math.nan


async def measure(target: LoadTarget, trace: Trace, overload: OverloadSettings) -> OverloadFigures:
    """Run both phases with the requests of the trace, which repeat.

    The second phase is left out if no request ended in the first.
    """
    calls = [EncodedCall(request_bytes(target, trace, request), request.new_tokens) for request in trace.requests]
    figures = OverloadFigures()
    figures.capacity_per_s = await _capacity(target, calls, overload, figures)
    if not figures.capacity_per_s:
        return figures
    figures.offered_per_s = figures.capacity_per_s * overload.factor
    await _overload(target, calls, overload, figures)
    return figures


def lines(figures: OverloadFigures) -> list[str]:
    """Return the figures as text for a terminal."""
    kept = figures.goodput_per_s / figures.capacity_per_s
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(figures.statuses.items()))
    refusals, late = figures.refusal_s, figures.late_s
    lateness = f"late by median {quantile_ms(late, 50):.1f} ms, p99 {quantile_ms(late, 99):.1f} ms"
    shed = f", median {quantile_ms(refusals, 50):.1f} ms, p99 {quantile_ms(refusals, 99):.1f} ms" if refusals else ""
    return [
        f"capacity {figures.capacity_per_s:.1f} requests/s, offered {figures.offered_per_s:.1f}",
        f"goodput {figures.goodput_per_s:.1f} requests/s, {kept:.0%} of the capacity",
        f"refusals: {len(refusals)}{shed}",
        f"attempts: {figures.attempts}, of them retries {figures.retries}; by status {statuses}",
        f"accepted: {figures.accepted}, ended with all tokens {figures.accepted - len(figures.broken)}",
        f"clients: {figures.client_processors:.2f} processors busy, {lateness}",
    ]


def measured_figures(
    figures: OverloadFigures, overload: OverloadSettings, settings: Mapping[str, Setting], memory_mib: float | None
) -> list[Measured]:
    """Return the figures for the benchmark pages. Args: memory_mib: the gateway's peak; None if it is not known."""
    chosen = {**settings, "factor": overload.factor}
    kept = figures.goodput_per_s / figures.capacity_per_s
    found = [
        measured("Goodput as a share of the capacity", kept, "%", chosen, scale=100),
        measured("Refusals per second", len(figures.refusal_s) / overload.seconds, "refusals/s", chosen),
        measured("Accepted requests that did not end whole", len(figures.broken), "requests", chosen),
    ]
    if len(figures.refusal_s) > 1:
        found.append(measured("Time of a refusal, median", quantile_ms(figures.refusal_s, 50), "ms", chosen))
        found.append(measured("Time of a refusal, p99", quantile_ms(figures.refusal_s, 99), "ms", chosen))
    if memory_mib is not None:
        found.append(measured("Peak memory of the gateway", memory_mib, "MiB", chosen))
    return found


def peak_memory_mib(process: int) -> float:
    """Return the peak of a local process's resident memory."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


@dataclass(frozen=True, slots=True)
class EncodedCall:
    raw: bytes
    new_tokens: int


async def _capacity(
    target: LoadTarget, calls: Sequence[EncodedCall], overload: OverloadSettings, figures: OverloadFigures
) -> float:
    """Return the requests per second that end with all tokens while no call is refused."""
    end_s = perf_counter() + overload.seconds / 3
    whole = 0

    async def client(first: int) -> None:
        nonlocal whole
        number = first
        while perf_counter() < end_s:
            stream = await _attempt(target, calls[number % len(calls)], figures)
            number += overload.clients
            whole += stream.error is None and perf_counter() < end_s

    await asyncio.gather(*(client(first) for first in range(overload.clients)))
    return whole / (overload.seconds / 3)


async def _overload(
    target: LoadTarget, calls: Sequence[EncodedCall], overload: OverloadSettings, figures: OverloadFigures
) -> None:
    chance = random.Random(overload.seed)
    start_s, start_processor_s = perf_counter(), process_time()
    end_s = start_s + overload.seconds
    whole = 0

    async def call(call: EncodedCall, chance: random.Random) -> None:
        nonlocal whole
        for attempt in range(overload.retries + 1):
            began_s = perf_counter()
            figures.attempts += 1
            figures.retries += attempt > 0
            stream = await _attempt(target, call, figures)
            figures.statuses[str(stream.status or "no answer")] += 1
            whole += stream.error is None and perf_counter() < end_s
            if stream.status not in RETRYABLE:
                return
            figures.refusal_s.append(perf_counter() - began_s)
            pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * (1 - chance.random() / 4)
            pause_s = pause_s if stream.retry_after_s is None else stream.retry_after_s
            if perf_counter() + pause_s > end_s:
                # An attempt after the end would not count.
                return
            await asyncio.sleep(pause_s)

    running: list[asyncio.Task[None]] = []
    due_s = start_s
    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - perf_counter()))
        figures.late_s.append(perf_counter() - due_s)
        running.append(asyncio.create_task(call(calls[len(running) % len(calls)], random.Random(chance.random()))))
        due_s += chance.expovariate(figures.offered_per_s)
    figures.client_processors = (process_time() - start_processor_s) / (perf_counter() - start_s)
    await asyncio.gather(*running)
    figures.goodput_per_s = whole / overload.seconds


async def _attempt(target: LoadTarget, call: EncodedCall, figures: OverloadFigures) -> EventStream:
    """Make one attempt and read its answer to the end; a failed connection is an attempt without a status."""
    stream = EventStream(call.raw)
    try:
        async with asyncio.timeout(target.timeout_s):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: stream, target.host, target.port, ssl=target.tls)
            await stream.ended
        stream.error = stream.error or token_count_error(stream, call.new_tokens)
    except (TimeoutError, OSError) as failure:
        stream.error = f"connection: {str(failure) or 'no end in time'}"
    finally:
        stream.close()
    if stream.status == 200:
        figures.accepted += 1
        if stream.error is not None:
            figures.broken.append(stream.error)
    return stream
