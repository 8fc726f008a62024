"""The way to a plan for spec.slo: the next move, from what was observed. Pure.

    1. A Job measures the model (profile), and leaves the profile in the pool.
    2. The operator writes it into a ConfigMap.
    3. A Job makes the plan from the profile, and leaves the plan in the pool.
    4. The operator writes it into a ConfigMap, which is then in force (in_force.py), and is followed (following.py).

Job, result and ConfigMap have one name, which follows from everything that decides the result (keys.py). So the same
spec leads to the same move, whatever happened to the operator meanwhile, and a ConfigMap never changes. A Job goes when
its ConfigMap is there, or when the spec wants another one. While the pool does not answer, Jobs stay as they are.

A Job that has failed is made again after RETRY_S: somebody may have fixed the cause. So is one whose result the pool
has lost. A failed Job to which a group has lent devices (device_loan.py) stays until somebody deletes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from orca.core.job_files import PROFILE_FILE, read_files
from orca.operator.domain import names
from orca.operator.domain.facts import lent_s
from orca.operator.domain.objects import ObjectKey, is_going, label_map, seconds, since
from orca.operator.domain.observation import Observation
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.following import read_first
from orca.operator.domain.slo.keys import plan_key, profile_key
from orca.operator.domain.slo.planned import PlannedService
from orca.operator.plan.children import hash_of
from orca.operator.render import planning, pool
from orca.pool.measured import ANSWERS_MIN

RETRY_S = 120.0
LOST_S = 30.0
"""A result that is not in the pool so long after its Job has completed does not come any more."""

SPEC_HAS_CHANGED = "the spec or the promise of the pool has changed"
"""Reason for which a Job goes."""


class PlanState(Enum):
    """The state of a plan."""

    NOT_WANTED = auto()  # there is no slo
    SUSPENDED = auto()
    WAITING = auto()  # for the pool, or for the model
    PROFILING = auto()
    FEW_ANSWERS = auto()
    PLANNING = auto()
    READY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMaking:
    """The objects to write, to keep and to delete for the plan of a resource."""

    state: PlanState
    manifests: tuple[Json, ...] = ()
    kept: frozenset[ObjectKey] = frozenset()  # objects that stay as they are
    leaving: Mapping[str, str] = field(default_factory=dict)  # why a Job goes, by its name
    job: str | None = None  # the Job that runs, or is to run
    bad_result: str | None = None  # why the result that the Job has left is not taken


def plan_slo(observation: Observation, *, can_start: bool) -> PlanMaking:
    """Return the next move. Args: can_start: pods that read the wanted model and use the pool can start."""
    if observation.spec.slo is None:
        return PlanMaking(state=PlanState.NOT_WANTED)
    profile, plan = _names(observation)
    kept = {("ConfigMap", profile)} if has_profile(observation) else set()
    if (found := observation.plan_in_force) is not None:
        if found.is_wanted:
            # It is kept where it is followed.
            return PlanMaking(state=PlanState.READY, kept=frozenset(kept))
        kept.add(("ConfigMap", found.name))
    if observation.spec.suspend:
        return PlanMaking(state=PlanState.SUSPENDED, kept=frozenset(kept))
    is_measured = ("ConfigMap", profile) in kept
    wanted, state = (plan, PlanState.PLANNING) if is_measured else (profile, PlanState.PROFILING)
    files, problem = _result(observation, wanted, is_plan=is_measured)
    if files is not None:
        role = names.PLAN if is_measured else names.PROFILE
        made = planning.result(observation.author_deployment, wanted, role, files)
        # A ConfigMap of that name that cannot be read goes first. Until the new one is there, the Job stays.
        is_free = observation.children.get("ConfigMap", wanted) is None
        held = frozenset(kept | {("Job", wanted)})
        return PlanMaking(state=state, manifests=(made,) if is_free else (), kept=held, job=wanted)
    if not can_start or observation.pool.problem is not None:
        return PlanMaking(state=PlanState.WAITING, kept=frozenset(kept | {("Job", wanted)}), job=wanted)
    if is_measured and _lacks_answers(observation, wanted):
        return PlanMaking(state=PlanState.FEW_ANSWERS, kept=frozenset(kept))
    return _with_job(observation, state, wanted, frozenset(kept), problem)


def results_to_read(observation: Observation) -> tuple[str, ...]:
    """Return the keys of the results that the next move needs of the pool; none while nothing is on its way."""
    if observation.spec.slo is None:
        return ()
    profile, plan = _names(observation)
    found = observation.plan_in_force
    if found is not None and found.is_wanted:
        return ()
    return (plan,) if has_profile(observation) else (profile,)


def needs_counts(observation: Observation) -> bool:
    """Return whether the next move depends on the number of answers that the pool has counted."""
    slo = observation.spec.slo
    if slo is None or slo.workload.lengths is not None:
        return False
    return results_to_read(observation) == _names(observation)[1:]


def _names(observation: Observation) -> tuple[str, str]:
    """Return the names of the wanted profile and of the wanted plan."""
    deployment, image = observation.author_deployment, observation.images.worker
    profile = names.profile(deployment.name, profile_key(deployment, image))
    return profile, names.plan(deployment.name, plan_key(deployment, image))


def profile_name(observation: Observation) -> str:
    """Return the name of the profile that the spec wants."""
    return _names(observation)[0]


def has_profile(observation: Observation) -> bool:
    """Return whether the profile that the spec wants is there."""
    there = observation.children.get("ConfigMap", profile_name(observation))
    return there is not None and not is_going(there) and PROFILE_FILE in (there.get("data") or {})


def _lacks_answers(observation: Observation, job: str) -> bool:
    """Return whether too few answers were counted. A Job that has begun finds that out by itself."""
    if not needs_counts(observation) or observation.children.get("Job", job) is not None:
        return False
    return answers_of_model(observation) < ANSWERS_MIN


def answers_of_model(observation: Observation) -> int:
    """Return how many answers of the wanted model the pool has counted, as far as known."""
    return 0 if observation.is_another_known_in_force else observation.pool.counted_answers or 0


def _result(observation: Observation, name: str, *, is_plan: bool) -> tuple[dict[str, str] | None, str | None]:
    """Return the files that a Job has left in the pool, or why they cannot be used; None twice if there are none."""
    body = observation.pool.results.get(name)
    if body is None:
        return None, None
    try:
        files = read_files(body)
        if is_plan:
            check_fits(observation, read_first(files)[0])
        elif PROFILE_FILE not in files:
            raise ValueError(f"there is no {PROFILE_FILE}")
    except (ValueError, RecursionError) as error:
        return None, f"its result cannot be used: {error}"
    return files, None


def check_fits(observation: Observation, planned: PlannedService) -> None:
    """Check a plan against the spec.

    Raises: ValueError if it takes more devices than the spec allows, or does not keep to what the spec gives.
    """
    slo, constraints = observation.spec.slo, observation.author_deployment.constraints
    assert slo is not None
    if not planned.fits(constraints, slo.devices):
        given = f"devices {slo.devices}" + (f", {fixed}" if (fixed := constraints.describe()) else "")
        raise ValueError(f"the plan does not keep to what the spec gives ({given})")


def _with_job(
    observation: Observation, state: PlanState, name: str, kept: frozenset[ObjectKey], problem: str | None
) -> PlanMaking:
    """Return the move that runs a Job."""
    there, new = observation.children.get("Job", name), _render_job(observation, state, name)
    if there is None or is_going(there):
        return PlanMaking(state=state, manifests=(new,), kept=kept, job=name, bad_result=problem)
    reason = _why_it_goes(observation, there, new)
    if reason is not None:
        return PlanMaking(state=state, kept=kept, leaving={name: reason}, job=name, bad_result=problem)
    return PlanMaking(state=state, kept=kept | {("Job", name)}, job=name, bad_result=problem)


def _render_job(observation: Observation, state: PlanState, name: str) -> Json:
    deployment, images = observation.author_deployment, observation.images
    connection = pool.connection(deployment, observation.pool_secret)
    if state is PlanState.PROFILING:
        return planning.profile_job(deployment, images.worker, name, connection)
    profile, _ = _names(observation)
    least = least_slots(observation)
    return planning.plan_job(deployment, images.scheduler, name, profile, connection, least_slots=least)


def least_slots(observation: Observation) -> int | None:
    """Return the KV slots without which a group of the wanted model would not form; None if any number will do.

    It must have those that the spec chooses. Otherwise it must have those that the pool has promised to a request.
    """
    chosen = observation.spec.scheduler.kv_slots
    promised = None if observation.is_another_known_in_force else observation.pool.promised_slots
    return promised if chosen is None else chosen


def _why_it_goes(observation: Observation, there: Json, new: Json) -> str | None:
    if label_map(there).get(names.HASH_LABEL) != hash_of(observation.deployment, new):
        return SPEC_HAS_CHANGED
    failed, completed = since(there, "Failed"), since(there, "Complete")
    # Each try of a Job that found no devices by itself could take a group away.
    if failed is not None and lent_s(there) is None and observation.now_s - seconds(failed) > RETRY_S:
        return "it has failed, and somebody may have fixed the cause"
    if completed is not None and observation.now_s - seconds(completed) > LOST_S:
        return "its result is lost"
    return None
