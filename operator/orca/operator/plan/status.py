"""The status of an OrcaDeployment: counts and conditions out of what was seen, pure.

Accepted         the spec can be served as written
PoolReady        Redis answers and keeps what it is given
ModelReady       the model's files are where the pods look for them
WorkersReady     all stage pods of the wanted groups run
SchedulerReady   all wanted groups are formed
GatewayReady     clients are answered
Progressing      something is on its way: a start, a rollout, a change of scale
Degraded         something that should serve does not, or will not for long, and why
Ready            the wanted revision serves, with as many groups as it must have, and clients reach it

A part of which the plan still writes something is not ready, whatever was seen of it: that was before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca.operator.domain import certificates, names, problems, volumes
from orca.operator.domain.actions import Action, Apply, Issue
from orca.operator.domain.api_refusals import Refusal
from orca.operator.domain.observed import (
    Observed,
    has_ended,
    is_pod_ready,
    is_rolled_out,
    label_map,
    seconds,
    unready_s,
)
from orca.operator.domain.problems import Trouble
from orca.operator.domain.resource import Deployment, Json
from orca.operator.plan import model_fetch
from orca.operator.plan.groups import pause_trouble
from orca.operator.plan.plan import Plan
from orca.operator.plan.rollout import Group
from orca.operator.render import fetch, gateway, group, pool

MESSAGE_MAX = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    is_true: bool
    reason: str
    message: str = ""


def refused(generation: int, reason: str, message: str, before: Mapping[str, Any], now: str) -> Json:
    """The status of a resource that cannot be served as written. What it made before goes on as it was, so what is
    known of that stays, each condition with the generation that it tells of."""
    said = [Condition("Accepted", False, reason, message), Condition("Ready", False, reason, message)]
    conditions = _dated(said, before, generation, now)
    others = [each for each in before.get("conditions") or [] if each["type"] not in {of.type for of in said}]
    return {**before, "observedGeneration": generation, "conditions": [*conditions, *others]}


def status(
    deployment: Deployment,
    observed: Observed,
    plan: Plan,
    before: Mapping[str, Any],
    now: str,
    refusals: Sequence[Refusal] = (),
) -> Json:
    """
    Args:
        before: the status as it is: the times of conditions that do not change stay.
        now: RFC 3339.
        refusals: of the API server, to what the plan wanted; what the pool was not told.
    """
    new = [each for each in plan.groups if each.revision == plan.revision]
    ready = sum(each.is_ready for each in new)
    desired = deployment.spec.wanted_groups
    conditions = _conditions(deployment, observed, plan, new, refusals, seconds(now))
    counts = observed.pool
    result: Json = {
        "observedGeneration": deployment.generation,
        "model": deployment.spec.model.name,
        "url": gateway.url(deployment),
        "selector": f"{names.selector(deployment.name)},{names.ROLE_LABEL}=scheduler",
        "groups": {
            "total": len(plan.groups),
            "ready": sum(each.is_ready for each in plan.groups),
            "desired": desired,
            "updated": len(new),
            "summary": f"{ready}/{desired}",
        },
        "updateRevision": plan.revision,
        "currentRevision": _current_revision(plan),
        "conditions": _dated(conditions, before, deployment.generation, now),
    }
    if counts.problem is None:
        wait_s = counts.oldest_wait_ms // 1000
        result["requests"] = {"queued": counts.queued, "running": counts.running, "oldestWaitSeconds": wait_s}
    return result


def _conditions(
    deployment: Deployment,
    observed: Observed,
    plan: Plan,
    new: Sequence[Group],
    refusals: Sequence[Refusal],
    now_s: float,
) -> list[Condition]:
    accepted = _accepted(refusals)
    late = _late(deployment, observed, now_s)
    refused = [refusal.action for refusal in refusals]
    writes = [action for action in plan.actions if action not in refused]
    certificate = _certificate(deployment, observed, writes, now_s)
    seen = [
        (pool.ROLE, _pool(deployment, observed, refusals)),
        (fetch.ROLE, _model(deployment, observed)),
        (group.STAGE, _workers(deployment, observed, plan, new, certificate)),
        (group.SCHEDULER, _schedulers(deployment, observed, plan, new, certificate)),
        (gateway.ROLE, _gateways(deployment, observed)),
    ]
    parts = [_with_writes(_with_volume(part, role, refusals), role, writes) for role, part in seen]
    progressing = _progressing(deployment, observed, plan, parts)
    return [
        accepted,
        *parts,
        progressing,
        _degraded(parts, progressing, late, certificate),
        _ready(deployment, [accepted, *parts], progressing),
    ]


def _accepted(refusals: Sequence[Refusal]) -> Condition:
    for refusal in refusals:
        if not (refusal.is_of_volume or refusal.is_of_pool):
            return Condition("Accepted", False, "Refused", f"{refusal.message}; it is tried again now and then")
    return Condition("Accepted", True, "Valid")


def _with_volume(part: Condition, role: str, refusals: Sequence[Refusal]) -> Condition:
    """A volume that cannot become as wanted goes on as it is, and so does what uses it."""
    for refusal in refusals:
        if refusal.is_of_volume and _role(refusal.action) == role and part.is_true:
            said = f"the volume stays as it is: {refusal.message}; it is tried again now and then"
            return Condition(part.type, True, VOLUME_STAYS, said)
    return part


def _with_writes(part: Condition, role: str, writes: Sequence[Action]) -> Condition:
    """What was seen of a part counts only when nothing of its role is written. What somebody else has changed is
    written too, but no reason: whoever fights over a field for ever would never let it be ready."""
    for action in writes if part.is_true else ():
        if isinstance(action, Apply) and not action.is_mending and _role(action) == role:
            child = f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
            return Condition(part.type, False, APPLYING, f"{child} is written: {action.reason}")
    return part


def _role(action: Action) -> str | None:
    """Of the pods that a written object belongs to; None for what is not written."""
    return label_map(action.manifest)[names.ROLE_LABEL] if isinstance(action, Apply) else None


def _pool(deployment: Deployment, observed: Observed, refusals: Sequence[Refusal]) -> Condition:
    name = "PoolReady"
    pods = observed.pods(pool.ROLE)
    if deployment.spec.pool.external is None:
        if not any(map(is_pod_ready, pods)):
            return _missing(observed, name, pods, "PoolStarting", "Redis is not up yet")
        if not _is_as_written(observed, "StatefulSet", names.pool(deployment.name)):
            return _missing(observed, name, pods, "PoolStarting", "Redis is replaced")
    if observed.pool.problem is not None:
        return Condition(name, False, "PoolUnreachable", observed.pool.problem)
    for refusal in refusals:
        if refusal.is_of_pool:
            said = f"it is not told what one request may need, and until then all stays as it is: {refusal.message}"
            return Condition(name, False, "PoolNotTold", said)
    return Condition(name, True, "Serving")


def _is_as_written(observed: Observed, kind: str, name: str) -> bool:
    workload = observed.get(kind, name)
    return workload is not None and is_rolled_out(workload)


def _model(deployment: Deployment, observed: Observed) -> Condition:
    name = "ModelReady"
    if trouble := model_fetch.trouble(deployment, observed):
        return _of_trouble(name, trouble)
    if deployment.spec.model.is_fetched:
        return Condition(name, True, "Fetched", f"{deployment.spec.model.uri} is whole in its volume")
    return Condition(name, True, "InPlace", "the pods find it where the uri says")


def _certificate(deployment: Deployment, observed: Observed, writes: Sequence[Action], now_s: float) -> Trouble | None:
    """None also while it is issued."""
    if any(isinstance(action, Issue) for action in writes):
        return None
    return certificates.trouble(deployment, observed, now_s)


def _workers(
    deployment: Deployment, observed: Observed, plan: Plan, new: Sequence[Group], certificate: Trouble | None
) -> Condition:
    name = "WorkersReady"
    if deployment.spec.wanted_groups == 0:
        return Condition(name, True, "NoneWanted", "replicas is 0: requests wait in the pool")
    pods = [pod for each in new for pod in observed.pods(group.STAGE, group=each.name)]
    ready = sum(map(is_pod_ready, pods))
    wanted = deployment.spec.wanted_groups * deployment.spec.parallelism.stages
    if ready < wanted and len(new) < deployment.spec.wanted_groups and plan.slots.held:
        return Condition(name, False, SLOTS_ARE_NEEDED, _why_groups_stay(deployment, observed, plan))
    if ready < wanted:
        said = f"{ready} of {wanted} stage pods are up"
        known = _keeps_pods_waiting(certificate) or pause_trouble(plan.pauses)
        return _missing(observed, name, pods, "StagesStarting", said, known)
    return Condition(name, True, "Running", f"{wanted} stage pods are up")


def _schedulers(
    deployment: Deployment, observed: Observed, plan: Plan, new: Sequence[Group], certificate: Trouble | None
) -> Condition:
    name = "SchedulerReady"
    desired = deployment.spec.wanted_groups
    if desired == 0:
        return Condition(name, True, "NoneWanted", "replicas is 0: requests wait in the pool")
    pods = [pod for each in new for pod in observed.pods(group.SCHEDULER, group=each.name)]
    formed = [names.scheduler(each.name) for each in new if each.is_ready]
    if len(formed) < desired:
        said = f"{len(formed)} of {desired} groups are formed"
        return _missing(observed, name, pods, "GroupForming", said, _keeps_from_forming(certificate))
    if plan.slots.held and plan.slots.waits_for:
        return Condition(name, True, SLOTS_ARE_NEEDED, _why_groups_stay(deployment, observed, plan))
    changed = [
        scheduler
        for scheduler in formed
        if ("StatefulSet", scheduler) not in plan.held and _is_as_written(observed, "StatefulSet", scheduler)
    ]
    if len(changed) < desired:
        return _missing(
            observed, name, pods, "SchedulersChanging", f"{len(changed)} of {desired} schedulers are as wanted"
        )
    return Condition(name, True, "Formed", f"{len(formed)} groups are formed")


def _why_groups_stay(deployment: Deployment, observed: Observed, plan: Plan) -> str:
    slots, chosen = plan.slots, deployment.spec.scheduler.kv_slots
    if observed.pool.problem is not None:
        return f"whether a request needs more than kvSlots {chosen} is not known while the pool does not answer"
    if not slots.waits_for:
        return f"the pool is told of kvSlots {chosen}"
    most = f", up to {slots.largest}" if slots.largest else ""
    return f"groups stay as they are for {slots.waits_for} requests that may need more than kvSlots {chosen}{most}"


def _gateways(deployment: Deployment, observed: Observed) -> Condition:
    name = "GatewayReady"
    if deployment.spec.suspend:
        return Condition(name, False, "Suspended", "the resource is suspended")
    pods = observed.pods(gateway.ROLE)
    ready = sum(map(is_pod_ready, pods))
    keys = None if observed.keys_problem is None else Trouble(problems.SECRET_MISSING, observed.keys_problem)
    if ready == 0:
        return _missing(observed, name, pods, "GatewayStarting", "no gateway is up yet", keys)
    said = f"{ready} of {deployment.spec.gateway.replicas} gateways are up"
    if not _is_as_written(observed, "Deployment", names.gateway(deployment.name)):
        return _missing(observed, name, pods, "GatewaysChanging", f"{said}, not all of them as wanted", keys)
    return Condition(name, True, "Serving", said)


def _keeps_pods_waiting(certificate: Trouble | None) -> Trouble | None:
    """A pod that waits for a Secret says so in events only."""
    return certificate if certificate is not None and certificate.reason == problems.SECRET_MISSING else None


def _keeps_from_forming(certificate: Trouble | None) -> Trouble | None:
    return certificate if certificate is not None and certificate.reason != problems.CERTIFICATE_EXPIRING else None


def _missing(
    observed: Observed,
    name: str,
    pods: Sequence[Json],
    reason: str,
    message: str,
    known: Trouble | None = None,
) -> Condition:
    """What is not there, and what a pod says about it. Args: known: trouble of which a pod says nothing."""
    trouble = known or problems.worst(pods) or volumes.trouble(observed, pods)
    return Condition(name, False, reason, message) if trouble is None else _of_trouble(name, trouble)


def _of_trouble(name: str, trouble: Trouble) -> Condition:
    return Condition(name, False, trouble.reason, trouble.message)


APPLYING = "Applying"
VOLUME_STAYS = "VolumeCannotGrow"
SLOTS_ARE_NEEDED = "SlotsAreNeeded"
GATEWAYS_LEARN = "GatewaysLearnModel"
OLD_MODEL_DRAINS = "OldModelDrains"
_ON_THE_WAY = frozenset(
    {
        *("PoolStarting", "StagesStarting", "GroupForming", "SchedulersChanging"),
        *("GatewayStarting", "GatewaysChanging", model_fetch.LOADING, APPLYING, GATEWAYS_LEARN, OLD_MODEL_DRAINS),
        SLOTS_ARE_NEEDED,
    }
)


def _progressing(deployment: Deployment, observed: Observed, plan: Plan, parts: Sequence[Condition]) -> Condition:
    name = "Progressing"
    old = sum(each.revision != plan.revision for each in plan.groups)
    new = len(plan.groups) - old
    # Until then nothing else moves.
    loading = next((part for part in parts if part.reason == model_fetch.LOADING), None)
    if loading is not None:
        return Condition(name, True, loading.reason, loading.message)
    if plan.change.is_telling:
        said = "groups of the new model come when all gateways have it beside the one before"
        return Condition(name, True, GATEWAYS_LEARN, said)
    if plan.slots.held:
        return Condition(name, True, SLOTS_ARE_NEEDED, _why_groups_stay(deployment, observed, plan))
    if plan.change.is_draining and new >= deployment.spec.wanted_groups:
        left, most_s = observed.pool.replaced_unfinished, deployment.spec.drain_seconds
        said = f"{left} requests of the model before run on, for {most_s} s at most"
        return Condition(name, True, OLD_MODEL_DRAINS, said)
    if old and deployment.spec.wanted_groups:
        how = "; there is no room for the surge, so one group may be missing" if plan.is_squeezed else ""
        if plan.change.has_no_room:
            how = (
                "; there is no room beside them: the model before goes first, and what it leaves is ended, not answered"
            )
        return Condition(name, True, "RollingOut", f"{old} groups of other revisions are still there{how}")
    if new != deployment.spec.wanted_groups or old:
        return Condition(name, True, "Scaling", f"{new} of {deployment.spec.wanted_groups} groups exist")
    waiting = [part for part in parts if not part.is_true and part.reason in _ON_THE_WAY]
    if waiting:
        return Condition(name, True, waiting[0].reason, waiting[0].message)
    return Condition(name, False, "Complete")


def _late(deployment: Deployment, observed: Observed, now_s: float) -> str | None:
    """Of a pod that should serve and has not done so for longer than a start may take; None when there is none."""
    for pod in observed.of_kind("Pod"):
        waited_s = unready_s(pod, now_s)
        is_over = has_ended(pod) or label_map(pod).get(names.ROLE_LABEL) == fetch.ROLE
        if waited_s > deployment.spec.startup_seconds and not is_over:
            return f"pod {pod['metadata']['name']} has not been ready for {waited_s:.0f} s"
    return None


def _degraded(
    parts: Sequence[Condition], progressing: Condition, late: str | None, certificate: Trouble | None
) -> Condition:
    missing = [part for part in parts if not part.is_true and part.reason not in ("Suspended", model_fetch.LOADING)]
    broken = [part for part in missing if part.reason not in _ON_THE_WAY]
    if missing and not broken and late is not None:
        return Condition("Degraded", True, missing[0].reason, f"{missing[0].message}; {late}")
    broken = broken or [part for part in parts if part.reason == VOLUME_STAYS]
    if broken:
        return Condition("Degraded", True, broken[0].reason, broken[0].message)
    if certificate is not None:
        return Condition("Degraded", True, certificate.reason, certificate.message)
    return Condition("Degraded", False, progressing.reason if progressing.is_true else "AsWanted")


def _ready(deployment: Deployment, parts: Sequence[Condition], progressing: Condition) -> Condition:
    """With replicas 0 it is ready when it accepts: that is what was asked for."""
    # What is broken before what only takes its time.
    missing = sorted((part for part in parts if not part.is_true), key=lambda part: part.reason in _ON_THE_WAY)
    if deployment.spec.suspend:
        return Condition("Ready", False, "Suspended", "the resource is suspended; the pool keeps what was accepted")
    if missing:
        return Condition("Ready", False, missing[0].reason, missing[0].message)
    if progressing.is_true and progressing.reason in ("RollingOut", OLD_MODEL_DRAINS, SLOTS_ARE_NEEDED):
        return Condition("Ready", True, progressing.reason, progressing.message)
    return Condition("Ready", True, "Serving" if deployment.spec.wanted_groups else "Holding")


def _current_revision(plan: Plan) -> str:
    """Of the groups that serve: the old one until a group of the wanted one does."""
    old = sorted({each.revision for each in plan.groups if each.is_ready and each.revision != plan.revision})
    return old[0] if old else plan.revision


def is_on_the_way(status: Mapping[str, Any]) -> bool:
    """Whether the next look may find another state without anybody having changed the resource."""
    return any(each["type"] != "Degraded" and each["reason"] in _ON_THE_WAY for each in status["conditions"])


def _dated(conditions: Sequence[Condition], before: Mapping[str, Any], generation: int, now: str) -> list[Json]:
    known = {each["type"]: each for each in before.get("conditions") or []}
    dated = []
    for condition in conditions:
        word = "True" if condition.is_true else "False"
        last = known.get(condition.type, {})
        dated.append(
            {
                "type": condition.type,
                "status": word,
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_MAX],
                "observedGeneration": generation,
                "lastTransitionTime": last["lastTransitionTime"] if last.get("status") == word else now,
            }
        )
    return dated
