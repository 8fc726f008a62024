"""One check of the plan in force, with its decision: for a process that looks once, such as a Job.

`orca up` follows its plan in one process for days (cli/up/slo/following.py). A Job reads the state that the check
before has left, and leaves the next one. Both apply the same rules (follow.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from orca.core.domain.errors import SettingError
from orca.planner.follow.check import PlanCheck, PlanLimits, check_plan
from orca.planner.follow.follow import Observed, begin, follow
from orca.planner.follow.measured import measured_figures
from orca.planner.follow.state import FollowState, Replan
from orca.planner.profile.profile import Profile
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan
from orca.planner.search.profiled_problem import fitting_model
from orca.planner.workload.counted import lengths_now
from orca.planner.workload.workload import Workload
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.records import LengthCounts

NO_LENGTHS = "too few answers: none was counted in the last four hours, and no lengths are stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOrder:
    """The order for one check."""

    profile: Profile
    goal: PlanGoal
    limits: PlanLimits
    plan: Plan  # in force
    state: FollowState | None = None  # that the check before has left; None: there was none
    stated: Workload | None = None  # lengths that count until enough answers were counted
    replan: Replan = Replan.AUTO
    since_ms: int | None = None  # awake time at which the plan came into force; None: that of the state, or now
    groups: int = 1  # that the counted answers are of
    seed: int = 0  # of the simulated requests


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """The counts of a pool about the answers of the model in force, at one moment."""

    lengths: LengthCounts
    latencies: LatencyCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """The result of one check."""

    before: Plan  # the plan in force until now
    state: FollowState  # the next one; another plan in it is to be put in force
    check: PlanCheck | None  # None: there are no lengths to check the plan on
    reason: str  # of the decision, or why there was no check

    @property
    def plan(self) -> Plan:
        """The plan that is to be in force."""
        assert self.state.plan is not None, "a plan was in force before"
        return self.state.plan

    @property
    def is_new(self) -> bool:
        """True if another plan than before is to be in force."""
        return self.plan != self.before


def check_once(
    order: FollowOrder,
    read: Callable[[], PoolCounts],
    report: Callable[[str], None],
    *,
    check: Callable[..., PlanCheck] = check_plan,
) -> CheckedPlan:
    """Check the plan in force, and decide what becomes of it.

    Args:
        read: returns what the pool has counted until now; what it raises passes through.
        report: called with a line of progress now and then.
        check: does the costly part.
    Raises: SettingError as `check_plan`, for stated lengths and limits; never for what was counted.
    """
    if order.stated is not None:
        fitting_model(order.stated, order.profile.key, order.limits.max_model_len)
    counts = read()
    state = _known_state(order, counts.latencies.awake_ms, report)
    workload, complaint = _lengths_now(order, counts.lengths)
    found: PlanCheck | None = None
    if workload is not None:
        found = check(
            order.profile,
            workload,
            order.goal,
            order.limits,
            order.plan,
            is_searching=order.replan is not Replan.OFF,
            report=report,
            seed=order.seed,
        )
        # The check may have taken minutes. What changes, changes now.
        counts = read()
    observed = Observed(
        awake_ms=counts.latencies.awake_ms,
        replan=order.replan,
        check=found,
        measured=measured_figures(
            counts.latencies,
            order.goal,
            since_ms=state.since_ms,
            groups=order.groups,
            half_life_s=HALF_LIFE_S,
        ),
    )
    # The time is that of the check, also of one without lengths.
    decided = replace(follow(state, observed), checked_ms=observed.awake_ms)
    return CheckedPlan(
        before=order.plan, state=decided, check=found, reason=complaint if found is None else decided.reason
    )


def _known_state(order: FollowOrder, awake_ms: int, report: Callable[[str], None]) -> FollowState:
    """Return the state before the check. The plan in force is the truth: a state of another plan is of no use."""
    known = order.state
    if known is not None and known.plan != order.plan:
        report("the state of the check before is of another plan: following begins with this one")
        known = None
    state = begin(order.plan, awake_ms) if known is None else known
    # A pool that was emptied counts from 0 again. A time of before says nothing about it.
    is_known = order.since_ms is not None and order.since_ms <= awake_ms
    return replace(state, since_ms=order.since_ms) if is_known else state


def _lengths_now(order: FollowOrder, counts: LengthCounts) -> tuple[Workload | None, str]:
    """Return the lengths to check the plan on; None with the reason, if there are none."""
    workload = lengths_now(counts, order.stated, half_life_s=HALF_LIFE_S)
    if workload is None:
        return None, NO_LENGTHS
    try:
        # Answers from before a lower bound on lengths may be longer than requests are now.
        fitting_model(workload, order.profile.key, order.limits.max_model_len)
    except SettingError as error:
        return None, f"the counted lengths are not those of now: {error}"
    return workload, ""
