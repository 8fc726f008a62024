"""The loan of devices of groups to the Job that measures the model: pure.

The pod of a profile needs devices as a stage does. If groups of its own resource have them all, it would wait for ever.

    1. The pod has waited for WAIT_S while all groups have a node each. The operator notes the time on the Job.
    2. Fewer groups are wanted until the pod has a node, for LOAN_S at most: less as many as have the devices, but one
       stays if there are several. The requests of the others go on in it. Without it they wait in the pool.
    3. Then all groups are wanted again. Those that lent their devices start as soon as there are any, which may be when
       the profile is complete.

A Job gets one loan, for its first pod. If it fails after that, it is not made again by itself (making.py), since each
try could take groups away. A Job that is made again because its result was lost is another one. The time on the Job is
all that is remembered, so an operator that starts goes on from there.
"""

from dataclasses import dataclass
from math import ceil

from orca.operator.domain import cluster_events, facts, names, problems
from orca.operator.domain.actions import Annotate
from orca.operator.domain.objects import (
    controllers,
    has_ended,
    is_going,
    is_placed,
    seconds,
    since,
    unplaced_since_s,
)
from orca.operator.domain.observation import Observation
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.resources import profiled_devices
from orca.operator.plan.slo.making import PlanMaking, PlanState, profile_name

WAIT_S = 60.0
"""Time for which a pod waits for devices before groups lend theirs: a node may be on its way."""

LOAN_S = 300.0
"""Longest time for which groups are away while the pod has no node: they drain, and the cluster has to notice."""

DEVICES_LENT = "DevicesLent"

_LACKS = ("Insufficient ", "cannot allocate all claims", "exceeded quota")
"""Words of the scheduler and the API server about what a group would give back: resources, claims and quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoan:
    """The loan of one reconcile. The default is that of a resource without one."""

    groups: int = 0  # that are not wanted for now
    mark: Annotate | None = None  # the note with which a loan begins
    borrower: str | None = None  # the Job that waits for the devices or measures on them

    @property
    def problem(self) -> Problem | None:
        """The reason why groups have no pods, or why they wait; None without a borrower."""
        if self.borrower is None:
            return None
        message = f"devices of groups are lent to the Job {self.borrower}, which measures the model"
        return Problem(DEVICES_LENT, f"{message}; the groups come back when there are devices")


def plan_loan(observation: Observation, making: PlanMaking, revision: str) -> DeviceLoan:
    """Return the loan of now. Args: revision: of the groups that the spec wants."""
    job = _profile_job(observation, making)
    if job is None or making.job in making.leaving or is_going(job) or since(job, "Failed") or since(job, "Complete"):
        return DeviceLoan()
    lent_s = facts.lent_s(job)
    if lent_s is None:
        waits_s = _waits_since_s(observation, job) if making.state is PlanState.PROFILING else None
        is_due = waits_s is not None and observation.now_s - waits_s >= WAIT_S
        return DeviceLoan(mark=_mark(observation, job)) if is_due and _can_lend(observation, revision) else DeviceLoan()
    is_placed_now = any(map(is_placed, _pods(observation, job)))
    # A clock that was set back ends the loan, since nobody knows any more how long it has lasted.
    is_young = 0 <= observation.now_s - lent_s < LOAN_S
    is_on = is_young and not is_placed_now and not _has_failed_pods(job)
    return DeviceLoan(
        groups=lent_groups(observation) if is_on else 0,
        borrower=job["metadata"]["name"] if is_on or is_placed_now else None,
    )


def lent_groups(observation: Observation) -> int:
    """Return how many groups lend their devices: as many as have those of a profile, but one stays of several."""
    parallelism, groups = observation.spec.parallelism, observation.spec.wanted_groups
    needed = ceil(profiled_devices(observation.author_deployment) / (parallelism.stages * parallelism.tensor))
    return min(needed, max(groups - 1, 1))


def _profile_job(observation: Observation, making: PlanMaking) -> Json | None:
    """Return the Job that measures the model, also while the pool does not answer."""
    is_of_profile = making.state in (PlanState.PROFILING, PlanState.WAITING) and making.job == profile_name(observation)
    return observation.children.get("Job", str(making.job)) if is_of_profile else None


def _has_failed_pods(job: Json) -> bool:
    """Return whether a pod of the Job has failed: the next one waits like any other, and groups do not come and go."""
    return int(job.get("status", {}).get("failed") or 0) > 0


def _waits_since_s(observation: Observation, job: Json) -> float | None:
    """Return since when a Job has waited for what a group would give back; None if it does not."""
    pods = _pods(observation, job)
    if not pods:
        refused = cluster_events.why_no_pods(observation.children, observation.events, [job])
        is_short = refused is not None and _is_lack(refused.message)
        return seconds(job["metadata"]["creationTimestamp"]) if is_short else None
    return min((unplaced_since_s(pod) for pod in pods if not is_placed(pod) and _lacks_room(pod)), default=None)


def _lacks_room(pod: Json) -> bool:
    problem = problems.of_pod(pod)
    return problem is not None and problem.reason == problems.NO_CAPACITY and _is_lack(problem.message)


def _is_lack(message: str) -> bool:
    return any(words in message for words in _LACKS)


def _pods(observation: Observation, job: Json) -> list[Json]:
    """Return the pods of a Job that run or are to run."""
    found = [pod for pod in observation.children.pods(names.PROFILE) if job["metadata"]["uid"] in controllers(pod)]
    return [pod for pod in found if not has_ended(pod) and not is_going(pod)]


def _can_lend(observation: Observation, revision: str) -> bool:
    """Return whether groups are as the spec wants, and each has its nodes: none is on its way or waits, too."""
    groups = observation.groups
    are_placed = all(each.is_placed and not each.is_leaving and each.revision == revision for each in groups)
    return 0 < len(groups) == observation.spec.wanted_groups and are_placed


def _mark(observation: Observation, job: Json) -> Annotate:
    metadata = job["metadata"]
    reason = "it finds no devices, and groups lend it theirs"
    return Annotate("Job", metadata["name"], metadata["uid"], facts.lent_annotations(observation.now_s), reason)
