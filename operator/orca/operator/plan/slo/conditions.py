"""The conditions of a plan for spec.slo, from what was observed and planned: pure.

PlanReady  the plan for the present spec is in force
SloMet     the measured latencies under the plan meet the goal; False (Infeasible) if no plan does by simulation
"""

from collections.abc import Sequence

from orca.operator.domain import cluster_events, facts, names, problems
from orca.operator.domain.api_refusals import TRIES_AGAIN, Refusal
from orca.operator.domain.objects import condition, condition_status, controllers
from orca.operator.domain.observation import Observation, PlanInForce
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json, SloSpec
from orca.operator.domain.slo.resources import profiled_devices
from orca.operator.plan.condition import Condition
from orca.operator.plan.slo.device_loan import DeviceLoan
from orca.operator.plan.slo.following import PlanFollowing
from orca.operator.plan.slo.making import PlanMaking, PlanState, answers_of_model
from orca.operator.plan.slo.measuring import compare, is_met, measure
from orca.pool.measured import ANSWERS_MIN

PLAN_READY, SLO_MET = "PlanReady", "SloMet"

PLANNED = "Planned"
MET, MISSED, INFEASIBLE, MEASURING = "Met", "Missed", "Infeasible", "Measuring"
PROFILING, PLANNING, FEW_ANSWERS = "Profiling", "Planning", "FewAnswers"
PROFILE_FAILED, PLAN_FAILED = "ProfileFailed", "PlanFailed"
POOL_UNREACHABLE = "PoolUnreachable"
WARNINGS = frozenset({MISSED, INFEASIBLE, PROFILE_FAILED, PLAN_FAILED})
"""Reasons of Events that somebody should look at."""


def slo_conditions(
    observation: Observation, making: PlanMaking, loan: DeviceLoan, refusals: Sequence[Refusal], problem: str | None
) -> list[Condition]:
    """Return the conditions; none without spec.slo.

    Args: refusals: of the API server to actions of the plan. problem: of the checks of the plan in force.
    """
    slo, found = observation.spec.slo, observation.plan_in_force
    if slo is None:
        return []
    ready = _plan_ready(observation, making, loan, _of_plan(refusals), problem)
    return [ready] if found is None or not ready.is_true else [ready, _slo_met(observation, slo, found)]


def check_problem(observation: Observation, following: PlanFollowing, refusals: Sequence[Refusal]) -> str | None:
    """Return why the next check of the plan in force is not made, or has failed; None if nothing is wrong with it."""
    if following.problem is not None:
        return following.problem
    if refused := _of_plan(refusals):
        return f"{refused[0].message}; {TRIES_AGAIN}"
    job = None if following.job is None else observation.children.get("Job", following.job)
    found = None if job is None else _problem_of(observation, job, names.FOLLOW, "CheckFailed")
    return None if found is None else found.message


def describe(slo: SloSpec) -> str:
    """Return the goal in a few words, such as `99 % within 8 s`."""
    words = [f"{slo.percentile} % within {slo.latency_ms / 1000:g} s"]
    words += [] if slo.ttft_ms is None else [f"first token within {slo.ttft_ms} ms"]
    words += [] if slo.tpot_ms is None else [f"{slo.tpot_ms} ms between tokens"]
    words += [] if slo.rate is None else [f"at {slo.rate:.3g} requests/s"]
    words += [f"with a margin of {slo.margin_percent} %"] if slo.margin_percent else []
    return ", ".join(words)


def _of_plan(refusals: Sequence[Refusal]) -> list[Refusal]:
    return [each for each in refusals if each.is_of_plan and not each.is_undone]


def _slo_met(observation: Observation, slo: SloSpec, found: PlanInForce) -> Condition:
    """Report the goal of a plan that is for the present spec."""
    if (shortfall := found.planned.shortfall) is not None:
        return Condition(SLO_MET, False, INFEASIBLE, f"{shortfall}. The plan in force serves")
    if (problem := observation.pool.problem) is not None:
        message = f"the pool does not answer: {problem}"
        return Condition(SLO_MET, False, POOL_UNREACHABLE, message, is_known=False)
    if found.following is None or found.following.notes.since_ms is None:
        message = "answers are measured when all groups run the plan"
        return Condition(SLO_MET, False, MEASURING, message, is_known=False)
    measured = measure(observation)
    answers = 0 if measured is None else measured.answers
    if measured is None or answers < ANSWERS_MIN:
        message = f"{answers} of at least {ANSWERS_MIN} answers were measured since all groups run the plan"
        return Condition(SLO_MET, False, MEASURING, message, is_known=False)
    is_as_wanted = is_met(slo, measured)
    return Condition(SLO_MET, is_as_wanted, MET if is_as_wanted else MISSED, compare(slo, measured))


def _plan_ready(
    observation: Observation, making: PlanMaking, loan: DeviceLoan, refusals: Sequence[Refusal], check: str | None
) -> Condition:
    if making.state is PlanState.READY:
        assert observation.plan_in_force is not None
        fixed = observation.author_deployment.constraints.describe()
        notes = f"; the spec gives {fixed}" if fixed else ""
        notes += "" if check is None else f"; the plan is not checked: {check}"
        return Condition(PLAN_READY, True, PLANNED, observation.plan_in_force.planned.summary + notes)
    refused = Problem("Refused", f"{refusals[0].message}; {TRIES_AGAIN}") if refusals else None
    problem = refused or _why_not(observation, making, loan)
    serves = "the defaults serve" if observation.plan_in_force is None else "the plan before serves"
    return Condition(PLAN_READY, False, problem.reason, f"{problem.message}; {serves}")


def _why_not(observation: Observation, making: PlanMaking, loan: DeviceLoan) -> Problem:
    slo, counts = observation.spec.slo, observation.pool
    assert slo is not None
    if making.state is PlanState.SUSPENDED:
        return Problem("Suspended", "the resource is suspended")
    if making.state is PlanState.WAITING and counts.problem is not None:
        return Problem(POOL_UNREACHABLE, f"the plan waits for the pool, which does not answer: {counts.problem}")
    if making.state is PlanState.WAITING:
        return Problem("WaitingForModel", "the plan waits for the model")
    if making.state is PlanState.FEW_ANSWERS:
        answers = answers_of_model(observation)
        found = "1 answer" if answers == 1 else f"{answers} answers"
        return Problem(
            FEW_ANSWERS,
            f"the operator plans from {ANSWERS_MIN} answers on, and the pool has counted {found} of this model in the"
            " last four hours: wait, or state slo.workload.lengths",
        )
    return _problem_of_job(observation, making, loan) or _progress(observation, slo, making)


def _progress(observation: Observation, slo: SloSpec, making: PlanMaking) -> Problem:
    if making.state is PlanState.PLANNING:
        return Problem(PLANNING, f"the best schedule for {describe(slo)} is searched for, which takes about a minute")
    number = profiled_devices(observation.author_deployment)
    devices = "1 device" if number == 1 else f"{number} devices"
    return Problem(PROFILING, f"the model is measured on {devices}, which takes about five minutes")


def _problem_of_job(observation: Observation, making: PlanMaking, loan: DeviceLoan) -> Problem | None:
    """Return why the Job has no result yet, if not because it is at work."""
    role, failed = (names.PLAN, PLAN_FAILED) if making.state is PlanState.PLANNING else (names.PROFILE, PROFILE_FAILED)
    if making.bad_result is not None:
        return Problem(failed, making.bad_result)
    job = observation.children.get("Job", str(making.job))
    found = None if job is None else _problem_of(observation, job, role, failed)
    if job is None or found is None or facts.lent_s(job) is None:
        return found
    again = f"groups have lent it devices, which happens once: delete the Job {job['metadata']['name']} to try again"
    return Problem(found.reason, f"{found.message}; {again if loan.borrower is None else 'groups lend it devices'}")


def _problem_of(observation: Observation, job: Json, role: str, failed: str) -> Problem | None:
    """Return the problem of a Job. Args: role: of its pods. failed: reason for a Job that has failed."""
    pods = [pod for pod in observation.children.pods(role) if _is_of(pod, job)]
    newest = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
    if condition_status(job, "Failed") == "True":
        found = None if newest is None else problems.last_words(newest)
        return Problem(failed, f"{found or condition(job, 'Failed').get('message') or 'its pod has failed'}")
    if (refused := cluster_events.why_no_pods(observation.children, observation.events, [job])) is not None:
        return refused
    if newest is None:
        return None
    waits = cluster_events.why_pods_wait(observation.children, observation.events, [newest], observation.now_s)
    return waits or problems.of_pod(newest)


def _is_of(pod: Json, job: Json) -> bool:
    return job["metadata"]["uid"] in controllers(pod)
