"""The status of an OrcaDeployment: counts and conditions, from what was observed and planned: pure.

Accepted         the spec can be served as written
PoolReady        Redis answers and keeps what it is given
ModelReady       the model's files are where the pods read them
WorkersReady     all stage pods of the wanted groups run
SchedulerReady   all wanted groups are formed
GatewayReady     clients reach the gateways, also through the Ingress or the route
Progressing      something is on its way: a start, a rollout, a change of scale
Degraded         something that should serve does not, or will soon stop, and why
PlanReady        the plan for spec.slo is in force; only with spec.slo
SloMet           the measured latencies meet the goal; only with a plan for the present spec (slo/conditions.py)
Ready            the wanted revision serves, with all the groups that it needs, and clients reach it

A part for which the plan still has something to write is not ready, whatever was observed: that was before the write.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from orca.operator.domain import certificates, cluster_events, names, problems, volumes
from orca.operator.domain.actions import Action, Apply, IssueCertificate
from orca.operator.domain.api_refusals import TRIES_AGAIN, Refusal
from orca.operator.domain.objects import (
    has_ended,
    is_placed,
    is_pod_ready,
    is_rolled_out,
    label_map,
    timestamp,
    unready_s,
)
from orca.operator.domain.observation import Observation, PoolStatus
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json
from orca.operator.plan import model_fetch, pauses, pool_memory, reach
from orca.operator.plan.condition import Condition
from orca.operator.plan.plan import ReconcilePlan
from orca.operator.plan.slo.conditions import check_problem, slo_conditions
from orca.operator.plan.slo.device_loan import DEVICES_LENT, lent_groups
from orca.operator.plan.slo.plan_status import plan_status, with_young_figures
from orca.operator.render import pool
from orca.pool.schemas import SCHEMA_OF_ORDERS

MESSAGE_MAX = 1024


def refused_status(generation: int, reason: str, message: str, before: Mapping[str, Any], now_s: float) -> Json:
    """Return the status of a resource that cannot be served as written.

    Everything that it made before goes on as it was. So the other conditions stay, each with the generation that it was
    observed for.
    """
    refused = [Condition("Accepted", False, reason, message), Condition("Ready", False, reason, message)]
    conditions = _dated(refused, before, generation, now_s)
    others = [each for each in before.get("conditions") or [] if each["type"] not in {new.type for new in refused}]
    return {**before, "observedGeneration": generation, "conditions": [*conditions, *others]}


def make_status(
    observation: Observation, plan: ReconcilePlan, before: Mapping[str, Any], refusals: Sequence[Refusal] = ()
) -> Json:
    """Return the status to write.

    Args:
        before: the status as it is: conditions that do not change keep their times.
        refusals: of the API server to actions of the plan, and of the pool to its promise.
    """
    deployment = observation.deployment
    ready = sum(each.is_ready for each in plan.new_groups)
    desired = observation.spec.wanted_groups
    counts, problem = observation.pool, check_problem(observation, plan.following, refusals)
    result: Json = {
        "observedGeneration": deployment.generation,
        "model": observation.spec.model.name,
        "url": reach.url(observation),
        "selector": _one_pod_per_group(deployment.name),
        "groups": {
            "total": len(plan.groups),
            "ready": sum(each.is_ready for each in plan.groups),
            "desired": desired,
            "updated": len(plan.new_groups),
            "summary": f"{ready}/{desired}",
        },
        "updateRevision": plan.revision,
        "currentRevision": _current_revision(plan),
        "conditions": _dated(
            _conditions(observation, plan, refusals, problem), before, deployment.generation, observation.now_s
        ),
    }
    if (shown := plan_status(observation, problem)) is not None:
        result["plan"] = shown
    if counts.problem is None:
        wait_s = counts.oldest_wait_ms // 1000
        result["requests"] = {"queued": counts.queued, "running": counts.running, "oldestWaitSeconds": wait_s}
        result |= _deadlines(counts)
    return with_young_figures(result, before, observation.now_s)


DEADLINES_WINDOW_MS = 3_600_000
"""Awake time of the pool over which the status has the share of requests in time."""


def _deadlines(counts: PoolStatus) -> Json:
    """Return the field `deadlines` of the status; empty if no request with a deadline has ended in the window."""
    found = None if counts.deadlines is None else counts.deadlines.newest(DEADLINES_WINDOW_MS)
    if found is None or found.in_time_percent is None:
        return {}
    minutes = DEADLINES_WINDOW_MS // 60_000
    return {"deadlines": {"inTimePercent": found.in_time_percent, "requests": found.requests, "windowMinutes": minutes}}


def _one_pod_per_group(deployment: str) -> str:
    """Return the selector of the scale subresource: the first stage of each group, which computes as much as others do.

    A HorizontalPodAutoscaler multiplies the number of these pods by how far their load is from its target. With more
    than one pod per group it would ask for as many times more groups.
    """
    return f"{names.selector(deployment)},{names.ROLE_LABEL}={names.STAGE},{names.POD_INDEX_LABEL}=0"


def _conditions(
    observation: Observation, plan: ReconcilePlan, refusals: Sequence[Refusal], problem: str | None
) -> list[Condition]:
    """Args: problem: of the checks of the plan in force."""
    accepted = _accepted(observation, refusals)
    refused = [refusal.action for refusal in refusals]
    writes = [action for action in plan.actions if action not in refused]
    certificate = _certificate(observation, writes)
    seen = [
        (names.POOL, _pool(observation, refusals)),
        (names.FETCH, _model(observation)),
        (names.STAGE, _workers(observation, plan, certificate)),
        (names.SCHEDULER, _schedulers(observation, plan, certificate)),
        (names.GATEWAY, _gateways(observation)),
    ]
    parts = [_with_writes(_with_volume(part, role, refusals), role, writes) for role, part in seen]
    progressing = _progressing(observation, plan, parts)
    return [
        accepted,
        *parts,
        progressing,
        _degraded(parts, progressing, _late(observation), _will_stop(observation, certificate)),
        _ready(observation, [accepted, *parts], progressing),
        *slo_conditions(observation, plan.slo, plan.loan, refusals, problem),
    ]


def _accepted(observation: Observation, refusals: Sequence[Refusal]) -> Condition:
    if observation.pool.has_moved:
        return Condition("Accepted", False, POOL_MOVED, str(observation.pool.problem))
    for refusal in refusals:
        if not (refusal.is_of_volume or refusal.is_of_pool or refusal.is_of_plan or refusal.is_undone):
            return Condition("Accepted", False, "Refused", f"{refusal.message}; {TRIES_AGAIN}")
    return Condition("Accepted", True, "Valid")


def _with_volume(part: Condition, role: str, refusals: Sequence[Refusal]) -> Condition:
    """Report a volume that cannot become as wanted. The volume and the pods that use it go on."""
    for refusal in refusals:
        if refusal.is_of_volume and not refusal.is_undone and _role(refusal.action) == role and part.is_true:
            message = f"the volume stays as it is: {refusal.message}; {TRIES_AGAIN}"
            return Condition(part.type, True, VOLUME_STAYS, message)
    return part


def _with_writes(part: Condition, role: str, writes: Sequence[Action]) -> Condition:
    """Report a part as not ready while the plan writes objects of its role.

    Mending what somebody else has changed does not count: a controller that fights over a field for ever would keep the
    part from ever being ready.
    """
    for action in writes if part.is_true else ():
        if isinstance(action, Apply) and not action.is_mending and _role(action) == role:
            child = f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
            return Condition(part.type, False, APPLYING, f"writing {child}: {action.reason}")
    return part


def _role(action: Action) -> str | None:
    """Return the role of the pods that a written object belongs to; None for other actions."""
    return label_map(action.manifest)[names.ROLE_LABEL] if isinstance(action, Apply) else None


def _pool(observation: Observation, refusals: Sequence[Refusal]) -> Condition:
    name = "PoolReady"
    pods = observation.children.pods(names.POOL)
    if observation.spec.pool.external is None:
        own, makers = names.pool(observation.name), _makers(observation, names.POOL)
        if not any(map(is_pod_ready, pods)):
            secret, keys = observation.pool_secret, pool.SECRET_KEYS
            missing = problems.of_secret(own, secret, keys, field="the pool", names_keys=False)
            return _missing(observation, name, pods, "PoolStarting", "Redis is not up yet", missing, makers=makers)
        if not _is_as_written(observation, "StatefulSet", own):
            return _missing(observation, name, pods, "PoolStarting", "Redis is being replaced", makers=makers)
    if observation.pool.problem is not None:
        reason = POOL_MOVED if observation.pool.has_moved else "PoolUnreachable"
        return Condition(name, False, reason, observation.pool.problem)
    for refusal in refusals:
        if refusal.is_of_pool:
            message = f"the pool has not taken the new bound on requests, so groups stay as they are: {refusal.message}"
            return Condition(name, False, "PoolNotTold", message)
    return Condition(name, True, "Serving")


def _is_as_written(observation: Observation, kind: str, name: str) -> bool:
    workload = observation.children.get(kind, name)
    return workload is not None and is_rolled_out(workload)


def _model(observation: Observation) -> Condition:
    name = "ModelReady"
    if problem := model_fetch.find_problem(observation):
        return _of_problem(name, problem)
    if observation.spec.model.is_fetched:
        return Condition(name, True, "Fetched", f"{observation.spec.model.uri} is complete in its volume")
    return Condition(name, True, "InPlace", "the pods read it from where the uri says")


def _certificate(observation: Observation, writes: Sequence[Action]) -> Problem | None:
    """Return the problem of the certificate; None also while the plan issues it."""
    if any(isinstance(action, IssueCertificate) for action in writes):
        return None
    return certificates.find_problem(observation)


def _pods_of_groups(observation: Observation, plan: ReconcilePlan, role: str) -> list[Json]:
    return [pod for each in plan.new_groups for pod in observation.children.pods(role, group=each.name)]


def _workers(observation: Observation, plan: ReconcilePlan, certificate: Problem | None) -> Condition:
    name, groups = "WorkersReady", observation.spec.wanted_groups
    if groups == 0:
        return Condition(name, True, "NoneWanted", NO_GROUPS)
    pods = _pods_of_groups(observation, plan, names.STAGE)
    ready = sum(map(is_pod_ready, pods))
    wanted = groups * observation.spec.parallelism.stages
    if ready < wanted and len(plan.new_groups) < groups and plan.slots.held:
        return Condition(name, False, SLOTS_ARE_NEEDED, _why_groups_stay(observation, plan))
    if ready < wanted:
        message = f"{ready} of {wanted} stage pods are up"
        is_lent = plan.loan.borrower is not None and _are_only_lenders_missing(observation, pods, wanted)
        loan = plan.loan.problem if is_lent else None
        known = _keeps_pods_waiting(certificate) or loan or pauses.find_problem(observation, plan.pauses)
        makers = _makers(observation, names.STAGE, {each.name for each in plan.new_groups})
        return _missing(observation, name, pods, "StagesStarting", message, known, makers=makers)
    return Condition(name, True, "Running", f"{wanted} stage pods are up")


def _are_only_lenders_missing(observation: Observation, pods: Sequence[Json], wanted: int) -> bool:
    """Return whether the stage pods without a node may be those that lend devices, and nothing is wrong with others."""
    placed = [pod for pod in pods if is_placed(pod)]
    lent = lent_groups(observation) * observation.spec.parallelism.stages
    return 0 < wanted - len(placed) <= lent and not any(map(problems.of_pod, placed))


def _schedulers(observation: Observation, plan: ReconcilePlan, certificate: Problem | None) -> Condition:
    name, desired = "SchedulerReady", observation.spec.wanted_groups
    if desired == 0:
        return Condition(name, True, "NoneWanted", NO_GROUPS)
    pods = _pods_of_groups(observation, plan, names.SCHEDULER)
    makers = _makers(observation, names.SCHEDULER, {each.name for each in plan.new_groups})
    formed = [names.scheduler(each.name) for each in plan.new_groups if each.is_ready]
    if len(formed) < desired:
        message = f"{len(formed)} of {desired} groups are formed{_what_models_wait_for(observation)}"
        known = _keeps_from_forming(certificate)
        return _missing(observation, name, pods, "GroupForming", message, known, makers=makers)
    if plan.slots.held and plan.slots.waits_for:
        return Condition(name, True, SLOTS_ARE_NEEDED, _why_groups_stay(observation, plan))
    changed = [
        scheduler
        for scheduler in formed
        if ("StatefulSet", scheduler) not in plan.held and _is_as_written(observation, "StatefulSet", scheduler)
    ]
    if len(changed) < desired:
        message = f"{len(changed)} of {desired} schedulers are up to date"
        return _missing(observation, name, pods, "SchedulersChanging", message, makers=makers)
    message = f"{len(formed)} groups are formed"
    if (schema := _schema_without_orders(observation)) is not None:
        why = f"schema {schema} of the release before is in force in the pool"
        message = f"{message}; claims go by arrival and not by order Deadline: {why} (orca pool schema)"
        return Condition(name, True, CLAIMS_BY_ARRIVAL, message)
    return Condition(name, True, "Formed", message)


def _schema_without_orders(observation: Observation) -> int | None:
    """Return the schema number in force if it keeps the order Deadline from its effect."""
    older = observation.pool.older_schema
    is_known = older is None or older >= SCHEMA_OF_ORDERS
    return None if is_known or observation.spec.scheduler.order != "Deadline" else older


def _what_models_wait_for(observation: Observation) -> str:
    older = observation.pool.older_schema
    if older is None or observation.is_wanted_in_force:
        return ""
    return (
        f". Schema {older} of the release before is in force in the pool: if the model is an encoder-decoder model, its"
        " groups wait until you raise the number (orca pool schema)"
    )


def _why_groups_stay(observation: Observation, plan: ReconcilePlan) -> str:
    slots, chosen = plan.slots, observation.spec.scheduler.kv_slots
    if observation.pool.problem is not None:
        return f"the pool does not answer, so nobody knows whether a request needs more than kvSlots {chosen}"
    if not slots.waits_for:
        return f"the pool is about to get the new bound, kvSlots {chosen}"
    most = f", up to {slots.largest}" if slots.largest else ""
    return f"groups stay as they are for {slots.waits_for} requests that may need more than kvSlots {chosen}{most}"


def _gateways(observation: Observation) -> Condition:
    name = "GatewayReady"
    if observation.spec.suspend:
        return Condition(name, False, "Suspended", "the resource is suspended")
    pods = observation.children.pods(names.GATEWAY)
    ready = sum(map(is_pod_ready, pods))
    problem = observation.keys_problem
    keys = None if problem is None else Problem(problems.SECRET_MISSING, problem)
    deployment = observation.children.get("Deployment", names.gateway(observation.name))
    makers = [] if deployment is None else [deployment]
    wanted = _wanted_gateways(observation, deployment)
    if wanted == 0:
        return Condition(name, False, GATEWAYS_AT_ZERO, "an autoscaler has scaled the gateways to 0")
    if ready == 0:
        return _missing(observation, name, pods, "GatewayStarting", "no gateway is up yet", keys, makers=makers)
    message = f"{ready} of {wanted} gateways are up"
    if not _is_as_written(observation, "Deployment", names.gateway(observation.name)):
        message = f"{message}, not all of them up to date"
        return _missing(observation, name, pods, "GatewaysChanging", message, keys, makers=makers)
    if (unreached := reach.find_problem(observation)) is not None:
        return _of_problem(
            name, Problem(unreached.reason, f"{message}, but no client reaches them: {unreached.message}")
        )
    return Condition(name, True, "Serving", message)


def _wanted_gateways(observation: Observation, deployment: Json | None) -> int:
    """Return how many gateways there should be: an autoscaler's choice is in the Deployment only."""
    if deployment is not None and observation.spec.gateway.autoscaled:
        return int(deployment["spec"]["replicas"])
    return observation.spec.gateway.replicas


def _makers(observation: Observation, role: str, groups: Set[str] | None = None) -> list[Json]:
    """Return the StatefulSets of a role. Args: groups: names of the groups that count; None for all."""
    found = observation.children.stateful_sets(role)
    return [each for each in found if groups is None or label_map(each).get(names.GROUP_LABEL) in groups]


def _keeps_pods_waiting(certificate: Problem | None) -> Problem | None:
    """Return the problem if it is a missing Secret. A pod that waits for one reports that in Events only."""
    return certificate if certificate is not None and certificate.reason == problems.SECRET_MISSING else None


def _keeps_from_forming(certificate: Problem | None) -> Problem | None:
    return certificate if certificate is not None and certificate.reason != problems.CERTIFICATE_EXPIRING else None


def _missing(
    observation: Observation,
    name: str,
    pods: Sequence[Json],
    reason: str,
    message: str,
    known: Problem | None = None,
    *,
    makers: Sequence[Json] = (),
) -> Condition:
    """Report a part that is missing, with the problem of a pod, if any.

    Args: known: a problem that no pod reports. makers: StatefulSets and Deployments that make the pods.
    """
    children, events = observation.children, observation.events
    problem = (
        known
        or cluster_events.why_no_pods(children, events, makers)
        or cluster_events.why_pods_wait(children, events, pods, observation.now_s)
        or problems.worst(pods)
        or volumes.find_problem(children, pods)
    )
    return Condition(name, False, reason, message) if problem is None else _of_problem(name, problem)


def _of_problem(name: str, problem: Problem) -> Condition:
    return Condition(name, False, problem.reason, problem.message)


NO_GROUPS = "replicas is 0: requests wait in the pool"
APPLYING = "Applying"
GATEWAYS_AT_ZERO = "GatewaysAtZero"
VOLUME_STAYS = "VolumeCannotGrow"
POOL_MOVED = "PoolMoved"
SLOTS_ARE_NEEDED = "SlotsAreNeeded"
CLAIMS_BY_ARRIVAL = "ClaimsByArrival"
GATEWAYS_LEARN = "GatewaysLearnModel"
OLD_MODEL_DRAINS = "OldModelDrains"
_ON_THE_WAY = frozenset(
    {
        *("PoolStarting", "StagesStarting", "GroupForming", "SchedulersChanging"),
        *("GatewayStarting", "GatewaysChanging", model_fetch.LOADING, APPLYING, GATEWAYS_LEARN, OLD_MODEL_DRAINS),
        *(SLOTS_ARE_NEEDED, DEVICES_LENT, reach.STARTING),
    }
)


def _progressing(observation: Observation, plan: ReconcilePlan, parts: Sequence[Condition]) -> Condition:
    name, wanted = "Progressing", observation.spec.wanted_groups
    new = len(plan.new_groups)
    old = len(plan.groups) - new
    # Until the model is there, nothing else moves.
    loading = next((part for part in parts if part.reason == model_fetch.LOADING), None)
    if loading is not None:
        return Condition(name, True, loading.reason, loading.message)
    if plan.change.waits_for_gateways:
        message = "groups of the new model come when all gateways have it beside the old one"
        return Condition(name, True, GATEWAYS_LEARN, message)
    if plan.slots.held:
        return Condition(name, True, SLOTS_ARE_NEEDED, _why_groups_stay(observation, plan))
    if plan.change.is_draining and new >= wanted:
        left, most_s = observation.pool.replaced_unfinished, observation.spec.drain_seconds
        message = f"{left} requests of the old model run on, for {most_s} s at most"
        return Condition(name, True, OLD_MODEL_DRAINS, message)
    if old and wanted:
        how = "; there is no room for the surge, so one group may be missing" if plan.is_squeezed else ""
        if plan.change.has_no_room:
            how = (
                "; there is no room for groups of both models: the old model goes first,"
                " and its remaining requests end without an answer"
            )
        return Condition(name, True, "RollingOut", f"{old} groups of other revisions still exist{how}")
    if new != wanted or old:
        return Condition(name, True, "Scaling", f"{new} of {wanted} groups exist")
    waiting = [part for part in parts if not part.is_true and part.reason in _ON_THE_WAY]
    if waiting:
        return Condition(name, True, waiting[0].reason, waiting[0].message)
    return Condition(name, False, "Complete")


_JOBS = (names.FETCH, names.PROFILE, names.PLAN, names.FOLLOW)
"""Roles of pods that do not become ready."""


def _late(observation: Observation) -> str | None:
    """Return a message about a pod that has been starting for longer than startupSeconds; None if there is none."""
    for pod in observation.children.of_kind("Pod"):
        waited_s = unready_s(pod, observation.now_s)
        is_over = has_ended(pod) or label_map(pod).get(names.ROLE_LABEL) in _JOBS
        if waited_s > observation.spec.startup_seconds and not is_over:
            return f"pod {pod['metadata']['name']} has not been ready for {waited_s:.0f} s"
    return None


def _will_stop(observation: Observation, certificate: Problem | None) -> Problem | None:
    """Return the problem of something that serves now and will not for ever, or not everywhere."""
    going = volumes.find_going_pool(observation.children, observation.name)
    return going or pool_memory.find_problem(observation) or certificate or reach.find_refused_parent(observation)


def _degraded(
    parts: Sequence[Condition], progressing: Condition, late: str | None, will_stop: Problem | None
) -> Condition:
    on_purpose = ("Suspended", GATEWAYS_AT_ZERO, model_fetch.LOADING)
    missing = [part for part in parts if not part.is_true and part.reason not in on_purpose]
    broken = [part for part in missing if part.reason not in _ON_THE_WAY]
    if missing and not broken and late is not None:
        return Condition("Degraded", True, missing[0].reason, f"{missing[0].message}; {late}")
    broken = broken or [part for part in parts if part.reason == VOLUME_STAYS]
    if broken:
        return Condition("Degraded", True, broken[0].reason, broken[0].message)
    if will_stop is not None:
        return Condition("Degraded", True, will_stop.reason, will_stop.message)
    return Condition("Degraded", False, progressing.reason if progressing.is_true else "AsWanted")


def _ready(observation: Observation, parts: Sequence[Condition], progressing: Condition) -> Condition:
    """Report whether clients get what the spec asks for. With replicas 0 that is: requests are accepted and wait."""
    # Report a broken part before one that only takes its time.
    missing = sorted((part for part in parts if not part.is_true), key=lambda part: part.reason in _ON_THE_WAY)
    if observation.spec.suspend:
        return Condition("Ready", False, "Suspended", "the resource is suspended; the pool keeps accepted requests")
    if missing:
        return Condition("Ready", False, missing[0].reason, missing[0].message)
    if progressing.is_true and progressing.reason in ("RollingOut", OLD_MODEL_DRAINS, SLOTS_ARE_NEEDED):
        return Condition("Ready", True, progressing.reason, progressing.message)
    return Condition("Ready", True, "Serving" if observation.spec.wanted_groups else "Holding")


def _current_revision(plan: ReconcilePlan) -> str:
    """Return the revision that serves: the old one until a group of the wanted one serves."""
    old = sorted({each.revision for each in plan.groups if each.is_ready and each.revision != plan.revision})
    return old[0] if old else plan.revision


def is_on_the_way(status: Mapping[str, Any]) -> bool:
    """Return whether the next reconcile may find another state though nobody has changed the resource."""
    return any(each["type"] != "Degraded" and each["reason"] in _ON_THE_WAY for each in status["conditions"])


def _dated(conditions: Sequence[Condition], before: Mapping[str, Any], generation: int, now_s: float) -> list[Json]:
    now = timestamp(now_s)
    known = {each["type"]: each for each in before.get("conditions") or []}
    dated = []
    for condition in conditions:
        value = condition.status
        last = known.get(condition.type, {})
        dated.append(
            {
                "type": condition.type,
                "status": value,
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_MAX],
                "observedGeneration": generation,
                "lastTransitionTime": last["lastTransitionTime"] if last.get("status") == value else now,
            }
        )
    return dated
