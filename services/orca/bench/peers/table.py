"""What `orca bench peers` prints and writes: pure functions of what the systems did."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from orca.bench.peers.compare import Contest
from orca.bench.peers.memory import INTERVAL_S, Held, Peak
from orca.bench.peers.standing import NOT_JUDGED, Latencies, Standing

MIB = 2**20

FIGURES: tuple[Callable[[Latencies], float], ...] = (
    lambda latencies: latencies.first_token_s.p50,
    lambda latencies: latencies.first_token_s.p99,
    lambda latencies: latencies.normalised_s.p50,
    lambda latencies: latencies.normalised_s.p99,
)
"""Columns of the table of latencies."""


def lines(contest: Contest, standings: Sequence[Standing]) -> list[str]:
    """Speed or, where requests come one by one, latency; then whose tokens are the same, and memory."""
    *others, ours = standings
    rows = _latencies(standings) if contest.is_paced else _speeds(standings)
    for other in others:
        same = sum(a == b for a, b in zip(ours.answers[-1], other.answers[-1], strict=True))
        rows.append(f"{same} of {len(ours.answers[-1])} requests: the same tokens from orca and {other.name}")
    return rows + _memory(standings)


def _speeds(standings: Sequence[Standing]) -> list[str]:
    """Median and spread of generated tokens/s, ratios, and what the reference says of the tokens."""
    ours = standings[-1]
    rows = [f"{'generated tokens/s':<26}{'median':>9}{'lowest':>9}{'highest':>9}{'orca is':>10}  tokens"]
    for standing in standings:
        speeds = standing.tokens_per_s
        ratio = f"{ours.median_tokens_per_s / standing.median_tokens_per_s:.2f} x" if standing is not ours else ""
        rows.append(
            f"{standing.name:<26}{standing.median_tokens_per_s:>9.1f}{min(speeds):>9.1f}{max(speeds):>9.1f}"
            f"{ratio:>10}  {_verdict(standing)}"
        )
    for standing in standings:
        if standing.shares_of_limit:
            share = median(standing.shares_of_limit)
            rows.append(f"{standing.name}: {share:.0%} of the speed that its matrix products have alone")
    return rows


def _latencies(standings: Sequence[Standing]) -> list[str]:
    """Each the median of the rounds; a ratio below 1 says that orca takes less time."""
    ours = standings[-1]
    head = f"{'p50':>9}{'p99':>9}{'orca takes':>14}"
    rows = [
        f"{'milliseconds':<26}{'to the first token':>32}{'end to end / token':>32}",
        f"{'median of the rounds':<26}{head}{head}  tokens",
    ]
    for standing in standings:
        row = f"{standing.name:<26}"
        for half, tail in (FIGURES[:2], FIGURES[2:]):
            theirs, longest = standing.median_latency(half), standing.median_latency(tail)
            ratio = f"{ours.median_latency(half) / theirs:.2f} x" if standing is not ours else ""
            row += f"{1000 * theirs:>9.1f}{1000 * longest:>9.1f}{ratio:>14}"
        rows.append(f"{row}  {_verdict(standing)}")
    rows.append("transformers takes no part where requests come one by one; it judges the tokens")
    return rows


def _verdict(standing: Standing) -> str:
    return NOT_JUDGED.get(standing.name) or str(standing.judgements[-1])


def _memory(standings: Sequence[Standing]) -> list[str]:
    """Per process, the most of all rounds; of ranks also beside what they hold."""
    rows = [f"{'peak of memory, MiB':<38}{'whole':>9}{'anonymous':>11}"]
    for standing in standings:
        peaks = standing.peaks
        for peak in peaks:
            name = standing.name if len(peaks) == 1 else f"{standing.name}: {peak.name}"
            rows.append(f"{name:<38}{peak.whole_bytes / MIB:>9.0f}{peak.anonymous_bytes / MIB:>11.0f}")
    rows.append(
        f"whole is VmHWM, with the pages of libraries; anonymous is the most of RssAnon, looked at every {INTERVAL_S} s"
    )
    for standing in standings:
        if standing.held:
            held, ranks = _least_held(standing), _ranks(standing)
            whole = sum(rank.whole_bytes for rank in ranks) / held.bytes
            anonymous = sum(rank.anonymous_bytes for rank in ranks) / held.bytes
            rows.append(
                f"ranks of {standing.name}: {whole:.2f} x (anonymous {anonymous:.2f} x) of what they hold, "
                f"{held.weight_bytes / MIB:.0f} MiB of weights and {held.kv_bytes / MIB:.0f} MiB of KV in use"
            )
    return rows


def _least_held(standing: Standing) -> Held:
    """Of the round in which the ranks held least: the strictest measure for their memory."""
    return min(standing.held, key=lambda held: held.bytes)


def _ranks(standing: Standing) -> list[Peak]:
    return [peak for peak in standing.peaks if peak.name == "rank"]


def to_json(contest: Contest, standings: Sequence[Standing]) -> dict[str, Any]:
    """Figures and all that they depend on, as plain data."""
    ours, spec = standings[-1], contest.trace.spec
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": contest.model.name,
        "threads": contest.threads,
        "batch_size": contest.batch_size,
        "requests": spec.requests,
        "rate_per_s": spec.rate,
        "prompt_tokens": str(spec.prompt_tokens),
        "new_tokens": str(spec.new_tokens),
        "generated_tokens": contest.trace.new_tokens,
        "seed": spec.seed,
        "orca_up": list(contest.up_options),
        "systems": [_system(standing, ours) for standing in standings],
    }


def _system(standing: Standing, ours: Standing) -> dict[str, Any]:
    return {
        "name": standing.name,
        "tokens_per_s": standing.tokens_per_s,
        "median_tokens_per_s": standing.median_tokens_per_s,
        "orca_is_times_as_fast": ours.median_tokens_per_s / standing.median_tokens_per_s,
        "shares_of_limit": standing.shares_of_limit,
        "latencies": [asdict(latencies) for latencies in standing.latencies],
        "judgements": [judgement.to_json() for judgement in standing.judgements],
        "memory": [[asdict(peak) for peak in peaks] for peaks in standing.memory],
        "ranks_hold": [asdict(held) for held in standing.held],
    }
