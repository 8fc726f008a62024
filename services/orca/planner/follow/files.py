"""The files that the Jobs of a plan (`orca plan`, `orca follow`) leave for the operator (core/job_files.py)."""

from dataclasses import asdict

from orca.core.job_files import PLAN_FILE, REPORT_FILE, SHORTFALL_FILE, STATE_FILE, SUMMARY_FILE
from orca.core.plan_report import PlanReport, ReportedFigures, ReportedLengths, one_line, report_to_text
from orca.planner.follow.follow import begin
from orca.planner.follow.single_check import CheckedPlan
from orca.planner.follow.state import FollowState, state_to_json
from orca.planner.search.plan import Plan, PlannedWorkload, to_json


def first_files(plan: Plan) -> dict[str, str]:
    """Return the files of a plan that was just made."""
    state = begin(plan, 0)
    shortfall = None if plan.is_met else plan.shortfall()
    return _files(plan, state, plan_report(plan, state, is_new=True, reason=state.reason), shortfall)


def check_files(checked: CheckedPlan) -> dict[str, str]:
    """Return the files of a check, about the plan that is to be in force after it."""
    plan, state = checked.plan, checked.state
    report = plan_report(plan, state, is_new=checked.is_new, reason=checked.reason)
    return _files(plan, state, report, _shortfall(checked)) | {STATE_FILE: state_to_json(state).decode()}


def plan_report(plan: Plan, state: FollowState, *, is_new: bool, reason: str) -> PlanReport:
    """Return the report on a plan in force.

    Args:
        is_new: it was not in force before.
        reason: of the last decision.
    """
    return PlanReport(
        planned_lengths=_lengths(plan.workload),
        lengths=_lengths(state.workload or plan.workload),
        predicted=None if state.predicted is None else ReportedFigures(**asdict(state.predicted)),
        is_met=state.is_met,
        is_infeasible=state.is_infeasible,
        is_new=is_new,
        reason=one_line(reason),
        recommended=None if state.recommended is None else one_line(state.recommended.describe()),
    )


def _files(plan: Plan, state: FollowState, report: PlanReport, shortfall: str | None) -> dict[str, str]:
    found = {
        PLAN_FILE: to_json(plan).decode(),
        SUMMARY_FILE: one_line(plan.describe(state.predicted)),
        REPORT_FILE: report_to_text(report),
    }
    return found if shortfall is None else found | {SHORTFALL_FILE: one_line(shortfall)}


def _shortfall(checked: CheckedPlan) -> str | None:
    """Return what can be achieved instead of the goal, if no plan meets it on the lengths of now."""
    plan, state, check = checked.plan, checked.state, checked.check
    if state.is_met or not state.is_infeasible:
        return None
    best = None if check is None else check.best
    if best is not None and not best.is_met:
        return best.shortfall()
    if not plan.is_met:
        return plan.shortfall()
    # An earlier search has found that no plan meets the goal, and none that is much closer than the plan in force.
    goal = plan.goal.goal()
    figures = "" if state.predicted is None else f". The plan in force: {state.predicted.describe(goal)}"
    return f"no schedule met the goal ({goal.describe()}) in the last search{figures}"


def _lengths(workload: PlannedWorkload) -> ReportedLengths:
    return ReportedLengths(
        answers=workload.answers,
        prompt_mean=workload.prompt_mean,
        output_mean=workload.output_mean,
        output_p99=workload.output_p99,
    )
