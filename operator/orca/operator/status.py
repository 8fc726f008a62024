"""The status of an OrcaDeployment: counts and conditions out of what was seen, pure.

Accepted         the spec can be served as written
PoolReady        Redis answers and keeps what it is given
ModelReady       the model's files are where the pods look for them
WorkersReady     all stage pods of the wanted groups run
SchedulerReady   all wanted groups are formed
GatewayReady     clients are answered
Progressing      something is on its way: a start, a rollout, a change of scale
Degraded         something that should serve does not, and why
Ready            the wanted revision serves, with as many groups as it must have, and clients reach it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca.operator import model_fetch, names, troubles
from orca.operator.observed import Observed, is_pod_ready
from orca.operator.plan import Plan
from orca.operator.render import gateway
from orca.operator.resource import Deployment, Json
from orca.operator.rollout import Group
from orca.operator.troubles import Trouble

MESSAGE_MAX = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    is_true: bool
    reason: str
    message: str = ""


def refused(generation: int, reason: str, message: str, before: Mapping[str, Any], now: str) -> Json:
    """The status of a resource that cannot be served as written. What it made before goes on as it was."""
    conditions = [Condition("Accepted", False, reason, message), Condition("Ready", False, reason, message)]
    return {"observedGeneration": generation, "conditions": _dated(conditions, before, generation, now)}


def status(
    deployment: Deployment,
    observed: Observed,
    plan: Plan,
    before: Mapping[str, Any],
    now: str,
    *,
    refusal: str | None = None,
) -> Json:
    """
    Args:
        before: the status as it is: the times of conditions that do not change stay.
        now: RFC 3339.
        refusal: of the API server, to something that the plan wanted.
    """
    new = [group for group in plan.groups if group.revision == plan.revision]
    ready = sum(group.is_ready for group in new)
    desired = deployment.spec.wanted_groups
    accepted = Condition("Accepted", True, "Valid")
    if refusal is not None:
        accepted = Condition("Accepted", False, "Refused", refusal)
    conditions = _conditions(deployment, observed, plan, new, accepted)
    pool = observed.pool
    result: Json = {
        "observedGeneration": deployment.generation,
        "model": deployment.spec.model.name,
        "url": gateway.url(deployment),
        "selector": f"{names.selector(deployment.name)},{names.ROLE_LABEL}=scheduler",
        "groups": {
            "total": len(plan.groups),
            "ready": sum(group.is_ready for group in plan.groups),
            "desired": desired,
            "updated": len(new),
            "summary": f"{ready}/{desired}",
        },
        "updateRevision": plan.revision,
        "currentRevision": _current_revision(plan),
        "conditions": _dated(conditions, before, deployment.generation, now),
    }
    if pool.problem is None:
        wait_s = pool.oldest_wait_ms // 1000
        result["requests"] = {"queued": pool.queued, "running": pool.running, "oldestWaitSeconds": wait_s}
    return result


def _conditions(
    deployment: Deployment, observed: Observed, plan: Plan, new: Sequence[Group], accepted: Condition
) -> list[Condition]:
    pool = _pool(deployment, observed)
    model = _model(deployment, observed)
    workers = _workers(deployment, observed, new)
    scheduler = _schedulers(deployment, observed, new)
    gateways = _gateways(deployment, observed)
    parts = [pool, model, workers, scheduler, gateways]
    progressing = _progressing(deployment, plan, parts)
    return [
        accepted,
        *parts,
        progressing,
        _degraded(parts, progressing),
        _ready(deployment, [accepted, *parts], progressing),
    ]


def _pool(deployment: Deployment, observed: Observed) -> Condition:
    name = "PoolReady"
    pods = observed.pods("pool")
    if deployment.spec.pool.external is None and not any(map(is_pod_ready, pods)):
        return _missing(name, pods, "PoolStarting", "Redis is not up yet")
    if observed.pool.problem is not None:
        return Condition(name, False, "PoolUnreachable", observed.pool.problem)
    return Condition(name, True, "Serving")


def _model(deployment: Deployment, observed: Observed) -> Condition:
    name = "ModelReady"
    if trouble := model_fetch.trouble(deployment, observed):
        return _of_trouble(name, trouble)
    if deployment.spec.model.is_fetched:
        return Condition(name, True, "Fetched", f"{deployment.spec.model.uri} is whole in its volume")
    return Condition(name, True, "InPlace", "the pods find it where the uri says")


def _workers(deployment: Deployment, observed: Observed, new: Sequence[Group]) -> Condition:
    name = "WorkersReady"
    if deployment.spec.wanted_groups == 0:
        return Condition(name, True, "NoneWanted", "replicas is 0: requests wait in the pool")
    pods = [pod for group in new for pod in observed.pods("stage", group=group.name)]
    ready = sum(map(is_pod_ready, pods))
    wanted = deployment.spec.wanted_groups * deployment.spec.parallelism.stages
    if ready < wanted:
        return _missing(name, pods, "StagesStarting", f"{ready} of {wanted} stage pods are up")
    return Condition(name, True, "Running", f"{wanted} stage pods are up")


def _schedulers(deployment: Deployment, observed: Observed, new: Sequence[Group]) -> Condition:
    name = "SchedulerReady"
    desired = deployment.spec.wanted_groups
    if desired == 0:
        return Condition(name, True, "NoneWanted", "replicas is 0: requests wait in the pool")
    formed = sum(group.is_ready for group in new)
    if formed >= desired:
        return Condition(name, True, "Formed", f"{formed} groups are formed")
    pods = [pod for group in new for pod in observed.pods("scheduler", group=group.name)]
    return _missing(name, pods, "GroupForming", f"{formed} of {desired} groups are formed")


def _gateways(deployment: Deployment, observed: Observed) -> Condition:
    name = "GatewayReady"
    if deployment.spec.suspend:
        return Condition(name, False, "Suspended", "the resource is suspended")
    pods = observed.pods("gateway")
    ready = sum(map(is_pod_ready, pods))
    if ready == 0:
        return _missing(name, pods, "GatewayStarting", "no gateway is up yet")
    return Condition(name, True, "Serving", f"{ready} of {deployment.spec.gateway.replicas} gateways are up")


def _missing(name: str, pods: Sequence[Json], reason: str, message: str) -> Condition:
    """What is not there, and what a pod says about it."""
    trouble = troubles.worst(pods)
    return Condition(name, False, reason, message) if trouble is None else _of_trouble(name, trouble)


def _of_trouble(name: str, trouble: Trouble) -> Condition:
    return Condition(name, False, trouble.reason, trouble.message)


_ON_THE_WAY = frozenset({"PoolStarting", "StagesStarting", "GroupForming", "GatewayStarting", model_fetch.LOADING})


def _progressing(deployment: Deployment, plan: Plan, parts: Sequence[Condition]) -> Condition:
    name = "Progressing"
    old = sum(group.revision != plan.revision for group in plan.groups)
    new = len(plan.groups) - old
    # Until then nothing else moves.
    loading = next((part for part in parts if part.reason == model_fetch.LOADING), None)
    if loading is not None:
        return Condition(name, True, loading.reason, loading.message)
    if old and deployment.spec.wanted_groups:
        how = "; there is no room for the surge, so one group may be missing" if plan.is_squeezed else ""
        return Condition(name, True, "RollingOut", f"{old} groups of other revisions are still there{how}")
    if new != deployment.spec.wanted_groups or old:
        return Condition(name, True, "Scaling", f"{new} of {deployment.spec.wanted_groups} groups exist")
    waiting = [part for part in parts if not part.is_true and part.reason in _ON_THE_WAY]
    if waiting:
        return Condition(name, True, waiting[0].reason, waiting[0].message)
    return Condition(name, False, "Complete")


def _degraded(parts: Sequence[Condition], progressing: Condition) -> Condition:
    broken = [part for part in parts if not part.is_true and part.reason not in _ON_THE_WAY | {"Suspended"}]
    if broken:
        return Condition("Degraded", True, broken[0].reason, broken[0].message)
    return Condition("Degraded", False, progressing.reason if progressing.is_true else "AsWanted")


def _ready(deployment: Deployment, parts: Sequence[Condition], progressing: Condition) -> Condition:
    """With replicas 0 it is ready when it accepts: that is what was asked for."""
    missing = [part for part in parts if not part.is_true]
    if deployment.spec.suspend:
        return Condition("Ready", False, "Suspended", "the resource is suspended; the pool keeps what was accepted")
    if missing:
        return Condition("Ready", False, missing[0].reason, missing[0].message)
    if progressing.is_true and progressing.reason == "RollingOut":
        return Condition("Ready", True, "RollingOut", progressing.message)
    return Condition("Ready", True, "Serving" if deployment.spec.wanted_groups else "Holding")


def _current_revision(plan: Plan) -> str:
    """Of the groups that serve: the old one until a group of the wanted one does."""
    old = sorted({group.revision for group in plan.groups if group.is_ready and group.revision != plan.revision})
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
