"""The plan in force, and the deployment as it runs with it: pure.

Everything else plans and renders from the deployment that comes out here, and does not know of plans.

A plan is a ConfigMap. Until the one for the present spec is there, the newest other one of the same model serves, if it
keeps to what the spec gives. Without any, the defaults serve.
"""

from dataclasses import replace

from orca.operator.domain import names
from orca.operator.domain.objects import Children, is_going, label_map
from orca.operator.domain.observation import Observation, PlanInForce
from orca.operator.domain.resource import DeploymentSpec, Json, OrcaDeployment
from orca.operator.domain.slo.keys import layers_digest, plan_key
from orca.operator.domain.slo.planned import PlannedService, read_planned
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
    wanted = names.plan(deployment.name, plan_key(deployment, image))
    plans = [each for each in children.of_kind("ConfigMap") if label_map(each).get(names.ROLE_LABEL) == names.PLAN]
    for each in sorted(plans, key=lambda plan: _rank(plan, wanted), reverse=True):
        name, planned = each["metadata"]["name"], read_plan(each)
        if planned is not None and (name == wanted or _still_fits(deployment, each, planned)):
            return PlanInForce(name, planned)
    return None


def read_plan(config_map: Json) -> PlannedService | None:
    """Return the plan in a ConfigMap; None if it has none, or is being deleted."""
    if is_going(config_map):
        return None
    try:
        return read_planned(config_map.get("data") or {})
    except ValueError:
        return None


def _rank(plan: Json, wanted: str) -> tuple[bool, str, str]:
    metadata = plan["metadata"]
    return metadata["name"] == wanted, str(metadata.get("creationTimestamp", "")), metadata["name"]


def _still_fits(deployment: OrcaDeployment, plan: Json, planned: PlannedService) -> bool:
    """Return whether a plan for an earlier spec runs with the present one."""
    slo, model = deployment.spec.slo, layers_digest(deployment.spec.model)
    assert slo is not None
    is_of_model = label_map(plan).get(names.MODEL_LABEL) == model
    return is_of_model and planned.fits(deployment.constraints, slo.devices)


def _without_controls(spec: DeploymentSpec) -> DeploymentSpec:
    """Return the spec that serves without a plan: the controls of rra would come from one."""
    if spec.scheduler.policy != "rra":
        return spec
    return replace(spec, scheduler=replace(spec.scheduler, policy="iteration"))
