"""The measured figures of a plan, beside the predicted ones."""

from math import inf

from orca.planner.search.goal import PlanGoal
from orca.pool.latency_counts import LatencyCounts
from orca.pool.measured import MeasuredFigures, answer_figures, are_others_over


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


class AnswersOfPlan:
    """The answers of the plan in force, for a process that follows plans: it keeps a reading of the pool for each."""

    def __init__(self, goal: PlanGoal) -> None:
        self._goal = goal
        self._before: tuple[int, LatencyCounts] | None = None  # since when a plan runs, and a reading soon after

    def figures(
        self, counts: LatencyCounts, *, since_ms: int | None, groups: int, half_life_s: float
    ) -> MeasuredFigures | None:
        """Return the measured figures; None without a plan, or until it has an answer. Args: as of `answer_figures`."""
        if since_ms is None or since_ms > counts.awake_ms:
            return None
        if self._before is None or self._before[0] != since_ms:
            if not are_others_over(counts, since_ms=since_ms, latency_ms=self._goal.latency_ms):
                return None
            self._before = since_ms, counts
        return measured_figures(counts, self._goal, before=self._before[1], groups=groups, half_life_s=half_life_s)
