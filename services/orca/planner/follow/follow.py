"""The rules of following a plan. Pure: a state and what was observed give the next state.

    every ten minutes    a check of the plan in force on the lengths of now (check.py), and of the best plan for them
    a miss               the plan in force would break the goal: another plan takes over at once
    a gain               another plan would bring 10 % more throughput in three checks in a row: it takes over, but at
                         least half an hour after the last change
    infeasible           no plan meets the goal: the closest one serves, and the state says so

A new plan is put in force, only recommended, or not searched at all (`Replan`). The first plan is no change: it is put
in force in any case. Counted lengths of too few answers change nothing, they only lead to a recommendation.
"""

from dataclasses import dataclass, replace
from math import inf

from orca.planner.follow.check import PlanCheck
from orca.planner.follow.state import FollowState, Replan
from orca.planner.search.plan import Plan
from orca.pool.measured import ANSWERS_MIN, MeasuredFigures

CHECK_EVERY_MS = 600_000
"""Awake time from check to check: ten minutes."""

CHANGES_APART_MS = 1_800_000
"""Least awake time between two changes, except after a miss: half an hour."""

GAIN_LEAST = 0.10
"""Share of more throughput for which a plan that meets the goal is replaced."""

CHECKS_IN_A_ROW = 3
"""Checks that must show such a gain."""

CLOSER_LEAST = 0.05
"""Share by which another plan must come closer to a goal that no plan meets, to take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of a moment."""

    awake_ms: int  # of the pool, now
    replan: Replan = Replan.AUTO
    check: PlanCheck | None = None  # if one was made now
    measured: MeasuredFigures | None = None  # under the plan in force
    is_applicable: bool = True  # the caller can put the best plan of the check in force; false: a person has to


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The wish of the rules: another plan or none, and why."""

    reason: str
    wanted: Plan | None = None
    better_checks: int = 0


def is_check_due(state: FollowState, awake_ms: int) -> bool:
    """Return true if it is time for the next check."""
    # A pool that was emptied begins to count from 0 again.
    return state.checked_ms is None or not 0 <= awake_ms - state.checked_ms < CHECK_EVERY_MS


def begin(plan: Plan, awake_ms: int) -> FollowState:
    """Return the state in which a plan has just come into force, as at a start."""
    return FollowState(
        plan=plan,
        since_ms=awake_ms,
        checked_ms=awake_ms,
        workload=plan.workload,
        predicted=plan.predicted,
        is_met=plan.is_met,
        is_infeasible=not plan.is_met,
        reason="it is the first plan" if plan.is_met else _infeasible(plan),
    )


def follow(state: FollowState, observed: Observed) -> FollowState:
    """Return the next state. Another plan in it than before has to be put in force by the caller."""
    if state.since_ms is not None and state.since_ms > observed.awake_ms:
        state = replace(state, since_ms=observed.awake_ms)  # the pool was emptied
    state = replace(state, measured=observed.measured)
    check = observed.check
    if check is None:
        return state
    state = replace(
        state,
        checked_ms=observed.awake_ms,
        workload=check.workload,
        predicted=check.current,
        is_met=check.is_met,
        is_infeasible=_is_infeasible(state, check),
    )
    verdict = _judge(state, check, observed)
    is_first = state.plan is None
    may_change = (is_first or observed.replan is Replan.AUTO) and observed.is_applicable and check.is_trusted
    if verdict.wanted is not None and may_change:
        begun = begin(verdict.wanted, observed.awake_ms)
        return begun if is_first else replace(begun, reason=verdict.reason)
    recommended = None if observed.replan is Replan.OFF and not is_first else verdict.wanted
    return replace(state, better_checks=verdict.better_checks, recommended=recommended, reason=verdict.reason)


def _is_infeasible(state: FollowState, check: PlanCheck) -> bool:
    """Return whether no plan meets the goal. Without a searched plan, what was known before stays."""
    if check.is_met:
        return False
    return state.is_infeasible if check.best is None else not check.best.is_met


def _judge(state: FollowState, check: PlanCheck, observed: Observed) -> _Verdict:
    """Apply the rules, whatever becomes of their verdict."""
    verdict = _first(check) if state.plan is None else _another(state, state.plan, check, observed)
    if check.is_trusted:
        return verdict
    answers = check.workload.answers
    counted = "1 answer was" if answers == 1 else f"{answers} answers were"
    words = f"{counted} counted, and a plan needs {ANSWERS_MIN} or stated lengths"
    return _Verdict(words, wanted=verdict.wanted)


def _first(check: PlanCheck) -> _Verdict:
    if check.best is None:
        return _Verdict(f"no plan can be made: {check.complaint or 'none was searched'}")
    return _Verdict("it is the first plan" if check.best.is_met else _infeasible(check.best), check.best)


def _another(state: FollowState, plan: Plan, check: PlanCheck, observed: Observed) -> _Verdict:
    best = check.best
    if best is not None and best.schedule.runs_as(plan.schedule):
        best = None
    if not check.is_met:
        return _after_miss(plan, check, best)
    if best is None:
        return _Verdict("the plan meets the goal on the lengths of now")
    assert check.current is not None, "figures that meet the goal"
    gain = best.predicted.throughput / check.current.throughput - 1
    if not best.is_met or gain < GAIN_LEAST:
        return _Verdict("the plan meets the goal on the lengths of now, and no other one brings 10 % more")
    checks = state.better_checks + 1
    words = f"another plan brings {100 * gain:.0f} % more requests/s, in {_checks(checks)}"
    assert state.since_ms is not None, "a plan is in force"
    minutes = (state.since_ms + CHANGES_APART_MS - observed.awake_ms) / 60_000
    if checks < CHECKS_IN_A_ROW:
        return _Verdict(f"{words} of {CHECKS_IN_A_ROW}", better_checks=checks)
    if minutes > 0:
        return _Verdict(f"{words}; the last change was less than half an hour ago", better_checks=checks)
    return _Verdict(words, wanted=best, better_checks=checks)


def _after_miss(plan: Plan, check: PlanCheck, best: Plan | None) -> _Verdict:
    found = f"the plan would miss the goal on the lengths of now{_found(plan, check)}"
    if check.best is None:
        return _Verdict(f"{found}; {check.complaint or 'no other one was searched'}")
    if check.best.is_met:
        return _Verdict(found, wanted=best)
    goal = check.best.goal.goal()
    pressure = inf if check.current is None else check.current.pressure(goal)
    is_closer = check.best.predicted.pressure(goal) < pressure * (1 - CLOSER_LEAST) or check.current is None
    return _Verdict(_infeasible(check.best), wanted=best if is_closer else None)


def _found(plan: Plan, check: PlanCheck) -> str:
    if check.current is None:
        return f": {check.complaint}" if check.complaint else ""
    return f": {check.current.describe(plan.goal.goal())}"


def _infeasible(best: Plan) -> str:
    return f"{best.shortfall()}. The closest one serves"


def _checks(checks: int) -> str:
    return "1 check" if checks == 1 else f"{checks} checks"
