"""The requests with a deadline that the in-memory pool has counted; order/deadline_outcome.py has the rule."""

from collections import Counter

from orca.pool.length_bins import kept_periods, period_of
from orca.pool.order.deadline_counts import DeadlineCounts, PeriodDeadlines


class CountedDeadlines:
    """The counts of all revisions, by period."""

    def __init__(self) -> None:
        self._periods: dict[tuple[str, int], Counter[bool]] = {}  # in time -> requests

    @property
    def requests(self) -> int:
        return sum(counted.total() for counted in self._periods.values())

    def count(self, revision: str, awake_ms: int, *, in_time: bool | None) -> None:
        """Count a request that has ended. Args: in_time: None counts nothing."""
        if in_time is not None:
            self._periods.setdefault((revision, period_of(awake_ms)), Counter())[in_time] += 1

    def drop_old(self, awake_ms: int) -> None:
        kept = kept_periods(awake_ms)
        self._periods = {name: counted for name, counted in self._periods.items() if name[1] in kept}

    def of(self, revision: str, awake_ms: int) -> DeadlineCounts:
        found = [(period, self._periods.get((revision, period))) for period in kept_periods(awake_ms)]
        return DeadlineCounts(
            awake_ms=awake_ms,
            periods=tuple(
                PeriodDeadlines(period=period, in_time=counted[True], late=counted[False])
                for period, counted in found
                if counted is not None
            ),
        )
