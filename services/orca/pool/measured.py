"""The measured figures of a service under one schedule, from the latencies that the pool has counted."""

from dataclasses import dataclass
from math import inf

from orca.pool.latency_bins import AnswerLatency
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import PERIOD_MS

ANSWERS_MIN = 200
"""Fewest answers from which a plan is made or judged: with fewer, the 99th percentile is a matter of chance."""

_SEQUENCE = AnswerLatency.SEQUENCE, AnswerLatency.FIRST_TOKEN
_REQUESTS = AnswerLatency.REQUEST, AnswerLatency.REQUEST_FIRST_TOKEN
"""The latencies of an answer and of its first token: from the first step, and from the submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """The figures of finished answers, latencies at the percentile of a goal."""

    answers: int  # that the figures are of
    throughput: float  # answers of a group per awake second: under less load than it can serve, those that arrived
    latency_s: float
    ttft_s: float | None  # null if no answer has a token
    tpot_s: float | None  # null if no answer has two

    def describe(self) -> str:
        """Return the figures in a few words: `measured 7.65 s at 5.9`, with the number of answers if they are few."""
        few = f" ({self.answers} answer{'' if self.answers == 1 else 's'})" if self.answers < ANSWERS_MIN else ""
        return f"measured {self.latency_s:.3g} s at {self.throughput:.3g}{few}"


def answer_figures(
    counts: LatencyCounts,
    *,
    kind: str,
    percentile: float,
    latency_ms: float,
    since_ms: int | None = None,
    before: LatencyCounts | None = None,
    groups: int = 1,
    half_life_s: float = inf,
) -> MeasuredFigures | None:
    """Return the measured figures; None if no answer has been counted.

    Args:
        kind: `requests` counts from the submission, `sequence` from the first step.
        percentile: of the answers, for the latencies.
        latency_ms: the bound of the goal, perhaps without end.
        since_ms: awake time at which the schedule came into force; None: all counts are of it. Only periods that began
            after it count, and after the answers that ran at that time have had the time of the bound to end: others
            have answers of the schedule before. So the first figures come within two periods after a change.
        before: an earlier reading of this pool, after `are_others_over`; only later answers count. It takes the place
            of since_ms, and the first figures come at once.
        groups: number of groups that the answers are of; a plan predicts the figures of one.
        half_life_s: awake seconds after which an answer has half its weight.
    """
    if before is not None:
        counts = counts.after(before)
    elif since_ms is not None:
        counts = counts.since(_others_end_ms(since_ms, latency_ms))
    latency, first = _REQUESTS if kind == "requests" else _SEQUENCE

    def percentile_s(of: AnswerLatency) -> float | None:
        return counts.percentile_s(of, percentile, half_life_s)

    latency_s = percentile_s(latency)
    if latency_s is None:
        return None
    return MeasuredFigures(
        answers=counts.answers,
        throughput=counts.per_s() / groups,
        latency_s=latency_s,
        ttft_s=percentile_s(first),
        tpot_s=percentile_s(AnswerLatency.TOKEN),
    )


def are_others_over(counts: LatencyCounts, *, since_ms: int, latency_ms: float) -> bool:
    """Return whether the answers that ran when a schedule came into force have had the time of the bound to end.

    Args: counts: a reading of the pool. since_ms, latency_ms: as of `answer_figures`.
    """
    return counts.awake_ms >= _others_end_ms(since_ms, latency_ms)


def _others_end_ms(since_ms: int, latency_ms: float) -> int:
    return since_ms + int(min(latency_ms, PERIOD_MS))
