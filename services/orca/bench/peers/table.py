"""The output of `orca bench peers`: pure functions of the systems' results."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from orca.bench.peers.comparison import PeerComparison
from orca.bench.peers.memory import INTERVAL_S, ProcessPeak, RankMemory
from orca.bench.peers.results import NOT_JUDGED, Latencies, PeerResult
from orca.bench.peers.seq2seq import table as seq2seq

MIB = 2**20

FIGURES: tuple[Callable[[Latencies], float], ...] = (
    lambda latencies: latencies.first_token_s.p50,
    lambda latencies: latencies.first_token_s.p99,
    lambda latencies: latencies.normalised_s.p50,
    lambda latencies: latencies.normalised_s.p99,
)
"""Columns of the table of latencies."""


def lines(comparison: PeerComparison, results: Sequence[PeerResult]) -> list[str]:
    """Return tables of speed or, if requests arrive at a rate, of latency; then equal tokens, and memory."""
    *others, ours = results
    rows = _latencies(results) if comparison.is_paced else _speeds(results)
    if comparison.is_encoder_decoder:
        rows += seq2seq.lines(comparison, results)
    for other in others:
        same = sum(a == b for a, b in zip(ours.answers[-1], other.answers[-1], strict=True))
        rows.append(f"{same} of {len(ours.answers[-1])} requests: the same tokens from orca and {other.name}")
    return rows + _memory(results)


def _speeds(results: Sequence[PeerResult]) -> list[str]:
    """Return median and spread of generated tokens/s, ratios, and the reference's judgement of the tokens."""
    ours = results[-1]
    rows = [f"{'generated tokens/s':<26}{'median':>9}{'lowest':>9}{'highest':>9}{'orca is':>10}  tokens"]
    for result in results:
        speeds = result.tokens_per_s
        ratio = f"{ours.median_tokens_per_s / result.median_tokens_per_s:.2f} x" if result is not ours else ""
        rows.append(
            f"{result.name:<26}{result.median_tokens_per_s:>9.1f}{min(speeds):>9.1f}{max(speeds):>9.1f}"
            f"{ratio:>10}  {_verdict(result)}"
        )
    for result in results:
        if result.shares_of_limit:
            share = median(result.shares_of_limit)
            rows.append(f"{result.name}: {share:.0%} of the speed of its matrix products alone")
    return rows


def _latencies(results: Sequence[PeerResult]) -> list[str]:
    """Return the latencies, each the median of the rounds; a ratio below 1 means that orca takes less time."""
    ours = results[-1]
    head = f"{'p50':>9}{'p99':>9}{'orca takes':>14}"
    rows = [
        f"{'milliseconds':<26}{'to the first token':>32}{'end to end / token':>32}",
        f"{'median of the rounds':<26}{head}{head}  tokens",
    ]
    for result in results:
        row = f"{result.name:<26}"
        for half, tail in (FIGURES[:2], FIGURES[2:]):
            theirs, longest = result.median_latency(half), result.median_latency(tail)
            ratio = f"{ours.median_latency(half) / theirs:.2f} x" if result is not ours else ""
            row += f"{1000 * theirs:>9.1f}{1000 * longest:>9.1f}{ratio:>14}"
        rows.append(f"{row}  {_verdict(result)}")
    rows.append("transformers takes no part if requests arrive at a rate; it judges the tokens")
    return rows


def _verdict(result: PeerResult) -> str:
    return NOT_JUDGED.get(result.name) or str(result.judgements[-1])


def _memory(results: Sequence[PeerResult]) -> list[str]:
    """Return the peak memory of each process over all rounds; for ranks also compared with their weights and KV."""
    rows = [f"{'peak of memory, MiB':<38}{'whole':>9}{'anonymous':>11}"]
    for result in results:
        peaks = result.peaks
        for peak in peaks:
            name = result.name if len(peaks) == 1 else f"{result.name}: {peak.name}"
            rows.append(f"{name:<38}{peak.whole_bytes / MIB:>9.0f}{peak.anonymous_bytes / MIB:>11.0f}")
    rows.append(
        f"whole is VmHWM, with the pages of libraries; anonymous is the highest RssAnon, sampled every {INTERVAL_S} s"
    )
    for result in results:
        if result.rank_memory:
            needed, ranks = _least_memory(result), _ranks(result)
            whole = sum(rank.whole_bytes for rank in ranks) / needed.bytes
            anonymous = sum(rank.anonymous_bytes for rank in ranks) / needed.bytes
            rows.append(
                f"ranks of {result.name}: {whole:.2f} x (anonymous {anonymous:.2f} x) of the memory that they need, "
                f"{needed.weight_bytes / MIB:.0f} MiB of weights and {needed.kv_bytes / MIB:.0f} MiB of KV in use"
            )
    return rows


def _least_memory(result: PeerResult) -> RankMemory:
    """Return the memory of the round in which the ranks needed least: the strictest measure of their peaks."""
    return min(result.rank_memory, key=lambda needed: needed.bytes)


def _ranks(result: PeerResult) -> list[ProcessPeak]:
    return [peak for peak in result.peaks if peak.name == "rank"]


def to_json(comparison: PeerComparison, results: Sequence[PeerResult]) -> dict[str, Any]:
    """Return the figures and all settings that they depend on, as plain data."""
    ours, spec = results[-1], comparison.trace.spec
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": comparison.model.name,
        "threads": comparison.threads,
        "batch_size": comparison.batch_size,
        "requests": spec.requests,
        "rate_per_s": spec.rate,
        "prompt_tokens": str(spec.prompt_tokens),
        "new_tokens": str(spec.new_tokens),
        "generated_tokens": comparison.trace.new_tokens,
        "seed": spec.seed,
        "orca_up": list(comparison.up_options),
        "systems": [_system(result, ours) for result in results],
    }


def _system(result: PeerResult, ours: PeerResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "tokens_per_s": result.tokens_per_s,
        "median_tokens_per_s": result.median_tokens_per_s,
        "orca_is_times_as_fast": ours.median_tokens_per_s / result.median_tokens_per_s,
        "shares_of_limit": result.shares_of_limit,
        "latencies": [asdict(latencies) for latencies in result.latencies],
        "judgements": [judgement.to_json() for judgement in result.judgements],
        "memory": [[asdict(peak) for peak in peaks] for peaks in result.memory],
        "ranks_hold": [asdict(needed) for needed in result.rank_memory],
    }
