"""Counts by revision and period, in memory; length_bins.py has the rule of periods."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from orca.pool.length_bins import kept_periods, period_of

T = TypeVar("T")


class CountedPeriods(Generic[T]):
    """Counts of one kind, for each revision and each period in which there was something to count."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """Args: make: returns the counts of a new period, which begins to count at an awake time in ms."""
        self._make = make
        self._counts: dict[tuple[str, int], T] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._counts.values())

    def running(self, revision: str, awake_ms: int) -> T:
        """Return the counts of the period that runs."""
        name = revision, period_of(awake_ms)
        if name not in self._counts:
            self._counts[name] = self._make(awake_ms)
        return self._counts[name]

    def drop_old(self, awake_ms: int) -> None:
        """Forget the periods that are not kept any more."""
        kept = kept_periods(awake_ms)
        self._counts = {name: counts for name, counts in self._counts.items() if name[1] in kept}

    def kept(self, revision: str, awake_ms: int) -> Iterator[tuple[int, T]]:
        """Yield the kept periods of a revision and their counts, the newest first."""
        for period in kept_periods(awake_ms):
            counts = self._counts.get((revision, period))
            if counts is not None:
                yield period, counts
