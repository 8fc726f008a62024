"""The plan in force, and the deployment as it runs with it: pure.

Everything else plans and renders from the deployment that comes out here, and does not know of plans.

A first plan is a ConfigMap that never changes. The checks of it have a record (domain/slo/following.py), which holds
the plan that they have put in force; it goes before the first plan. Until there is a plan for the present spec, the
newest other one of the same model serves, if it keeps to what the spec gives. Without any, the defaults serve.
"""

from collections.abc import Sequence
from dataclasses import replace

from orca.core.plan_report import PlanReport
from orca.operator.domain import names
from orca.operator.domain.objects import Children, is_going, label_map, seconds
from orca.operator.domain.observation import Observation, PlanInForce
from orca.operator.domain.resource import DeploymentSpec, Json, OrcaDeployment
from orca.operator.domain.slo.following import FollowRecord, read_checked, read_first, read_follow_record
from orca.operator.domain.slo.keys import layers_digest, plan_key
from orca.operator.domain.slo.planned import PlannedService
from orca.operator.domain.slo.resources import of_devices


def with_plan_in_force(observation: Observation) -> Observation:
    """Return the observation with the deployment as it runs; unchanged without spec.slo."""
    stated = observation.deployment
    if stated.spec.slo is None:
        return observation
    found = find_plan(stated, observation.children, observation.images.worker)
    spec = _without_controls(stated.spec) if found is None else found.planned.applied_to(stated.spec)
    resources = of_devices(spec.worker.resources, spec.parallelism.tensor)
    spec = replace(spec, worker=replace(spec.worker, resources=resources))
    return replace(observation, deployment=replace(stated, spec=spec), stated=stated, plan_in_force=found)


def find_plan(deployment: OrcaDeployment, children: Children, image: str) -> PlanInForce | None:
    """Return the plan that the deployment runs; None if there is none.

    Args: deployment: as its author wrote it, with slo. image: of the stages.
    """
    key = plan_key(deployment, image)
    return _wanted_plan(deployment, children, key) or _earlier_plan(deployment, children)


def _wanted_plan(deployment: OrcaDeployment, children: Children, key: str) -> PlanInForce | None:
    """Return the plan for the present spec; None if there is none yet."""
    plan = children.get("ConfigMap", names.plan(deployment.name, key))
    follow = children.get("ConfigMap", names.follow(deployment.name, key))
    record = None if follow is None else _read_record(follow)
    made_s = min((_made_s(each) for each in (plan, follow) if each is not None), default=0.0)
    if follow is not None and record is not None and record.files:
        checked = _read(record, follow)
        # Anybody may have edited it, unlike a plan that never changes.
        if checked is not None and _fits(deployment, checked[0]):
            return _in_force(follow, checked, is_wanted=True, following=record, made_s=made_s)
        record = None
    first = None if plan is None else _read(None, plan)
    if plan is None or first is None:
        return None
    return _in_force(plan, first, is_wanted=True, following=record, made_s=made_s)


def _earlier_plan(deployment: OrcaDeployment, children: Children) -> PlanInForce | None:
    """Return the newest plan for an earlier spec that runs with the present one; None if there is none."""
    for each in sorted(_config_maps(children), key=_rank, reverse=True):
        record = _read_record(each) if _role(each) == names.FOLLOW else None
        if _role(each) == names.FOLLOW and (record is None or not record.files):
            continue
        found = _read(record, each)
        if found is not None and _is_of_model(deployment, each) and _fits(deployment, found[0]):
            return _in_force(each, found, is_wanted=False, following=None, made_s=_made_s(each))
    return None


def _in_force(
    config_map: Json,
    found: tuple[PlannedService, PlanReport | None],
    *,
    is_wanted: bool,
    following: FollowRecord | None,
    made_s: float,
) -> PlanInForce:
    return PlanInForce(
        name=config_map["metadata"]["name"],
        planned=found[0],
        report=found[1],
        is_wanted=is_wanted,
        following=following,
        made_s=made_s,
    )


def _config_maps(children: Children) -> Sequence[Json]:
    return [each for each in children.of_kind("ConfigMap") if _role(each) in (names.PLAN, names.FOLLOW)]


def _role(config_map: Json) -> str | None:
    return label_map(config_map).get(names.ROLE_LABEL)


def _read_record(config_map: Json) -> FollowRecord | None:
    """Return the record in a ConfigMap; None if it has none, or is being deleted."""
    if is_going(config_map):
        return None
    try:
        return read_follow_record(config_map.get("data") or {})
    except ValueError:
        return None


def _read(record: FollowRecord | None, config_map: Json) -> tuple[PlannedService, PlanReport | None] | None:
    """Return the plan of a record or, without one, the first plan in a ConfigMap. None: it cannot be read, or goes."""
    if is_going(config_map):
        return None
    try:
        return read_first(config_map.get("data") or {}) if record is None else read_checked(record.files)
    except ValueError:
        return None


def _made_s(config_map: Json) -> float:
    made = config_map["metadata"].get("creationTimestamp")
    return 0.0 if made is None else seconds(made)


def _rank(config_map: Json) -> tuple[str, bool, str]:
    """Return what is largest for the plan that came into force last: a record goes before its own first plan."""
    metadata = config_map["metadata"]
    return str(metadata.get("creationTimestamp", "")), _role(config_map) == names.FOLLOW, metadata["name"]


def _is_of_model(deployment: OrcaDeployment, config_map: Json) -> bool:
    return label_map(config_map).get(names.MODEL_LABEL) == layers_digest(deployment.spec.model)


def _fits(deployment: OrcaDeployment, planned: PlannedService) -> bool:
    """Return whether a plan runs with the present spec."""
    slo = deployment.spec.slo
    assert slo is not None
    return planned.fits(deployment.constraints, slo.devices)


def _without_controls(spec: DeploymentSpec) -> DeploymentSpec:
    """Return the spec that serves without a plan: the controls of rra would come from one."""
    if spec.scheduler.policy != "rra":
        return spec
    return replace(spec, scheduler=replace(spec.scheduler, policy="iteration"))
