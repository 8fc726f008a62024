"""The measured figures of a plan, beside the predicted ones: from the latencies that the pool has counted."""

from dataclasses import dataclass
from math import inf

from orca.planner.search.goal import PlanGoal
from orca.planner.workload.counted import ANSWERS_MIN
from orca.pool.latency_bins import AnswerLatency
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import PERIOD_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """The figures of finished answers, latencies at the percentile of the goal."""

    answers: int  # that the figures are of
    throughput: float  # answers of a group per awake second: under less load than it can serve, those that arrived
    latency_s: float
    ttft_s: float | None  # null if no answer has a token
    tpot_s: float | None  # null if no answer has two

    def describe(self) -> str:
        """Return the figures in a few words: `measured 7.65 s at 5.9`, with the number of answers if they are few."""
        few = f" ({self.answers} answer{'' if self.answers == 1 else 's'})" if self.answers < ANSWERS_MIN else ""
        return f"measured {self.latency_s:.3g} s at {self.throughput:.3g}{few}"


def measured_figures(
    counts: LatencyCounts, goal: PlanGoal, *, since_ms: int | None = None, groups: int = 1, half_life_s: float = inf
) -> MeasuredFigures | None:
    """Return the measured figures; None if no answer has been counted.

    Args:
        since_ms: awake time at which the plan came into force; None: all counts are of it. Only periods that began
            after it count, and after the answers that ran at that time have had the time of the bound to end: others
            have answers of the plan before. So the first figures come within two periods after a change.
        groups: number of groups that the answers are of; a plan predicts the figures of one.
        half_life_s: awake seconds after which an answer has half its weight.
    """
    if since_ms is not None:
        counts = counts.since(since_ms + int(min(goal.latency_ms, PERIOD_MS)))
    is_queueing = goal.kind == "requests"
    latency, first = (
        (AnswerLatency.REQUEST, AnswerLatency.REQUEST_FIRST_TOKEN)
        if is_queueing
        else (AnswerLatency.SEQUENCE, AnswerLatency.FIRST_TOKEN)
    )

    def percentile_s(of: AnswerLatency) -> float | None:
        return counts.percentile_s(of, goal.percentile, half_life_s)

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
