"""The latencies of answers that the in-memory pool has counted; latency_bins.py has the rule."""

from collections import Counter
from dataclasses import dataclass, field

from orca.core.domain.request import End
from orca.pool.latency_bins import LATENCIES, AnswerLatency, bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import OWN_ENDS, kept_periods, period_of


@dataclass(slots=True)
class TimedPeriod:
    """The answers of one revision in one period."""

    first_ms: int  # awake time
    bins: dict[AnswerLatency, Counter[int]] = field(
        default_factory=lambda: {latency: Counter() for latency in LATENCIES}
    )


class CountedLatencies:
    """The counts of all revisions, by period."""

    def __init__(self) -> None:
        self._periods: dict[tuple[str, int], TimedPeriod] = {}

    @property
    def answers(self) -> int:
        return sum(timed.bins[AnswerLatency.REQUEST].total() for timed in self._periods.values())

    def count(self, revision: str, latencies_us: dict[AnswerLatency, float], end: End, awake_ms: int) -> None:
        """Count an answer if it ended by itself."""
        if end.reason in OWN_ENDS:
            timed = self._periods.setdefault((revision, period_of(awake_ms)), TimedPeriod(awake_ms))
            for latency, latency_us in latencies_us.items():
                timed.bins[latency][bin_of(latency_us)] += 1

    def drop_old(self, awake_ms: int) -> None:
        kept = kept_periods(awake_ms)
        self._periods = {name: timed for name, timed in self._periods.items() if name[1] in kept}

    def of(self, revision: str, awake_ms: int) -> LatencyCounts:
        found = [(period, self._periods.get((revision, period))) for period in kept_periods(awake_ms)]
        return LatencyCounts(
            awake_ms=awake_ms,
            periods=tuple(
                PeriodLatencies(
                    period=period,
                    first_ms=timed.first_ms,
                    bins={latency: dict(bins) for latency, bins in timed.bins.items() if bins},
                )
                for period, timed in found
                if timed is not None
            ),
        )
