"""The lines that `orca bench peers` adds for an encoder-decoder model."""

from collections.abc import Sequence
from statistics import mean

from orca.bench.peers.comparison import PeerComparison
from orca.bench.peers.results import CTRANSLATE2_BY_SOURCE, CTRANSLATE2_TWO, ENGINE, PeerResult

LOAD = 0.7
"""Share of CTranslate2's capacity at which latencies are compared."""


def lines(comparison: PeerComparison, results: Sequence[PeerResult]) -> list[str]:
    """Return how the engine compares with CTranslate2, both in process; without a rate also the rate to use next."""
    by_name = {result.name: result for result in results}
    engine = by_name[ENGINE]
    peers = [result for result in results if result.name.startswith("ctranslate2")]
    if comparison.is_paced:
        return [
            f"orca engine takes {_whole_s(engine) / _whole_s(peer):.2f} x of {peer.name}: whole answer, median"
            for peer in peers
        ]
    rows = [
        f"orca engine is {engine.median_tokens_per_s / peer.median_tokens_per_s:.2f} x as fast as {peer.name}"
        for peer in peers
    ]
    # Sorting by answer needs lengths that no server knows, and int8 is another precision.
    if usable := [result for result in peers if result.name in (CTRANSLATE2_BY_SOURCE, CTRANSLATE2_TWO)]:
        fastest = max(usable, key=lambda result: result.median_tokens_per_s)
        capacity = fastest.median_tokens_per_s / mean(comparison.workload.new_tokens)
        rows.append(f"{LOAD:.0%} of the capacity of {fastest.name} is --rate {LOAD * capacity:.2g}")
    return rows


def _whole_s(result: PeerResult) -> float:
    return result.median_latency(lambda latencies: latencies.whole_s.p50)
