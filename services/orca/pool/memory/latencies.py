"""The latencies of answers that the in-memory pool has counted; latency_bins.py has the rule."""

from collections import Counter
from dataclasses import dataclass, field

from orca.core.domain.request import End
from orca.pool.latency_bins import LATENCIES, AnswerLatency, bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import OWN_ENDS
from orca.pool.memory.periods import CountedPeriods


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
        self.periods = CountedPeriods(TimedPeriod)

    @property
    def answers(self) -> int:
        return sum(timed.bins[AnswerLatency.REQUEST].total() for timed in self.periods)

    def count(self, revision: str, latencies_us: dict[AnswerLatency, float], end: End, awake_ms: int) -> None:
        """Count an answer if it ended by itself."""
        if end.reason in OWN_ENDS:
            timed = self.periods.running(revision, awake_ms)
            for latency, latency_us in latencies_us.items():
                timed.bins[latency][bin_of(latency_us)] += 1

    def of(self, revision: str, awake_ms: int) -> LatencyCounts:
        return LatencyCounts(
            awake_ms=awake_ms,
            periods=tuple(
                PeriodLatencies(
                    period=period,
                    first_ms=timed.first_ms,
                    bins={latency: dict(bins) for latency, bins in timed.bins.items() if bins},
                )
                for period, timed in self.periods.kept(revision, awake_ms)
            ),
        )
