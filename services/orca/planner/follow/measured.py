"""The measured figures of a plan, beside the predicted ones."""

from math import inf

from orca.planner.search.goal import PlanGoal
from orca.pool.latency_counts import LatencyCounts
from orca.pool.measured import MeasuredFigures, answer_figures


def measured_figures(
    counts: LatencyCounts,
    goal: PlanGoal,
    *,
    since_ms: int | None = None,
    before: LatencyCounts | None = None,
    groups: int = 1,
    half_life_s: float = inf,
) -> MeasuredFigures | None:
    """Return the figures of answers at the percentile of a goal; None if no answer has been counted.

    Args: since_ms, before, groups, half_life_s: as of `answer_figures`.
    """
    return answer_figures(
        counts,
        kind=goal.kind,
        percentile=goal.percentile,
        latency_ms=goal.latency_ms,
        since_ms=since_ms,
        before=before,
        groups=groups,
        half_life_s=half_life_s,
    )
