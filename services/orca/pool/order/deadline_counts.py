"""Counts of the requests of a revision that had a deadline and have ended: in time, and late.

The pool counts each such request once, in the script that writes its end (deadline_outcome.py has the rule). Periods
are those of length_bins.py, and their counts go with those of lengths.
"""

from dataclasses import dataclass, replace

from orca.pool.length_bins import first_of_window


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodDeadlines:
    """The requests with a deadline that ended in one period."""

    period: int  # its number (length_bins.py)
    in_time: int
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineCounts:
    """The requests of a revision with a deadline that ended in the last hours. Each choice is a request of its own."""

    awake_ms: int  # awake time of the pool when it was asked
    periods: tuple[PeriodDeadlines, ...]  # the newest first; those without such a request are left out

    @property
    def requests(self) -> int:
        return sum(period.in_time + period.late for period in self.periods)

    @property
    def in_time_percent(self) -> int | None:
        """Return the share of the requests in time, rounded down, so that 100 means all; None without any request."""
        if not self.requests:
            return None
        return 100 * sum(period.in_time for period in self.periods) // self.requests

    def newest(self, window_ms: int) -> "DeadlineCounts":
        """Return the counts of the newest periods. Args: window_ms: awake time, rounded up to whole periods."""
        first = first_of_window(self.awake_ms, window_ms)
        return replace(self, periods=tuple(period for period in self.periods if period.period >= first))
