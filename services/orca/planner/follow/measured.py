"""The measured figures of a plan, beside the predicted ones: from the latencies that the pool has counted."""

from dataclasses import dataclass
from math import inf

from orca.planner.search.goal import PlanGoal
from orca.pool.latency_bins import AnswerLatency
from orca.pool.latency_counts import LatencyCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """The figures of finished answers, latencies at the percentile of the goal."""

    answers: int  # that the figures are of
    throughput: float  # answers per awake second: under less load than the plan can serve, those that arrived
    latency_s: float
    ttft_s: float | None  # null if no answer has a token
    tpot_s: float | None  # null if no answer has two

    def describe(self) -> str:
        """Return the figures in a few words: `measured 7.65 s at 5.9`."""
        return f"measured {self.latency_s:.3g} s at {self.throughput:.3g}"


def measured_figures(
    counts: LatencyCounts, goal: PlanGoal, *, since_ms: int = 0, half_life_s: float = inf
) -> MeasuredFigures | None:
    """Return the measured figures; None if no answer has been counted.

    Args:
        since_ms: awake time at which the plan came into force. Only periods that began after it count, because others
            have answers of the plan before it. So the first figures come ten to twenty minutes after a change.
        half_life_s: awake seconds after which an answer has half its weight.
    """
    counts = counts.since(since_ms)
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
        throughput=counts.per_s(),
        latency_s=latency_s,
        ttft_s=percentile_s(first),
        tpot_s=percentile_s(AnswerLatency.TOKEN),
    )
