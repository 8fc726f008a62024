"""Several times more load than a server can serve, by clients that follow Retry-After: goodput and what refusals cost.

First the capacity is measured, with a bounded number of clients that wait for each other's turn. Then calls come at a
multiple of it, whatever becomes of the earlier ones; a call that is refused is tried again as the official clients do
it: after Retry-After, else after a pause that doubles, so many times. Goodput is what ended whole while they came;
what was accepted is read to its end, so that a figure stands only where every accepted call got all its tokens.

The clients are a process of their own, and their work is no part of the server's; but they take processor time from it
where both share a machine, and a client that is late measures a refusal as late. Both are shown.
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

from orca.bench.client import EventStream, Target, request_bytes, wrong_count
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.trace import Trace

RETRYABLE = frozenset((429, 500, 502, 503, 504))
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Of a refused call that was not told when to come back: doubled each time, a quarter of it left to chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overloading:
    """What is asked of the server."""

    seconds: float  # of overload; the capacity is measured for a third of it
    factor: float  # calls that come, in multiples of the capacity
    clients: int  # at a time, where the capacity is measured
    retries: int  # of a refused call
    seed: int


@dataclass(slots=True)
class Figures:
    capacity_per_s: float = 0.0  # requests
    goodput_per_s: float = 0.0
    offered_per_s: float = 0.0  # first attempts
    attempts: int = 0  # under overload
    retries: int = 0  # of those, that were not the first of their call
    accepted: int = 0  # attempts that were answered 200, in both phases
    broken: list[str] = field(default_factory=list)  # why an accepted call did not end whole
    refusal_s: list[float] = field(default_factory=list)  # from connecting to the whole answer
    late_s: list[float] = field(default_factory=list)  # by how much a call left after it was due
    client_processors: float = 0.0  # that the clients kept busy under overload
    statuses: Counter[str] = field(default_factory=Counter)  # of attempts under overload


def quantile_ms(seconds: Sequence[float], percent: int) -> float:
    """In milliseconds; NaN where there is too little."""
    return 1000 * statistics.quantiles(seconds, n=100)[percent - 1] if len(seconds) > 1 else math.nan


async def measure(target: Target, trace: Trace, overloading: Overloading) -> Figures:
    """Run both phases; calls repeat the trace's requests. A server without a capacity is not overloaded."""
    calls = [_Call(request_bytes(target, trace, request), request.new_tokens) for request in trace.requests]
    figures = Figures()
    figures.capacity_per_s = await _capacity(target, calls, overloading, figures)
    if not figures.capacity_per_s:
        return figures
    figures.offered_per_s = figures.capacity_per_s * overloading.factor
    await _overload(target, calls, overloading, figures)
    return figures


def lines(figures: Figures) -> list[str]:
    """The figures for people."""
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
    figures: Figures, overloading: Overloading, settings: Mapping[str, Setting], memory_mib: float | None
) -> list[Measured]:
    """Return the figures for the benchmark pages. Args: memory_mib: the gateway's peak, where it is known."""
    chosen = {**settings, "factor": overloading.factor}
    kept = figures.goodput_per_s / figures.capacity_per_s
    found = [
        measured("Goodput as a share of the capacity", kept, "%", chosen, scale=100),
        measured("Refusals per second", len(figures.refusal_s) / overloading.seconds, "refusals/s", chosen),
        measured("Accepted requests that did not end whole", len(figures.broken), "requests", chosen),
    ]
    if len(figures.refusal_s) > 1:
        found.append(measured("Time of a refusal, median", quantile_ms(figures.refusal_s, 50), "ms", chosen))
        found.append(measured("Time of a refusal, p99", quantile_ms(figures.refusal_s, 99), "ms", chosen))
    if memory_mib is not None:
        found.append(measured("Peak memory of the gateway", memory_mib, "MiB", chosen))
    return found


def peak_memory_mib(process: int) -> float:
    """The most memory that a process of this machine ever had."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


@dataclass(frozen=True, slots=True)
class _Call:
    raw: bytes
    new_tokens: int


async def _capacity(target: Target, calls: Sequence[_Call], overloading: Overloading, figures: Figures) -> float:
    """Requests a second that end whole when nobody is refused."""
    end_s = perf_counter() + overloading.seconds / 3
    whole = 0

    async def client(first: int) -> None:
        nonlocal whole
        number = first
        while perf_counter() < end_s:
            stream = await _attempt(target, calls[number % len(calls)], figures)
            number += overloading.clients
            whole += stream.error is None and perf_counter() < end_s

    await asyncio.gather(*(client(first) for first in range(overloading.clients)))
    return whole / (overloading.seconds / 3)


async def _overload(target: Target, calls: Sequence[_Call], overloading: Overloading, figures: Figures) -> None:
    chance = random.Random(overloading.seed)
    start_s, start_processor_s = perf_counter(), process_time()
    end_s = start_s + overloading.seconds
    whole = 0

    async def call(call: _Call, chance: random.Random) -> None:
        nonlocal whole
        for attempt in range(overloading.retries + 1):
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
                # A try behind the end counts for nothing.
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
    figures.goodput_per_s = whole / overloading.seconds


async def _attempt(target: Target, call: _Call, figures: Figures) -> EventStream:
    """One try, to its end; a connection that cannot be made is an attempt without a status."""
    stream = EventStream(call.raw)
    try:
        async with asyncio.timeout(target.timeout_s):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: stream, target.host, target.port, ssl=target.tls)
            await stream.ended
        stream.error = stream.error or wrong_count(stream, call.new_tokens)
    except (TimeoutError, OSError) as failure:
        stream.error = f"connection: {str(failure) or 'no end in time'}"
    finally:
        stream.close()
    if stream.status == 200:
        figures.accepted += 1
        if stream.error is not None:
            figures.broken.append(stream.error)
    return stream
