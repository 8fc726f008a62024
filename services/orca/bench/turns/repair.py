"""A repair: requests with a common prompt run, a process is killed, and they run their tokens again."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from orca.bench.client import EventStream, LoadTarget
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.peers.memory import parent_id, process_name
from orca.bench.turns.calls import CallFailed, converse, greedy_call, read_whole
from orca.bench.turns.compare import WARM_UP
from orca.bench.turns.variants import CacheUse, MeasuredModel, running_orca

VICTIMS = ("worker", "scheduler")
"""Processes that are killed: the stage with the KV cache, or the scheduler, whose stages live on."""

TRIES = 5
"""Kills of a run until one is in time: a small model may have computed all tokens that a client still waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """The requests, and the kill in the middle of them."""

    requests: int
    shared_tokens: int  # that all prompts begin with
    own_tokens: int  # of each prompt besides
    new_tokens: int
    tokens_before: int  # of each request, before the kill
    victim: str  # of VICTIMS
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRun:
    """One kill."""

    cache: CacheUse
    round: int
    computed_again: int  # tokens of prompts and answers, in the epochs after the kill
    found_again: int  # those that were there already, because another one of the requests had computed them again
    first_s: float  # from the kill to the next token of any request
    all_s: float  # from the kill until every request has its next token


def measure(model: MeasuredModel, plan: RepairPlan, report: Callable[[str], None]) -> list[RepairRun]:
    """Kill once in each round, with and without the cache. Raises: ServerFailed, CallFailed."""
    found = []
    for number in range(1, plan.rounds + 1):
        for cache in CacheUse:
            found.append(asyncio.run(_measure(model, plan, cache, number)))
            report(f"{model.name}, round {number}, {cache} cache: next token after {found[-1].first_s:.2f} s")
    return found


async def _measure(model: MeasuredModel, plan: RepairPlan, cache: CacheUse, number: int) -> RepairRun:
    for _ in range(TRIES):
        if (run := await _kill(model, plan, cache, number)) is not None:
            return run
    raise CallFailed(f"{TRIES} times a request had ended when the process was killed: take a larger model")


async def _kill(model: MeasuredModel, plan: RepairPlan, cache: CacheUse, number: int) -> RepairRun | None:
    """Run the requests, and kill in the middle of them. Returns: None if that was too late for one of them."""
    async with running_orca(model, cache) as system:
        await converse(system.target, WARM_UP)
        streams = [EventStream(call) for call in _calls(system.target, plan, number)]
        calls = [asyncio.create_task(read_whole(system.target, stream, plan.new_tokens)) for stream in streams]
        await _have_tokens(streams, calls, plan.tokens_before)
        epoch = max(system.prompt_tokens_by_epoch())
        killed_s = perf_counter()
        os.kill(_victim(system.process, plan.victim), signal.SIGKILL)
        await asyncio.gather(*calls)
        nexts = [_resumed_s(stream) - killed_s for stream in streams]
        again = sum(tokens for number, tokens in system.prompt_tokens_by_epoch().items() if number > epoch)
        beginnings = system.beginnings(after=epoch)
        if min(nexts) < 0 or len(beginnings) < plan.requests:
            return None
        return RepairRun(
            cache=cache,
            round=number,
            computed_again=again,
            found_again=sum(beginnings.values()),
            first_s=min(nexts),
            all_s=max(nexts),
        )


def _calls(target: LoadTarget, plan: RepairPlan, number: int) -> list[bytes]:
    """Return the calls of one round; all prompts begin alike."""
    numbers = Random(f"{plan.seed}/{number}")
    shared = numbers.choices(range(target.vocab_size), k=plan.shared_tokens)
    prompts = [shared + numbers.choices(range(target.vocab_size), k=plan.own_tokens) for _ in range(plan.requests)]
    return [greedy_call(target, prompt, plan.new_tokens) for prompt in prompts]


async def _have_tokens(streams: Sequence[EventStream], calls: Sequence[asyncio.Task[None]], count: int) -> None:
    """Wait until every stream has so many tokens, or a call has ended."""
    while True:
        await asyncio.sleep(0.01)
        if min(len(stream.token_s) for stream in streams) >= count or any(call.done() for call in calls):
            return


def _victim(process: int, name: str) -> int:
    """Return the first process with this name below another one. Raises: CallFailed if there is none."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                parents[int(entry.name)] = parent_id((entry / "stat").read_text())
                names[int(entry.name)] = process_name((entry / "cmdline").read_text().split("\0"))
    below = {process}
    while more := {each for each, parent in parents.items() if parent in below} - below:
        if found := sorted(each for each in more if names.get(each) == name):
            return found[0]
        below |= more
    raise CallFailed(f"`orca up` has no process {name}")


def _resumed_s(stream: EventStream) -> float:
    """Return the time of the first token after a stream's longest silence: what was on its way came before that."""
    return max(pairwise(stream.token_s), key=lambda pair: pair[1] - pair[0])[1]


def lines(runs: Sequence[RepairRun]) -> list[str]:
    """Return a table for a terminal."""
    found = [f"{'cache':<10}{'tokens again':>14}{'next token s':>14}{'all resumed s':>15}"]
    for cache in CacheUse:
        own = [each for each in runs if each.cache is cache]
        again, first, every = (
            median(values)
            for values in zip(*((each.computed_again, each.first_s, each.all_s) for each in own), strict=True)
        )
        found.append(f"{cache:<10}{again:>14.0f}{first:>14.2f}{every:>15.2f}")
    return found


def to_json(runs: Sequence[RepairRun]) -> list[dict[str, Any]]:
    """Return the runs as plain data."""
    return [asdict(each) for each in runs]


def figures(runs: Sequence[RepairRun], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the figures of the pages."""
    found = []
    for cache in CacheUse:
        own, chosen = [each for each in runs if each.cache is cache], {**settings, "cache": cache.value}
        again = [each.computed_again for each in own]
        found.append(measured("Tokens computed again after a kill", again, "tokens", chosen))
        found.append(measured("From a kill to the next token", [each.first_s for each in own], "s", chosen))
        found.append(measured("From a kill until all go on", [each.all_s for each in own], "s", chosen))
    return found
