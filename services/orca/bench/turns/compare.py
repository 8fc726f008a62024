"""Conversations with and without the prefix cache: the two systems take turns, each with a new pool and cache."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.turns.calls import ConversationRun, TurnOutcome, converse
from orca.bench.turns.conversations import ConversationSpec
from orca.bench.turns.variants import CacheUse, MeasuredModel, running_orca
from orca.planner.simulate.outcomes import percentile
from orca.planner.workload.lengths import Range

WARM_UP = ConversationSpec(
    conversations=4, turns=2, system_tokens=64, question_tokens=Range(8, 64), answer_tokens=Range(8, 16), seed=1_000_003
)
"""Conversations before those that are measured. Nothing that they leave in the cache is found later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRun:
    """One run of all conversations on one system."""

    cache: CacheUse
    round: int
    run: ConversationRun
    computed_tokens: int  # of prompts
    memory_bytes: int  # that all processes have written at their peaks

    @property
    def tokens_per_s(self) -> float:
        return self.run.tokens_per_s


@dataclass(frozen=True, slots=True)
class TurnComparison:
    """The runs of all rounds, alternating."""

    runs: Sequence[CacheRun]

    def of(self, cache: CacheUse) -> list[CacheRun]:
        return [each for each in self.runs if each.cache is cache]

    @property
    def turns(self) -> int:
        return max(turn.turn for turn in self.runs[0].run.turns)

    def first_s(self, cache: CacheUse, turn: int) -> list[list[float]]:
        """Return the times to the first token at a turn, a list for each round."""
        return [[each.first_s for each in run.run.turns if each.turn == turn] for run in self.of(cache)]

    def ratios(self, read: Callable[[CacheRun], float]) -> list[float]:
        """Return a quantity with the cache over the same without it, for each round."""
        return [read(own) / read(other) for own, other in zip(self.of(CacheUse.ON), self.of(CacheUse.OFF), strict=True)]

    def sooner(self, turn: int) -> list[float]:
        """Return how many times shorter the median time to the first token is with the cache, for each round."""
        pairs = zip(self.first_s(CacheUse.ON, turn), self.first_s(CacheUse.OFF, turn), strict=True)
        return [median(without) / median(own) for own, without in pairs]

    @property
    def different_answers(self) -> int:
        """Turns of the first round whose tokens differ, of conversations that were equal until then.

        Only two best tokens that are closer than a rounding error may do that.
        """
        own, other = (_answers(self.of(cache)[0].run.turns) for cache in (CacheUse.ON, CacheUse.OFF))
        ended, found = set[int](), 0
        for place in sorted(own):
            if place[0] not in ended and own[place] != other[place]:
                ended.add(place[0])
                found += 1
        return found


def _answers(turns: Iterable[TurnOutcome]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(each.conversation, each.turn): each.tokens for each in turns}


def compare(model: MeasuredModel, spec: ConversationSpec, rounds: int, report: Callable[[str], None]) -> TurnComparison:
    """Run all rounds. Raises: ServerFailed, CallFailed."""
    runs = []
    for number in range(1, rounds + 1):
        # The one that begins a round has a cooler machine.
        for cache in (CacheUse.ON, CacheUse.OFF) if number % 2 else (CacheUse.OFF, CacheUse.ON):
            runs.append(asyncio.run(_run(model, replace(spec, seed=spec.seed + number), cache, number)))
            report(f"{model.name}, round {number}, {cache} cache: {runs[-1].tokens_per_s:.1f} tokens/s")
    return TurnComparison(runs)


async def _run(model: MeasuredModel, spec: ConversationSpec, cache: CacheUse, number: int) -> CacheRun:
    async with running_orca(model, cache) as system:
        await converse(system.target, WARM_UP)
        if not spec.is_shared:
            # The cache writes all offered memory for the first time once, which is no cost of a step later.
            await converse(system.target, replace(spec, seed=spec.seed + WARM_UP.seed))
        before = system.prompt_tokens
        run = await converse(system.target, spec)
        system.memory.stop()
        return CacheRun(
            cache=cache,
            round=number,
            run=run,
            computed_tokens=system.prompt_tokens - before,
            memory_bytes=sum(peak.anonymous_bytes for peak in system.memory.peaks_of_running),
        )


def lines(comparison: TurnComparison) -> list[str]:
    """Return a table for a terminal."""
    found = [f"{'turn':<6}{'cache':<10}{'first token p50 ms':>20}{'p99 ms':>12}"]
    for turn in range(1, comparison.turns + 1):
        for cache in CacheUse:
            p50, p99 = (1000 * value for value in _first_token(comparison, cache, turn))
            found.append(f"{turn:<6}{cache:<10}{p50:>20.1f}{p99:>12.1f}")
    found += map(str, _quantities(comparison))
    found.append(f"answers of the first round that differ: {comparison.different_answers}")
    return found


def _first_token(comparison: TurnComparison, cache: CacheUse, turn: int) -> tuple[float, float]:
    """Return median and 99th percentile over all rounds, in seconds."""
    values = sorted(value for each in comparison.first_s(cache, turn) for value in each)
    return percentile(values, 0.5), percentile(values, 0.99)


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A quantity that is measured once in each round."""

    what: str
    unit: str
    values: Sequence[float]  # one for each round
    settings: Mapping[str, Setting]

    def __str__(self) -> str:
        named = "".join(f", {key} {value}" for key, value in self.settings.items())
        low, high = min(self.values), max(self.values)
        return f"{self.what}{named}: {median(self.values):.4g} ({low:.4g} to {high:.4g}) {self.unit}"


def _quantities(comparison: TurnComparison) -> Iterator[_Quantity]:
    for cache in CacheUse:
        runs, chosen = comparison.of(cache), {"cache": cache.value}
        yield _Quantity("Generated tokens per second", "tokens/s", [run.tokens_per_s for run in runs], chosen)
        yield _Quantity("Prompt tokens computed", "tokens", [run.computed_tokens for run in runs], chosen)
        yield _Quantity("Memory written", "MiB", [run.memory_bytes / 2**20 for run in runs], chosen)
    found = [100 * run.run.cached_share for run in comparison.of(CacheUse.ON)]
    yield _Quantity("Prompt tokens found in the cache", "%", found, {})
    faster = comparison.ratios(lambda run: run.tokens_per_s)
    yield _Quantity("Tokens per second against those without the cache", "x", faster, {})
    more = comparison.ratios(lambda run: run.memory_bytes)
    yield _Quantity("Memory against that without the cache", "x", more, {})
    last = comparison.turns
    for turn in sorted({1, min(2, last), last}):
        yield _Quantity("First token, times sooner", "x", comparison.sooner(turn), {"turn": turn})


def to_json(comparison: TurnComparison) -> list[dict[str, Any]]:
    """Return the runs as plain data, without tokens."""
    return [
        {
            "cache": each.cache.value,
            "round": each.round,
            "tokens_per_s": each.tokens_per_s,
            "computed_tokens": each.computed_tokens,
            "memory_bytes": each.memory_bytes,
            "turns": [
                {
                    "conversation": turn.conversation,
                    "turn": turn.turn,
                    "prompt_tokens": turn.prompt_tokens,
                    "cached_tokens": turn.cached_tokens,
                    "first_s": turn.first_s,
                    "last_s": turn.last_s,
                }
                for turn in each.run.turns
            ],
        }
        for each in comparison.runs
    ]


def figures(comparison: TurnComparison, settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the figures of the pages."""
    found = []
    for turn in range(1, comparison.turns + 1):
        for cache in CacheUse:
            chosen = {**settings, "cache": cache.value, "turn": turn}
            rounds = [sorted(values) for values in comparison.first_s(cache, turn)]
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                values = [percentile(each, share) for each in rounds]
                found.append(measured(f"Time to first token, {name}", values, "ms", chosen, scale=1000))
    found += [
        measured(each.what, each.values, each.unit, {**settings, **each.settings}) for each in _quantities(comparison)
    ]
    found.append(measured("Answers that differ", comparison.different_answers, "answers", settings))
    return found
