"""Several times more load than a server can serve, by clients that follow Retry-After: goodput and what refusals cost.

First the capacity is measured, with a bounded number of clients that wait for each other's turn. Then calls come at a
multiple of it, whatever becomes of the earlier ones; a call that is refused is tried again as the official clients do
it: after Retry-After, else after a pause that doubles, so many times. Goodput is what ended whole while they came.
"""

import asyncio
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from orca.cli.bench.client import EventStream, Target, request_bytes
from orca.cli.bench.trace import Trace

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
    refusal_s: list[float] = field(default_factory=list)  # from connecting to the whole answer
    statuses: Counter[str] = field(default_factory=Counter)  # of attempts

    def refusal_quantile_ms(self, percent: int) -> float:
        if len(self.refusal_s) < 2:
            return math.nan
        return 1000 * statistics.quantiles(self.refusal_s, n=100)[percent - 1]


async def measure(target: Target, trace: Trace, overloading: Overloading) -> Figures:
    """Run both phases; calls repeat the trace's requests. A server without a capacity is not overloaded."""
    calls = [request_bytes(target, trace, request) for request in trace.requests]
    figures = Figures()
    figures.capacity_per_s = await _capacity(target, calls, overloading)
    if not figures.capacity_per_s:
        return figures
    figures.offered_per_s = figures.capacity_per_s * overloading.factor
    await _overload(target, calls, overloading, figures)
    return figures


def lines(figures: Figures) -> list[str]:
    """The figures for people."""
    kept = figures.goodput_per_s / figures.capacity_per_s
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(figures.statuses.items()))
    return [
        f"capacity {figures.capacity_per_s:.1f} requests/s, offered {figures.offered_per_s:.1f}",
        f"goodput {figures.goodput_per_s:.1f} requests/s, {kept:.0%} of the capacity",
        f"refusals: median {figures.refusal_quantile_ms(50):.1f} ms, p99 {figures.refusal_quantile_ms(99):.1f} ms",
        f"attempts by status: {statuses}",
    ]


def peak_memory_mib(process: int) -> float:
    """The most memory that a process of this machine ever had."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


async def _capacity(target: Target, calls: Sequence[bytes], overloading: Overloading) -> float:
    """Requests a second that end whole when nobody is refused."""
    end_s = perf_counter() + overloading.seconds / 3
    whole = 0

    async def client(first: int) -> None:
        nonlocal whole
        number = first
        while perf_counter() < end_s:
            stream = await _attempt(target, calls[number % len(calls)])
            number += overloading.clients
            whole += stream.error is None and perf_counter() < end_s

    await asyncio.gather(*(client(first) for first in range(overloading.clients)))
    return whole / (overloading.seconds / 3)


async def _overload(target: Target, calls: Sequence[bytes], overloading: Overloading, figures: Figures) -> None:
    chance = random.Random(overloading.seed)
    start_s = perf_counter()
    end_s = start_s + overloading.seconds
    whole = 0

    async def call(body: bytes, chance: random.Random) -> None:
        nonlocal whole
        for attempt in range(overloading.retries + 1):
            began_s = perf_counter()
            stream = await _attempt(target, body)
            figures.statuses[str(stream.status or "no answer")] += 1
            if stream.error is None:
                whole += perf_counter() < end_s
                return
            if stream.status not in RETRYABLE:
                return
            figures.refusal_s.append(perf_counter() - began_s)
            pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * (1 - chance.random() / 4)
            await asyncio.sleep(pause_s if stream.retry_after_s is None else stream.retry_after_s)

    running: set[asyncio.Task[None]] = set()
    number, due_s = 0, start_s
    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - perf_counter()))
        running.add(asyncio.create_task(call(calls[number % len(calls)], random.Random(chance.random()))))
        number += 1
        due_s += chance.expovariate(figures.offered_per_s)
    # What comes later than this counts for nothing: clients that wait for another try are sent home.
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    figures.goodput_per_s = whole / overloading.seconds


async def _attempt(target: Target, body: bytes) -> EventStream:
    """One try, to its end; a connection that cannot be made is an attempt without a status."""
    stream = EventStream(body)
    try:
        async with asyncio.timeout(target.timeout_s):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: stream, target.host, target.port, ssl=target.tls)
            await stream.ended
    except (TimeoutError, OSError) as failure:
        stream.error = f"connection: {failure}"
    finally:
        stream.close()
    return stream
