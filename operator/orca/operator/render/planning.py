"""The Jobs that measure a model, and make and check a plan for spec.slo, and the ConfigMaps that hold their results.

The pod of a profile is like that of a stage, with the devices of a whole group, or fewer GPUs. Image, node and patch
are those of stages, since times must be measured where they will count. The pods of a plan and of its
checks are like that of a scheduler.

All leave their result in the pool. Their pods have no rights in the cluster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca.core.fetch_report import PERMANENT_EXIT
from orca.core.job_files import PLAN_FILE, PROFILE_FILE, STATE_FILE
from orca.operator.domain import names
from orca.operator.domain.pod_patches.pod_patch import merged
from orca.operator.domain.resource import Json, OrcaDeployment, ResourcesSpec, SloSpec
from orca.operator.domain.slo.keys import layers_digest
from orca.operator.domain.slo.resources import of_devices, profiled_devices
from orca.operator.render import model, pool
from orca.operator.render.group import LOST_NODE
from orca.operator.render.objects import metadata
from orca.operator.render.pods import container, flags, template
from orca.operator.render.pool import PoolConnection

_RETRIES = 3
"""Failed pods before the Job has failed. The operator makes it again later (plan/slo/making.py)."""

_PLAN_RESOURCES = ResourcesSpec(requests={"cpu": "500m", "memory": "256Mi"}, limits={"memory": "2Gi"})
"""The search runs for up to a minute on one processor."""

_CHECK_RESOURCES = ResourcesSpec(requests={"cpu": "100m", "memory": "256Mi"}, limits={"memory": "2Gi"})
"""A check takes half a minute of a processor. Nobody waits for it, so it takes what others leave."""

_DEADLINE_S = 3600
"""Seconds on its node after which a pod ends, since it hangs. A large model takes long to load, for each number of
ranks. The wait for devices does not count. Groups may have lent the devices, so it is the longest time without them."""

_PROFILE_FOLDER = "/etc/orca/profile"
_PLAN_FOLDER = "/etc/orca/plan"
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def profile_job(deployment: OrcaDeployment, image: str, name: str, connection: PoolConnection) -> Json:
    """Render the Job that measures the model. Args: deployment: as its author wrote it. name: also of its result."""
    spec, worker, devices = deployment.spec, deployment.spec.worker, profiled_devices(deployment)
    location = model.locate(deployment)
    values = {
        "model": location.folder,
        "out": f"/tmp/{PROFILE_FILE}",
        "devices": devices,
        "ranks": deployment.constraints.tensor,
        "threads": worker.threads,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "device": worker.device,
        # The other parts of Orca have pods of their own.
        "host": False,
        "deployment": pool.key_prefix(deployment),
        "result_key": name,
    }
    main = container(
        names.STAGE,
        image,
        ["profile", *flags(values)],
        images=spec.images,
        resources=of_devices(worker.resources, devices),
        ports={},
        environment=[{"name": "ORCA_PROFILE_POOL", **connection.url}, *connection.environment],
        mounts=[*location.mounts, *connection.mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    )
    if worker.device == "cuda":
        main = merged(main, {"resources": {"limits": {worker.accelerator_resource: str(devices)}}})
    shared = {"medium": "Memory", "sizeLimit": f"{worker.shared_memory_mib}Mi"}
    pod = template(
        names.labels(deployment.name, names.PROFILE),
        main,
        account=deployment.account,
        images=spec.images,
        volumes=[*location.volumes, *connection.volumes, {"name": "shared-memory", "emptyDir": shared}],
        more={
            "nodeSelector": dict(worker.node_selector) or None,
            "tolerations": [*worker.tolerations, *LOST_NODE],
            "runtimeClassName": worker.runtime_class_name,
        },
        patch=worker.pod_patch,
        remove=worker.pod_patch_remove,
    )
    return _job(deployment, name, names.PROFILE, pod, container_name=names.STAGE)


def plan_job(
    deployment: OrcaDeployment,
    image: str,
    name: str,
    profile: str,
    connection: PoolConnection,
    *,
    least_slots: int | None,
) -> Json:
    """Render the Job that makes the plan.

    Args:
        deployment: as its author wrote it.
        name: also of its result.
        profile: name of the ConfigMap with the profile.
        least_slots: KV slots without which a group would not form; None: unknown.
    """
    spec, slo = deployment.spec, _slo(deployment)
    values = {
        "profile": f"{_PROFILE_FOLDER}/{PROFILE_FILE}",
        "out": f"/tmp/{PLAN_FILE}",
        **_goal(slo),
        "counted": True if slo.workload.lengths is None else None,
        **_room(deployment),
        "least_slots": least_slots,
        "deployment": pool.key_prefix(deployment),
        "result_key": name,
    }
    files = {"profile": _Files(profile, _PROFILE_FOLDER)}
    main = container(
        names.SCHEDULER,
        image,
        ["plan", *flags(values)],
        images=spec.images,
        resources=_PLAN_RESOURCES,
        ports={},
        environment=[{"name": "ORCA_PLAN_POOL", **connection.url}, *connection.environment],
        mounts=[*connection.mounts, *_mounts(files)],
    )
    return _scheduler_job(deployment, name, names.PLAN, main, [*connection.volumes, *_volumes(files)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInput:
    """The input of a check."""

    profile: str  # name of the ConfigMap with the profile
    plan: str  # name of the ConfigMap with the plan in force
    has_state: bool  # that ConfigMap has the state that the last check has left, too
    least_slots: int | None  # KV slots without which a group would not form; None: unknown


def check_job(deployment: OrcaDeployment, image: str, name: str, given: CheckInput, connection: PoolConnection) -> Json:
    """Render the Job that checks a plan. Args: deployment: as its author wrote it. name: also of its result."""
    spec, slo = deployment.spec, _slo(deployment)
    values = {
        "profile": f"{_PROFILE_FOLDER}/{PROFILE_FILE}",
        "plan": f"{_PLAN_FOLDER}/{PLAN_FILE}",
        "state": f"{_PLAN_FOLDER}/{STATE_FILE}" if given.has_state else None,
        "replan": slo.replan.lower(),
        **_goal(slo),
        **_room(deployment),
        "least_slots": given.least_slots,
        "deployment": pool.key_prefix(deployment),
        "result_key": name,
    }
    in_plan = (PLAN_FILE, STATE_FILE) if given.has_state else (PLAN_FILE,)
    files = {"profile": _Files(given.profile, _PROFILE_FOLDER), "plan": _Files(given.plan, _PLAN_FOLDER, in_plan)}
    main = container(
        names.SCHEDULER,
        image,
        ["follow", *flags(values)],
        images=spec.images,
        resources=_CHECK_RESOURCES,
        ports={},
        environment=[{"name": "ORCA_FOLLOW_POOL", **connection.url}, *connection.environment],
        mounts=[*connection.mounts, *_mounts(files)],
    )
    return _scheduler_job(deployment, name, names.FOLLOW, main, [*connection.volumes, *_volumes(files)])


def result(deployment: OrcaDeployment, name: str, role: str, files: Mapping[str, str]) -> Json:
    """Render the ConfigMap that holds what a Job has left. It never changes: another result has another name."""
    marks = metadata(deployment, name, role, {names.MODEL_LABEL: layers_digest(deployment.spec.model)})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": marks, "immutable": True, "data": dict(files)}


def follow_state(deployment: OrcaDeployment, name: str, data: Mapping[str, str]) -> Json:
    """Render the ConfigMap that holds the record of the checks of a plan. Each check changes it."""
    marks = metadata(deployment, name, names.FOLLOW, {names.MODEL_LABEL: layers_digest(deployment.spec.model)})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": marks, "data": dict(data)}


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of a ConfigMap in a pod."""

    config_map: str
    folder: str
    keys: Sequence[str] = ()  # none: all of them


def _mounts(files: Mapping[str, _Files]) -> list[Json]:
    """Args: files: by name of the volume."""
    return [{"name": name, "mountPath": each.folder, "readOnly": True} for name, each in files.items()]


def _volumes(files: Mapping[str, _Files]) -> list[Json]:
    found = []
    for name, each in files.items():
        source: Json = {"name": each.config_map}
        if each.keys:
            source["items"] = [{"key": key, "path": key} for key in each.keys]
        found.append({"name": name, "configMap": source})
    return found


def _scheduler_job(deployment: OrcaDeployment, name: str, role: str, main: Json, volumes: Sequence[Json]) -> Json:
    """Render a Job whose pod is like that of a scheduler. Args: main: its container."""
    spec = deployment.spec
    pod = template(
        names.labels(deployment.name, role),
        main,
        account=deployment.account,
        images=spec.images,
        volumes=volumes,
        more={"tolerations": list(LOST_NODE)},
        patch=spec.scheduler.pod_patch,
        remove=spec.scheduler.pod_patch_remove,
    )
    return _job(deployment, name, role, pod, container_name=names.SCHEDULER)


def _goal(slo: SloSpec) -> dict[str, Any]:
    """Return the flags of the goal and of stated lengths."""
    return {
        "devices": slo.devices,
        "latency_ms": slo.latency_ms,
        "percentile": slo.percentile,
        "kind": slo.kind,
        "rate": slo.rate,
        "ttft_ms": slo.ttft_ms,
        "tpot_ms": slo.tpot_ms,
        "margin_percent": slo.margin_percent,
        "workload": slo.workload.lengths,
    }


def _room(deployment: OrcaDeployment) -> dict[str, Any]:
    """Return the flags of what the spec has chosen, as far as a plan depends on it."""
    spec, given = deployment.spec, deployment.constraints
    return {
        "strategies": given.policy,
        "stages": given.stages,
        "tensor": given.tensor,
        "layers": None if given.stage_layers is None else ",".join(map(str, given.stage_layers)),
        "max_batch_size": given.max_batch_size,
        "slots": spec.scheduler.kv_slots,
        "memory_share": spec.worker.memory_share_percent / 100,
        "max_model_len": spec.model.max_model_len,
        "prefetch": spec.scheduler.prefetch,
    }


def _job(deployment: OrcaDeployment, name: str, role: str, pod: Json, *, container_name: str) -> Json:
    """Render a Job with one pod at a time."""
    # A patch of services may have probes, which need a port.
    containers = [
        {key: value for key, value in each.items() if key not in _PROBES} if each["name"] == container_name else each
        for each in pod["spec"]["containers"]
    ]
    ends = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 10, "activeDeadlineSeconds": _DEADLINE_S}
    spec = {**pod["spec"], "containers": containers, **ends}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(deployment, name, role),
        "spec": {
            "backoffLimit": _RETRIES,
            # Never two at a time: they would share devices.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    # Another try would end in the same way: the model or a field of the spec allows no result.
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": container_name, "operator": "In", "values": [PERMANENT_EXIT]},
                    },
                    # A drained node is not a failure of the Job.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {**pod, "spec": spec},
        },
    }


def _slo(deployment: OrcaDeployment) -> SloSpec:
    assert deployment.spec.slo is not None
    return deployment.spec.slo
