"""The way from check to check of the plan in force: the next move, from what was observed. Pure.

    1. When a check is due, a Job simulates the plan on the lengths of now, and decides (`orca follow`). It leaves the
       plan that is to be in force in the pool, which may be another one, and its state for the next check.
    2. The operator writes both into one ConfigMap (domain/slo/following.py), with the number of the check. The plan in
       it is in force (in_force.py).
    3. When all groups run the plan, the operator notes since when. When the answers under way at that time are over,
       it keeps a reading of the pool's latencies. Later answers are those of the plan (measuring.py).

Each check has a number, and its Job and result have names with that number. So the same objects lead to the same move,
whatever happened to the operator meanwhile, and no result is taken twice. A check that fails is made again in its turn.
It changes nothing that serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orca.core.job_files import PLAN_FILE, REPORT_FILE, SHORTFALL_FILE, STATE_FILE, SUMMARY_FILE, read_files
from orca.operator.domain import names
from orca.operator.domain.objects import ObjectKey, condition_status, is_going, label_map, seconds, since
from orca.operator.domain.observation import Observation, PlanInForce
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.following import FollowRecord, read_checked
from orca.operator.domain.slo.keys import plan_key
from orca.operator.domain.slo.planned import PlannedService
from orca.operator.plan.children import hash_of
from orca.operator.plan.slo.making import (
    LOST_S,
    SPEC_HAS_CHANGED,
    check_fits,
    has_profile,
    least_slots,
    profile_name,
)
from orca.operator.render import planning, pool
from orca.pool.measured import are_others_over

AUTO = "Auto"
"""Value of spec.slo.replan with which a new plan comes into force."""

FILES_OF_CHECK = frozenset({PLAN_FILE, SUMMARY_FILE, SHORTFALL_FILE, REPORT_FILE, STATE_FILE})
"""Files that a check may leave. Others could take the place of the operator's own notes."""

LATENCIES_AGE_S = 15.0
"""Age of the pool's latencies up to which they need no new read. A read takes some ten kilobytes of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFollowing:
    """The objects to write, to keep and to delete for the checks of the plan in force."""

    manifests: tuple[Json, ...] = ()
    kept: frozenset[ObjectKey] = frozenset()  # objects that stay as they are
    leaving: Mapping[str, str] = field(default_factory=dict)  # why a Job goes, by its name
    job: str | None = None  # the Job of the next check
    problem: str | None = None  # why the next check cannot be made, or why its result is not taken


def follow_plan(observation: Observation, *, can_start: bool, is_running: bool) -> PlanFollowing:
    """Return the next move.

    Args: can_start: pods that use the pool can start. is_running: all groups run the plan in force, and nothing else.
    """
    found = observation.plan_in_force
    if found is None or not found.is_wanted:
        return PlanFollowing()
    before, job = found.following or FollowRecord(), _job_name(observation, found)
    files, problem = _result(observation, found, job)
    record = _next_record(observation, found, before, files, is_running=is_running)
    move = replace(_with_record(observation, found, record), leaving=_taken(observation, before))
    if files is not None:
        # Until the record is there, the Job stays.
        return replace(move, kept=move.kept | {("Job", job)}, job=job)
    if observation.spec.wanted_groups == 0:
        return move
    if observation.pool.problem is not None or not can_start or observation.is_another_known_in_force:
        return replace(move, kept=move.kept | {("Job", job)}, job=job)
    return _with_job(observation, found, record, move, job, problem)


def check_to_read(observation: Observation) -> tuple[str, ...]:
    """Return the key of the result that the next move needs of the pool; none while no check is complete."""
    found = observation.plan_in_force
    if found is None or not found.is_wanted:
        return ()
    job = _job_name(observation, found)
    return (job,) if _is_complete(observation, job) else ()


def latencies_age_max_s(observation: Observation) -> float | None:
    """Return how old the pool's latencies may be for the next move, in seconds; None if it needs none."""
    found = observation.plan_in_force
    if found is None or not found.is_wanted:
        return None
    groups = observation.groups
    is_up = bool(groups) and len(groups) == observation.spec.wanted_groups and all(each.is_ready for each in groups)
    is_noted = found.following is not None and found.following.notes.since_ms is not None
    # The time since when the plan runs must not be that of an answer before.
    return 0.0 if is_up and not is_noted else LATENCIES_AGE_S


def _key(observation: Observation) -> str:
    return plan_key(observation.author_deployment, observation.images.worker)


def _job_name(observation: Observation, found: PlanInForce) -> str:
    """Return the name of the next check, which is also that of its result."""
    done = 0 if found.following is None else found.following.notes.check
    return names.check(observation.name, _key(observation), done + 1)


def _is_complete(observation: Observation, job: str) -> bool:
    there = observation.children.get("Job", job)
    return there is not None and condition_status(there, "Complete") == "True"


def _result(observation: Observation, found: PlanInForce, job: str) -> tuple[dict[str, str] | None, str | None]:
    """Return the files that a check has left in the pool, or why they cannot be used; None twice if there are none.

    Only a complete Job counts. If somebody has deleted the record, its numbers begin again, and the pool may still have
    results of that name.
    """
    body = observation.pool.results.get(job) if _is_complete(observation, job) else None
    if body is None or observation.spec.slo is None:
        return None, None
    try:
        files = read_files(body)
        planned, _ = read_checked(files)
        check_fits(observation, planned)
        if unknown := files.keys() - FILES_OF_CHECK:
            raise ValueError(f"a check leaves no file {min(unknown)}")
        # The field may have changed since the Job was made.
        if observation.spec.slo.replan != AUTO and not _is_same(planned, found.planned):
            raise ValueError("it has another plan, which spec.slo.replan does not allow")
    except (ValueError, RecursionError) as error:
        return None, f"its result cannot be used: {error}"
    return files, None


def _taken(observation: Observation, record: FollowRecord) -> dict[str, str]:
    """Return why the Job of the last check goes, by its name."""
    return {names.check(observation.name, _key(observation), record.notes.check): "its result is taken"}


def _next_record(
    observation: Observation,
    found: PlanInForce,
    before: FollowRecord,
    files: Mapping[str, str] | None,
    *,
    is_running: bool,
) -> FollowRecord:
    """Return the record as it is to be. Args: files: that the next check has left; None if it has not."""
    if files is not None:
        planned, _ = read_checked(files)
        return before.after_check(files, now_s=observation.now_s, has_changed=not _is_same(planned, found.planned))
    latencies, since_ms = observation.pool.latencies, before.notes.since_ms
    if latencies is None or observation.is_another_known_in_force:
        return before
    if since_ms is not None and since_ms > latencies.awake_ms:
        # The pool was emptied, and counts from 0 again.
        since_ms = None
    if since_ms is None and is_running:
        since_ms = latencies.awake_ms
    record, slo = before.since(since_ms), observation.spec.slo
    assert slo is not None
    if since_ms is None or record.reading is not None:
        return record
    if not are_others_over(latencies, since_ms=since_ms, latency_ms=slo.latency_ms):
        return record
    return replace(record, reading=latencies.of_running_period())


def _is_same(one: PlannedService, other: PlannedService) -> bool:
    """Return whether two plans run alike, whatever people read about them."""
    return replace(one, summary="", shortfall=None) == replace(other, summary="", shortfall=None)


def _with_record(observation: Observation, found: PlanInForce, record: FollowRecord) -> PlanFollowing:
    """Return the move that writes the record if it has changed."""
    name = names.follow(observation.name, _key(observation))
    first = names.plan(observation.name, _key(observation))
    kept = frozenset({("ConfigMap", first)})
    if found.following is not None and record == found.following:
        return PlanFollowing(kept=kept | {("ConfigMap", name)})
    if found.following is None and (record == FollowRecord() or observation.children.get("ConfigMap", name)):
        # There is nothing to write, or a ConfigMap of that name that cannot be read, which goes first.
        return PlanFollowing(kept=kept)
    made = planning.follow_state(observation.author_deployment, name, record.data)
    return PlanFollowing(manifests=(made,), kept=kept)


def _with_job(
    observation: Observation,
    found: PlanInForce,
    record: FollowRecord,
    move: PlanFollowing,
    job: str,
    problem: str | None,
) -> PlanFollowing:
    """Return the move with the Job of the next check, if one runs or is due."""
    there = observation.children.get("Job", job)
    if there is None and not _is_due(observation, found, record):
        return move
    if not has_profile(observation):
        words = f"there is no profile {profile_name(observation)}: delete {found.name}, and the model is measured again"
        return replace(move, problem=words)
    new = _render_job(observation, found, record, job)
    if there is None or is_going(there):
        return replace(move, manifests=(*move.manifests, new), job=job)
    reason = _why_it_goes(observation, there, new, has_bad_result=problem is not None)
    if reason is not None:
        return replace(move, leaving={**move.leaving, job: reason}, job=job, problem=problem)
    return replace(move, kept=move.kept | {("Job", job)}, job=job, problem=problem)


def _is_due(observation: Observation, found: PlanInForce, record: FollowRecord) -> bool:
    every_s = observation.release.slo_check_s
    # A clock that was set back must not stop the checks.
    return not -every_s < observation.now_s - max(record.notes.checked_s, found.made_s) < every_s


def _render_job(observation: Observation, found: PlanInForce, record: FollowRecord, job: str) -> Json:
    deployment, images = observation.author_deployment, observation.images
    return planning.check_job(
        deployment,
        images.scheduler,
        job,
        planning.CheckInput(
            profile=profile_name(observation),
            plan=found.name,
            has_state=STATE_FILE in record.files,
            least_slots=least_slots(observation),
        ),
        pool.connection(deployment, observation.pool_secret),
    )


def _why_it_goes(observation: Observation, there: Json, new: Json, *, has_bad_result: bool) -> str | None:
    """Return why a Job goes that has left nothing to take; None while it stays.

    A check that has failed is not made again before the next one would be due: it must not keep a node busy.
    """
    if label_map(there).get(names.HASH_LABEL) != hash_of(observation.deployment, new):
        return SPEC_HAS_CHANGED
    failed, completed = since(there, "Failed"), since(there, "Complete")
    every_s = observation.release.slo_check_s
    if failed is not None and observation.now_s - seconds(failed) > every_s:
        return "the check has failed, and the next one is due"
    if completed is None:
        return None
    if has_bad_result:
        return "its result cannot be used" if observation.now_s - seconds(completed) > every_s else None
    return "its result is lost" if observation.now_s - seconds(completed) > LOST_S else None
