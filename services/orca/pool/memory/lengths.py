"""The lengths of answers that the in-memory pool has counted; length_bins.py has the rule."""

from collections import Counter
from dataclasses import dataclass, field

from orca.core.domain.request import End, FinishReason
from orca.pool.length_bins import OWN_ENDS, age_ms, bin_of
from orca.pool.memory.periods import CountedPeriods
from orca.pool.records import Cell, LengthCounts, PeriodLengths


@dataclass(slots=True)
class CountedPeriod:
    """The answers of one revision in one period."""

    cells: Counter[Cell] = field(default_factory=Counter)
    cut: int = 0


class CountedLengths:
    """The counts of all revisions, by period."""

    def __init__(self) -> None:
        self.periods = CountedPeriods[CountedPeriod](lambda _awake_ms: CountedPeriod())

    @property
    def answers(self) -> int:
        return sum(counted.cells.total() for counted in self.periods)

    def count(self, revision: str, prompt_tokens: int, end: End, awake_ms: int) -> None:
        """Count an answer if it ended by itself."""
        if end.reason in OWN_ENDS:
            counted = self.periods.running(revision, awake_ms)
            counted.cells[bin_of(prompt_tokens), bin_of(end.count)] += 1
            counted.cut += end.reason is FinishReason.LENGTH

    def of(self, revision: str, awake_ms: int) -> LengthCounts:
        return LengthCounts(
            periods=tuple(
                PeriodLengths(age_ms=age_ms(period, awake_ms), cells=dict(counted.cells), cut=counted.cut)
                for period, counted in self.periods.kept(revision, awake_ms)
            )
        )
