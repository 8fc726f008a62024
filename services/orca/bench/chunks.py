"""What running prompts in chunks is worth: the engine alone, the same requests at the start of each run, prompts whole
and then in steps of at most so many tokens.

A whole prompt makes everybody in its step wait: the gap between two tokens of the others is the time of that step.
Chunks bound the step, and cost the weights' way through the processor once more for each. Throughput is shown beside
the gaps between a request's tokens, and the share of requests whose tokens are those of whole prompts (in float32 all
but for near-ties: sums are taken in another order).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.peers.engine_peer import run
from orca.bench.peers.workload import Workload
from orca.bench.report import percentile
from orca.core.domain.step import Step
from orca.worker.models.build import StageModel, load_stage


@dataclass(slots=True, kw_only=True)
class Chunked:
    """The runs with one bound."""

    max_batch_tokens: int | None  # None: prompts whole
    seconds: list[float] = field(default_factory=list)  # a value per round
    gaps_s: list[float] = field(default_factory=list)  # between tokens of one request, of all rounds, sorted
    longest_s: list[float] = field(default_factory=list)  # the longest gap of each round
    same: list[float] = field(default_factory=list)  # share of requests with the tokens of whole prompts
    tokens: int = 0  # of a round

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.seconds)


def measure(
    workload: Workload, bounds: Sequence[int], *, dtype: str, rounds: int, say: Callable[[str], None]
) -> list[Chunked]:
    """Whole prompts first, then each bound, by turns.

    Raises: ModelError; SettingError for a bound that leaves no room beside a full batch.
    """
    torch.set_num_threads(workload.threads)
    torch.set_grad_enabled(False)
    model = load_stage(workload.model, dtype=dtype)
    runs = [Chunked(max_batch_tokens=bound) for bound in (None, *bounds)]
    for each in runs:  # also finds a bad bound before the long runs
        run(model, workload.head(2 * workload.batch_size), max_batch_tokens=each.max_batch_tokens)
    for number in range(1, rounds + 1):
        whole: list[list[int]] = []
        for each in runs:
            answers = _run(model, workload, each)
            whole = whole or answers
            each.same.append(sum(map(list.__eq__, answers, whole)) / len(whole))
            each.tokens = sum(map(len, answers))
            say(f"round {number}: {_name(each)}, {each.tokens / each.seconds[-1]:.0f} tokens/s")
    return runs


def _run(model: StageModel, workload: Workload, into: Chunked) -> list[list[int]]:
    last: dict[int, float] = {}  # when a handle had its last token
    gaps: list[float] = []

    def note(step: Step) -> None:
        now_s = perf_counter()
        for row in step.rows:
            if row.sample:
                if row.handle in last:
                    gaps.append(now_s - last[row.handle])
                last[row.handle] = now_s

    start_s = perf_counter()
    answers = run(model, workload, note, max_batch_tokens=into.max_batch_tokens).tokens
    into.seconds.append(perf_counter() - start_s)
    into.gaps_s = sorted(into.gaps_s + gaps)
    into.longest_s.append(max(gaps, default=0.0))
    return answers


def _name(each: Chunked) -> str:
    return "whole" if each.max_batch_tokens is None else str(each.max_batch_tokens)


def lines(runs: Sequence[Chunked]) -> list[str]:
    """A table of medians; gaps in milliseconds."""
    head = f"{'tokens/step':>11}{'tokens/s':>10}{'gap p50':>9}{'p99':>8}{'longest':>9}{'same':>7}"
    return [head, *map(_line, runs)]


def _line(each: Chunked) -> str:
    p50, p99 = (1000 * percentile(each.gaps_s, share) for share in (0.5, 0.99))
    longest, same = 1000 * median(each.longest_s), median(each.same)
    return f"{_name(each):>11}{each.tokens_per_s:>10.0f}{p50:>9.1f}{p99:>8.1f}{longest:>9.1f}{same:>7.0%}"


def to_json(runs: Sequence[Chunked]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "max_batch_tokens": each.max_batch_tokens,
            "tokens_per_s": each.tokens_per_s,
            "gap_p50_s": percentile(each.gaps_s, 0.5),
            "gap_p99_s": percentile(each.gaps_s, 0.99),
            "longest_gap_s": median(each.longest_s),
            "same_tokens": median(each.same),
        }
        for each in runs
    ]


def figures(runs: Sequence[Chunked], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the same as figures of a model and a trace with these settings."""
    found = []
    for each in runs:
        chosen = {**settings, "max_batch_tokens": each.max_batch_tokens or "whole"}
        speeds = [each.tokens / seconds for seconds in each.seconds]
        gap_s = percentile(each.gaps_s, 0.99)
        found.append(measured("Generated tokens per second", speeds, "tokens/s", chosen))
        found.append(
            measured(
                "Gap between two tokens of a request, p99", gap_s, "ms", chosen, scale=1000, runs=len(each.seconds)
            )
        )
    return found
