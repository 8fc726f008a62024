"""Measure the scheduler's time per step, and what of it is the prefix cache: python -m orca.bench.parts.prefixes

A scheduler with 1,000 requests in hand chooses a batch, writes its step and takes the result, without stages and
without a pool. It does so without a cache, with a cache in which nothing is found, and with one in which three quarters
of each prompt are found. The cache is full: it has 100,000 blocks of ended requests, and each new block evicts one. The
three take turns. Times are processor time of this process.

The target is a median under 200 us.
"""

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.options import add_figures_option, comma_separated, positive, write_figures
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, Request
from orca.core.domain.step import Claim, Epoch
from orca.planner.workload.trace import GREEDY
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, next_batch
from orca.scheduler.policy.state import GroupState

PROMPT_TOKENS = 1_024
SHARED_TOKENS = 768
"""Tokens of a prompt that are found if the cache finds any."""

NEW_TOKENS_MAX = 127
"""Requests generate 1 to so many tokens, so that they end one by one."""

BEGINNING_BLOCKS = 400
"""Blocks of the cache for each of the different beginnings of prompts, which has 48: none of them is evicted."""

COLLECT_EVERY = 20
"""Steps between collections of garbage, which a scheduler makes at a pace (scheduler/gc_pace.py): steps of 5 ms."""

VOCABULARY = 32_000
TOKEN = 7
EPOCH = Epoch(1, "measured")


class Cache(StrEnum):
    """The prefix cache of a scheduler."""

    OFF = "off"
    NO_HITS = "no hits"
    HITS = "hits"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimePlan:
    """The runs to make: each batch size with each kind of cache."""

    batch_sizes: Sequence[int] = (16, 64)
    in_hand: int = 1_000  # requests
    cached_blocks: int = 100_000
    rounds: int = 9  # in each of which every scheduler runs some steps
    steps: int = 200  # of a scheduler in a round


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """The times of one scheduler. Those in us have one value for each round."""

    batch_size: int
    cache: Cache
    median_us: Sequence[float]
    mean_us: Sequence[float]
    p99_us: float  # of the steps of all rounds
    begun: float  # requests that begin in a step, on average
    found: float  # share of their tokens that the cache had


class MeasuredScheduler:
    """A group's state and policy, which always has the same number of requests in hand."""

    def __init__(self, plan: StepTimePlan, batch_size: int, cache: Cache) -> None:
        longest = PROMPT_TOKENS + NEW_TOKENS_MAX
        self._blocks = plan.cached_blocks + batch_size * -(-longest // DEFAULT_BLOCK_TOKENS)
        self._limits = BatchLimits(
            stages=1,
            max_batch_size=batch_size,
            slots=self._blocks * DEFAULT_BLOCK_TOKENS,
            block_tokens=DEFAULT_BLOCK_TOKENS,
            max_model_len=longest,
            shares_prefixes=cache is not Cache.OFF,
        )
        self._policy = IterationPolicy()
        self.state = GroupState(prefixes=self._limits.make_prefixes())
        self._requests = _requests(cache, max(1, plan.cached_blocks // BEGINNING_BLOCKS))
        self._in_hand = plan.in_hand
        self._steps = 0
        self.begun = self.looked_up = self.found = 0

    def fill(self) -> None:
        """Run requests until the cache is full and they end one by one."""
        for _ in range(2 * NEW_TOKENS_MAX):
            self.step()
        while (prefixes := self.state.prefixes) is not None and prefixes.index.free > self._limits.max_batch_size:
            self.step()
        self.begun = self.looked_up = self.found = 0

    def step(self) -> int:
        """Run a step. Returns: its time in nanoseconds, without that in which new requests came."""
        state = self.state
        while len(state.requests) < self._in_hand:
            state.add(next(self._requests), Claim(1, "measured/1"))
        start_ns = time.thread_time_ns()
        batch = next_batch(self._policy, state, self._limits)
        state.schedule(batch, EPOCH)
        for row in state.read().rows:
            if row.sample:
                state.receive(row.request, TOKEN)
                if row.request.received == row.request.request.max_new_tokens:
                    state.end(row.request)
        self._policy.free_capacity(state, self._limits)
        self._steps += 1
        if self._steps % COLLECT_EVERY == 0:
            gc.collect(1)
        took_ns = time.thread_time_ns() - start_ns
        for admission in batch.admitted:
            self.begun += 1
            self.looked_up += len(admission.request.known)
            self.found += admission.prefix_tokens
        return took_ns


def _requests(cache: Cache, different: int) -> Iterator[Request]:
    """Yield requests without end, the same ones for each cache but for their prompts.

    Args: different: beginnings of prompts if the cache finds any.
    """
    lengths, tokens = Random("lengths"), Random("tokens")
    beginnings = [_tokens(tokens, SHARED_TOKENS) for _ in range(different)]
    arrival = 0
    while True:
        arrival += 1
        beginning = tokens.choice(beginnings) if cache is Cache.HITS else _tokens(tokens, SHARED_TOKENS)
        yield Request(
            parent=f"r{arrival}",
            choice=0,
            revision="measured",
            prompt=beginning + _tokens(tokens, PROMPT_TOKENS - SHARED_TOKENS),
            max_new_tokens=lengths.randint(1, NEW_TOKENS_MAX),
            sampling=GREEDY,
            arrival=arrival,
        )


def _tokens(numbers: Random, count: int) -> tuple[int, ...]:
    return tuple(numbers.choices(range(VOCABULARY), k=count))


def measure(plan: StepTimePlan) -> list[SchedulerTimes]:
    """Measure every batch size with every cache, in turns."""
    gc.disable()
    try:
        return [times for batch_size in plan.batch_sizes for times in _measure_size(plan, batch_size)]
    finally:
        gc.enable()


def _measure_size(plan: StepTimePlan, batch_size: int) -> list[SchedulerTimes]:
    schedulers = {cache: MeasuredScheduler(plan, batch_size, cache) for cache in Cache}
    for scheduler in schedulers.values():
        scheduler.fill()
    times_us: dict[Cache, list[list[float]]] = defaultdict(list)
    for _ in range(plan.rounds):
        for cache, scheduler in schedulers.items():
            times_us[cache].append([scheduler.step() / 1_000 for _ in range(plan.steps)])
    return [
        SchedulerTimes(
            batch_size=batch_size,
            cache=cache,
            median_us=[statistics.median(each) for each in times_us[cache]],
            mean_us=[statistics.fmean(each) for each in times_us[cache]],
            p99_us=statistics.quantiles((us for each in times_us[cache] for us in each), n=100)[-1],
            begun=scheduler.begun / (plan.rounds * plan.steps),
            found=scheduler.found / scheduler.looked_up if scheduler.looked_up else 0.0,
        )
        for cache, scheduler in schedulers.items()
    ]


def lines(found: Sequence[SchedulerTimes]) -> list[str]:
    """Return a table for a terminal."""
    head = f"{'batch':>6}{'cache':>9}{'median, us':>24}{'mean, us':>24}{'p99, us':>9}"
    shown = [f"{head}{'cache, us':>11}{'begin/step':>12}{'found, %':>10}"]
    without = _without_cache(found)
    for each in found:
        cache_us = statistics.median(each.mean_us) - without[each.batch_size]
        times = f"{_spread(each.median_us):>24}{_spread(each.mean_us):>24}{each.p99_us:>9.0f}{cache_us:>11.0f}"
        shown.append(f"{each.batch_size:>6}{each.cache.value:>9}{times}{each.begun:>12.2f}{100 * each.found:>10.1f}")
    return shown


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _without_cache(found: Sequence[SchedulerTimes]) -> dict[int, float]:
    """Return the mean time of a step without a cache, by batch size."""
    return {each.batch_size: statistics.median(each.mean_us) for each in found if each.cache is Cache.OFF}


def figures(found: Sequence[SchedulerTimes], settings: Mapping[str, Setting]) -> list[Measured]:
    """Return the times as figures for the benchmark pages."""
    records, without = [], _without_cache(found)
    for each in found:
        chosen: dict[str, Setting] = {**settings, "batch": each.batch_size, "cache": each.cache.value}
        records.append(measured("Scheduler's time of a step", each.median_us, "us", chosen))
        records.append(measured("Scheduler's mean time of a step", each.mean_us, "us", chosen))
        records.append(measured("Scheduler's time of a step, p99", each.p99_us, "us", chosen))
        if each.cache is not Cache.OFF:
            cache_us = [mean_us - without[each.batch_size] for mean_us in each.mean_us]
            records.append(measured("Mean time of the prefix cache in a step", cache_us, "us", chosen))
    return records


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    defaults = StepTimePlan()
    shown = ",".join(map(str, defaults.batch_sizes))
    add("--batch", type=comma_separated(positive(int)), default=defaults.batch_sizes, metavar="N,N", help=f"({shown})")
    for name in ("in_hand", "cached_blocks", "rounds", "steps"):
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive(int), default=getattr(defaults, name), metavar="N", help="(%(default)s)")
    add_figures_option(parser)
    options = parser.parse_args(words)
    options.words = ["python", "-m", "orca.bench.parts.prefixes", *words]
    plan = StepTimePlan(
        batch_sizes=options.batch,
        in_hand=options.in_hand,
        cached_blocks=options.cached_blocks,
        rounds=options.rounds,
        steps=options.steps,
    )
    found = measure(plan)
    print("\n".join(lines(found)))
    write_figures(options, figures(found, {"in_hand": plan.in_hand, "cached_blocks": plan.cached_blocks}))


if __name__ == "__main__":
    main(sys.argv[1:])
