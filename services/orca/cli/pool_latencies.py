"""The latencies of a revision's answers as `orca pool latencies` prints them: a few lines, or JSON with every bin.

A percentile is the middle of a bin, at most 1.6 % away from the latencies in it (latency_bins.py).
"""

import json
from typing import Any

from orca.pool.latency_bins import LATENCIES, AnswerLatency, bounds_of
from orca.pool.latency_counts import RATE_WINDOW_MS, LatencyCounts

_PERCENTILES = (50, 90, 99)


def latencies_text(revision: str, counts: LatencyCounts, half_life_s: int) -> str:
    """Return the lines for a person. `counts` has at least one answer."""
    minutes = RATE_WINDOW_MS // 60_000
    lines = [
        f"revision {revision}: {counts.answers} answers in the last 4 hours, half-life {half_life_s} s",
        f"answers per second in the last {minutes} minutes: {counts.per_s():.3g}",
        f"{'seconds':<20}" + "".join(f"{f'p{percent}':>10}" for percent in _PERCENTILES),
    ]
    for latency in LATENCIES:
        figures = _figures(counts, latency, half_life_s).values()
        cells = ("-" if figure is None else f"{figure:.3g}" for figure in figures)
        lines.append(f"{latency.replace('_', ' '):<20}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def latencies_json(revision: str, counts: LatencyCounts, half_life_s: int) -> str:
    """Return the same as JSON, with the answers of each bin and period. `counts` has at least one answer."""
    return json.dumps(
        {
            "revision": revision,
            "answers": counts.answers,
            "answers_per_s": counts.per_s(),
            "half_life_s": half_life_s,
            "seconds": {latency.value: _figures(counts, latency, half_life_s) for latency in LATENCIES},
            "periods": [
                {
                    "begun_s_ago": (counts.awake_ms - period.begins_ms) / 1000,
                    "answers": period.answers,
                    "microseconds": {
                        latency.value: [[*bounds_of(number), count] for number, count in sorted(bins.items())]
                        for latency, bins in period.bins.items()
                    },
                }
                for period in counts.periods
            ],
        }
    )


def _figures(counts: LatencyCounts, latency: AnswerLatency, half_life_s: int) -> dict[str, Any]:
    return {f"p{percent}": counts.percentile_s(latency, percent, half_life_s) for percent in _PERCENTILES}
