"""The latencies of a revision's answers as a reader gets them, by periods: percentiles and throughput."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import orjson

from orca.pool.latency_bins import BIN_MAX, AnswerLatency, middle_s
from orca.pool.length_bins import COUNT_MAX, PERIOD_MS, age_ms, first_of_window, period_of

RATE_WINDOW_MS = 2 * PERIOD_MS
"""Awake time over which readers take the throughput by default: ten to twenty minutes, in whole periods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodLatencies:
    """The answers of one period that ended by `stop` or `length`, by the bins of their latencies (latency_bins.py)."""

    period: int  # its number (length_bins.py)
    first_ms: int  # awake time at which its first answer ended
    bins: Mapping[AnswerLatency, Mapping[int, int]]  # number of answers

    @property
    def begins_ms(self) -> int:
        """Awake time at which the period began."""
        return self.period * PERIOD_MS

    @property
    def answers(self) -> int:
        return sum(self.bins.get(AnswerLatency.REQUEST, {}).values())

    def without(self, earlier: "PeriodLatencies", awake_ms: int) -> "PeriodLatencies":
        """Return the period without the answers of an earlier reading. Args: awake_ms: of that reading."""
        bins = {
            latency: {
                number: left
                for number, count in counts.items()
                if (left := count - earlier.bins.get(latency, {}).get(number, 0)) > 0
            }
            for latency, counts in self.bins.items()
        }
        return dataclasses.replace(self, first_ms=max(self.first_ms, awake_ms), bins=bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCounts:
    """The latencies of a revision's answers in the last hours. Each choice is an answer of its own."""

    awake_ms: int  # awake time of the pool when it was asked
    periods: tuple[PeriodLatencies, ...]  # the newest first; those without an answer are left out

    @property
    def answers(self) -> int:
        return sum(period.answers for period in self.periods)

    def since(self, awake_ms: int) -> "LatencyCounts":
        """Return the counts without those of periods that began before an awake time.

        So answers of another schedule, which ended before a change at that time, have no part in them.
        """
        kept = tuple(period for period in self.periods if period.begins_ms >= awake_ms)
        return dataclasses.replace(self, periods=kept)

    def after(self, earlier: "LatencyCounts") -> "LatencyCounts":
        """Return the counts of the answers that ended after an earlier reading of this pool.

        A pool that was emptied meanwhile has only such answers.
        """
        if self.awake_ms < earlier.awake_ms:
            return self
        running = period_of(earlier.awake_ms)
        known = next((period for period in earlier.periods if period.period == running), None)
        newer = (
            period if known is None or period.period > running else period.without(known, earlier.awake_ms)
            for period in self.periods
            if period.period >= running
        )
        return dataclasses.replace(self, periods=tuple(period for period in newer if period.answers))

    def of_running_period(self) -> "LatencyCounts":
        """Return the counts of the period that runs: all that a later reading needs of this one (`after`)."""
        running = period_of(self.awake_ms)
        return dataclasses.replace(self, periods=tuple(each for each in self.periods if each.period == running))

    def percentile_s(self, latency: AnswerLatency, percent: float, half_life_s: float = inf) -> float | None:
        """Return the latency that at least so many percent of the answers stay within; None without any answer.

        It is the middle of a bin, at most 1.6 % away.

        Args: half_life_s: awake seconds after which an answer has half its weight, more than 0.
        """
        weights: dict[int, float] = {}
        for period in self.periods:
            weight = 0.5 ** (age_ms(period.period, self.awake_ms) / 1000 / half_life_s)
            for number, count in period.bins.get(latency, {}).items():
                weights[number] = weights.get(number, 0.0) + weight * count
        wanted = percent / 100 * sum(weights.values()) * (1 - 1e-12)
        reached = 0.0
        for number in sorted(weights):
            reached += weights[number]
            if reached >= wanted and reached > 0:
                return middle_s(number)
        return None

    def per_s(self, window_ms: int = RATE_WINDOW_MS) -> float:
        """Return the answers that ended per awake second, over the newest periods that make up the window.

        Time without an answer counts, but for the time before the first one of all: the service may have started then.

        Args: window_ms: awake time, rounded up to whole periods, the one that runs now included.
        """
        first = first_of_window(self.awake_ms, window_ms)
        newest = [period for period in self.periods if period.period >= first]
        if not newest:
            return 0.0
        begin_ms = max(first * PERIOD_MS, self.periods[-1].first_ms)
        return sum(period.answers for period in newest) / max(1.0, (self.awake_ms - begin_ms) / 1000)


def counts_to_json(counts: LatencyCounts) -> str:
    """Return counts as JSON, for who keeps a reading."""
    return orjson.dumps(dataclasses.asdict(counts), option=orjson.OPT_NON_STR_KEYS).decode()


def counts_from_json(text: str) -> LatencyCounts:
    """Read what `counts_to_json` wrote. Raises: ValueError if it is anything else."""
    try:
        content = orjson.loads(text)
        periods = tuple(
            PeriodLatencies(
                period=int(each["period"]),
                first_ms=int(each["first_ms"]),
                bins={
                    AnswerLatency(name): {int(number): int(count) for number, count in found.items()}
                    for name, found in each["bins"].items()
                },
            )
            for each in content["periods"]
        )
        counts = LatencyCounts(awake_ms=int(content["awake_ms"]), periods=periods)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"these are no counts of latencies: {error!r}") from error
    for number, count in (pair for period in periods for bins in period.bins.values() for pair in bins.items()):
        if not (0 <= number <= BIN_MAX and 0 <= count <= COUNT_MAX):
            raise ValueError(f"there is no bin {number}, or it cannot have {count} answers")
    return counts
