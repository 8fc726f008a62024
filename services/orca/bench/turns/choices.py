"""The choices of one call: how many of their prompt tokens are computed, and how long the first tokens take."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.turns.calls import complete, converse
from orca.bench.turns.compare import WARM_UP
from orca.bench.turns.variants import CacheUse, MeasuredModel, RunningOrca, running_orca


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesPlan:
    """The calls to make."""

    choices: int
    prompt_tokens: int
    new_tokens: int
    rounds: int  # calls of each kind, each with a prompt of its own
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesRun:
    """The calls of one kind on one system."""

    cache: CacheUse
    choices: int
    prompt_tokens: int
    computed_tokens: Sequence[int]  # of prompts, in each call
    first_s: Sequence[float]  # from the call to its first token, of any choice
    last_s: Sequence[float]  # from the call to its last token

    @property
    def prompts(self) -> list[float]:
        """The prompt tokens computed, as multiples of one prompt."""
        return [tokens / self.prompt_tokens for tokens in self.computed_tokens]


def measure(model: MeasuredModel, plan: ChoicesPlan, report: Callable[[str], None]) -> list[ChoicesRun]:
    """Make calls with one and with all choices, on both systems. Raises: ServerFailed, CallFailed."""
    found = []
    for cache in CacheUse:
        report(f"{model.name}, {cache} cache")
        found += asyncio.run(_measure(model, plan, cache))
    return found


async def _measure(model: MeasuredModel, plan: ChoicesPlan, cache: CacheUse) -> list[ChoicesRun]:
    async with running_orca(model, cache) as system:
        await converse(system.target, WARM_UP)
        return [await _calls(system, plan, cache, choices) for choices in (1, plan.choices)]


async def _calls(system: RunningOrca, plan: ChoicesPlan, cache: CacheUse, choices: int) -> ChoicesRun:
    computed, first_s, last_s = [], [], []
    for number in range(plan.rounds):
        prompt = Random(f"{plan.seed}/{choices}/{number}").choices(
            range(system.target.vocab_size), k=plan.prompt_tokens
        )
        before, start_s = system.prompt_tokens, perf_counter()
        stream = await complete(system.target, prompt, plan.new_tokens, choices=choices)
        computed.append(system.prompt_tokens - before)
        first_s.append(stream.token_s[0] - start_s)
        last_s.append(stream.token_s[-1] - start_s)
    return ChoicesRun(
        cache=cache,
        choices=choices,
        prompt_tokens=plan.prompt_tokens,
        computed_tokens=computed,
        first_s=first_s,
        last_s=last_s,
    )


def lines(runs: Sequence[ChoicesRun]) -> list[str]:
    """Return a table for a terminal."""
    found = [f"{'cache':<10}{'choices':>8}{'prompts computed':>18}{'first token ms':>16}{'last token ms':>15}"]
    for each in runs:
        first, last = 1000 * median(each.first_s), 1000 * median(each.last_s)
        found.append(f"{each.cache:<10}{each.choices:>8}{median(each.prompts):>18.3f}{first:>16.1f}{last:>15.1f}")
    return found


def to_json(runs: Sequence[ChoicesRun]) -> list[dict[str, Any]]:
    """Return the runs as plain data."""
    return [asdict(each) for each in runs]


def figures(runs: Sequence[ChoicesRun], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the figures of the pages."""
    found = []
    for each in runs:
        chosen = {**settings, "cache": each.cache.value, "choices": each.choices, "prompt_tokens": each.prompt_tokens}
        found.append(measured("Prompts computed for a call", each.prompts, "prompts", chosen))
        found.append(measured("Time to first token of a call", each.first_s, "ms", chosen, scale=1000))
        found.append(measured("Time to last token of a call", each.last_s, "ms", chosen, scale=1000))
    return found
