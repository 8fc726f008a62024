"""The requests with a deadline that the in-memory pool has counted; order/deadline_outcome.py has the rule."""

from collections import Counter

from orca.pool.memory.periods import CountedPeriods
from orca.pool.order.deadline_counts import DeadlineCounts, PeriodDeadlines


class CountedDeadlines:
    """The counts of all revisions, by period."""

    def __init__(self) -> None:
        self.periods = CountedPeriods[Counter[bool]](lambda _awake_ms: Counter())  # in time -> requests

    @property
    def requests(self) -> int:
        return sum(counted.total() for counted in self.periods)

    def count(self, revision: str, awake_ms: int, *, in_time: bool | None) -> None:
        """Count a request that has ended. Args: in_time: None counts nothing."""
        if in_time is not None:
            self.periods.running(revision, awake_ms)[in_time] += 1

    def of(self, revision: str, awake_ms: int) -> DeadlineCounts:
        return DeadlineCounts(
            awake_ms=awake_ms,
            periods=tuple(
                PeriodDeadlines(period=period, in_time=counted[True], late=counted[False])
                for period, counted in self.periods.kept(revision, awake_ms)
            ),
        )
