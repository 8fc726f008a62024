"""`orca bench chunks`: measures prompts in chunks against whole prompts, on the engine alone.

Every run gets the same requests at its start: first with whole prompts, then with a bound on the tokens of a step.
A whole prompt makes all requests of its step wait: the gap between two of their tokens is the time of that step.
Chunks bound the step, but each further chunk reads all weights once more. The table shows throughput, the gaps between
a request's tokens, and the share of requests that have the same tokens as with whole prompts. In float32 that share
is 100 % except for near-ties, because the sums are taken in another order.
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
from orca.bench.peers.workload import PeerWorkload
from orca.core.domain.step import Step
from orca.planner.simulate.outcomes import percentile
from orca.worker.models.build import StageModel, load_stage


@dataclass(slots=True, kw_only=True)
class ChunkRun:
    """The measurements with one bound on the tokens of a step."""

    max_batch_tokens: int | None  # None: whole prompts
    seconds: list[float] = field(default_factory=list)  # a value per round
    gaps_s: list[float] = field(default_factory=list)  # between tokens of one request, of all rounds, sorted
    longest_s: list[float] = field(default_factory=list)  # the longest gap of each round
    same_tokens: list[float] = field(default_factory=list)  # share of requests that have the tokens of whole prompts
    tokens: int = 0  # generated in a round

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.seconds)


def measure(
    workload: PeerWorkload, bounds: Sequence[int], *, dtype: str, rounds: int, report_progress: Callable[[str], None]
) -> list[ChunkRun]:
    """Run whole prompts and then each bound, once per round.

    Raises: ModelError; SettingError for a bound that a full batch already reaches.
    """
    torch.set_num_threads(workload.threads)
    torch.set_grad_enabled(False)
    model = load_stage(workload.model, dtype=dtype)
    runs = [ChunkRun(max_batch_tokens=bound) for bound in (None, *bounds)]
    for chunk_run in runs:  # also finds a bad bound before the long runs
        run(model, workload.head(2 * workload.batch_size), max_batch_tokens=chunk_run.max_batch_tokens)
    for number in range(1, rounds + 1):
        whole: list[list[int]] = []
        for chunk_run in runs:
            answers = _run(model, workload, chunk_run)
            whole = whole or answers
            chunk_run.same_tokens.append(sum(map(list.__eq__, answers, whole)) / len(whole))
            chunk_run.tokens = sum(map(len, answers))
            report_progress(
                f"round {number}: {_bound_label(chunk_run)}, {chunk_run.tokens / chunk_run.seconds[-1]:.0f} tokens/s"
            )
    return runs


def _run(model: StageModel, workload: PeerWorkload, into: ChunkRun) -> list[list[int]]:
    last: dict[int, float] = {}  # handle -> time of its last token
    gaps: list[float] = []

    def record_gaps(step: Step) -> None:
        now_s = perf_counter()
        for row in step.rows:
            if row.sample:
                if row.handle in last:
                    gaps.append(now_s - last[row.handle])
                last[row.handle] = now_s

    start_s = perf_counter()
    answers = run(model, workload, record_gaps, max_batch_tokens=into.max_batch_tokens).tokens
    into.seconds.append(perf_counter() - start_s)
    into.gaps_s = sorted(into.gaps_s + gaps)
    into.longest_s.append(max(gaps, default=0.0))
    return answers


def _bound_label(chunk_run: ChunkRun) -> str:
    return "whole" if chunk_run.max_batch_tokens is None else str(chunk_run.max_batch_tokens)


def lines(runs: Sequence[ChunkRun]) -> list[str]:
    """Return a table of medians, with gaps in milliseconds."""
    head = f"{'tokens/step':>11}{'tokens/s':>10}{'gap p50':>9}{'p99':>8}{'longest':>9}{'same':>7}"
    return [head, *map(_line, runs)]


def _line(chunk_run: ChunkRun) -> str:
    p50, p99 = (1000 * percentile(chunk_run.gaps_s, share) for share in (0.5, 0.99))
    longest, same = 1000 * median(chunk_run.longest_s), median(chunk_run.same_tokens)
    label, tokens_per_s = _bound_label(chunk_run), chunk_run.tokens_per_s
    return f"{label:>11}{tokens_per_s:>10.0f}{p50:>9.1f}{p99:>8.1f}{longest:>9.1f}{same:>7.0%}"


def to_json(runs: Sequence[ChunkRun]) -> list[dict[str, Any]]:
    """Return the same figures as plain data."""
    return [
        {
            "max_batch_tokens": chunk_run.max_batch_tokens,
            "tokens_per_s": chunk_run.tokens_per_s,
            "gap_p50_s": percentile(chunk_run.gaps_s, 0.5),
            "gap_p99_s": percentile(chunk_run.gaps_s, 0.99),
            "longest_gap_s": median(chunk_run.longest_s),
            "same_tokens": median(chunk_run.same_tokens),
        }
        for chunk_run in runs
    ]


def figures(runs: Sequence[ChunkRun], settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the same figures as records with these settings of model and trace."""
    found = []
    for chunk_run in runs:
        chosen = {**settings, "max_batch_tokens": chunk_run.max_batch_tokens or "whole"}
        speeds = [chunk_run.tokens / seconds for seconds in chunk_run.seconds]
        gap_s = percentile(chunk_run.gaps_s, 0.99)
        found.append(measured("Generated tokens per second", speeds, "tokens/s", chosen))
        found.append(
            measured(
                "Gap between two tokens of a request, p99", gap_s, "ms", chosen, scale=1000, runs=len(chunk_run.seconds)
            )
        )
    return found
