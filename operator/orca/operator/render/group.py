"""A group: the stage pods of one replica of the model in a StatefulSet, and its scheduler in another.

The stages of a group never change: another image, model or shape is another revision with groups of its own, and the
planner exchanges them. The scheduler may change under its stages: it drains and the next one forms the group anew.
"""

import hashlib
import json
from dataclasses import dataclass

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.domain.step_tokens import max_batch_tokens
from orca.operator.domain import names
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.resource import Deployment, Json
from orca.operator.render import certificates, model, pool
from orca.operator.render.objects import metadata
from orca.operator.render.pods import container, flags, flags_of, http_probe, merged, template

STAGE_PORT = 7000
HEALTH_PORT = 7001
RENDEZVOUS_PORT = 7002
METRICS_PORT = 9090

STAGE = "stage"
SCHEDULER = "scheduler"
_SCHEDULE_FOLDER = "/etc/orca/schedule"
_BOUNDS_FILE = "bounds.json"
DRAIN_S = 30
"""A scheduler drains in one iteration, stages at once: far above both."""


def revision(deployment: Deployment, image: str) -> str:
    """8 hex digits of all that would need new stage pods."""
    content = [_stage_pod(deployment, image, {}), deployment.spec.parallelism.stages]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def stages(deployment: Deployment, image: str, group: str, revision: str, pause: Pause) -> list[Json]:
    """Service and StatefulSet of a group's stage pods.

    Args: group: its name, from names.group. pause: while it is on there are no pods.
    """
    marks = metadata(deployment, group, STAGE, _identity(group, revision))
    selector = {names.GROUP_LABEL: group, names.ROLE_LABEL: STAGE}
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": marks | ({"annotations": pause.annotations} if pause.annotations else {}),
        "spec": {
            "serviceName": group,
            "replicas": 0 if pause.is_on else deployment.spec.parallelism.stages,
            # No stage can do anything before all are there.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector},
            "template": _stage_pod(deployment, image, marks["labels"]),
        },
    }
    return [_headless_service(marks, selector, {"engine": STAGE_PORT}), stateful_set]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What decides outputs, as the spec says it."""

    digest: str  # model.outputs_digest
    generation: int  # the highest becomes the pool's current one


def schedule(deployment: Deployment) -> Json:
    """What may change under running schedulers (`--bounds-file`)."""
    chosen = deployment.spec.scheduler
    tokens = max_batch_tokens(
        chosen.max_batch_tokens,
        device=deployment.spec.worker.device,
        policy=chosen.policy,
        max_batch_size=chosen.max_batch_size,
    )
    bounds = {"max_batch_size": chosen.max_batch_size, "max_batch_tokens": tokens}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, names.schedule(deployment.name), SCHEDULER),
        "data": {_BOUNDS_FILE: json.dumps(bounds)},
    }


def scheduler(
    deployment: Deployment, image: str, group: str, revision: str, outputs: Outputs, link: pool.Link, pause: Pause
) -> list[Json]:
    """Service and StatefulSet of a group's scheduler."""
    name = names.scheduler(group)
    marks = metadata(deployment, name, SCHEDULER, _identity(group, revision))
    told = {names.MODEL_LABEL: outputs.digest, names.GENERATION_LABEL: str(outputs.generation)}
    selector = {names.GROUP_LABEL: group, names.ROLE_LABEL: SCHEDULER}
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": marks | {"labels": marks["labels"] | told},
        "spec": {
            "serviceName": name,
            "replicas": 0 if pause.is_on else 1,
            # It becomes ready when the group is formed: a change must not wait for that.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector},
            "template": _scheduler_pod(deployment, image, group, outputs.generation, marks["labels"] | told, link),
        },
    }
    ports = {"rendezvous": RENDEZVOUS_PORT, "metrics": METRICS_PORT}
    return [_headless_service(marks, selector, ports), stateful_set]


def come_back(stages: Json, scheduler: Json | None, pause: Pause) -> list[Json]:
    """The StatefulSets of a group that had given way, with pods again.

    None of one in which somebody has written other arguments over ours, so that nobody knows its stages.

    Args: stages, scheduler: as they are in the cluster.
    """
    count = flags_of(stages["spec"]["template"]["spec"]["containers"][0]).get("--stages", "")
    if not count.isdecimal():
        return []
    found = [resized(stages, int(count), pause.annotations)]
    return found if scheduler is None else [*found, resized(scheduler, 1, {})]


def resized(there: Json, replicas: int, annotations: dict[str, str]) -> Json:
    """A StatefulSet or Deployment as it is in the cluster, with another number of pods."""
    kept = {key: there["metadata"].get(key) for key in ("name", "namespace", "labels", "ownerReferences")}
    marks = {key: value for key, value in kept.items() if value is not None} | {"annotations": annotations}
    whole = {key: there[key] for key in ("apiVersion", "kind", "spec")}
    return {**whole, "metadata": marks, "spec": there["spec"] | {"replicas": replicas}}


def slots(scheduler: Json) -> int | None:
    """KV slots of a group, read back from its scheduler's StatefulSet.

    None takes what the poorest stage has, and comes also where a user has written other arguments over ours.
    """
    containers = scheduler["spec"]["template"]["spec"]["containers"]
    told = flags_of(next((each for each in containers if each["name"] == SCHEDULER), {})).get("--slots", "")
    return int(told) if told.isdecimal() else None


def _stage_pod(deployment: Deployment, image: str, labels: dict[str, str]) -> Json:
    """Equal for all groups of a revision but for its labels."""
    spec, worker = deployment.spec, deployment.spec.worker
    place = model.place(deployment)
    values = {
        "model": place.folder,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "max_model_len": spec.model.max_model_len,
        "stages": spec.parallelism.stages,
        "tensor": spec.parallelism.tensor,
        "device": worker.device,
        "threads": worker.threads,
        "memory_share": worker.memory_share_percent / 100,
        "network_interface": worker.network_interface,
        "listen": f"0.0.0.0:{STAGE_PORT}",
        "health_listen": f"0.0.0.0:{HEALTH_PORT}",
        **certificates.settings(deployment),
        "log_format": "json",
    }
    stage = container(
        STAGE,
        image,
        ["worker", *flags(values)],
        images=spec.images,
        resources=worker.resources,
        ports={"engine": STAGE_PORT, "health": HEALTH_PORT},
        environment=[
            _field("ORCA_WORKER_STAGE", "metadata.labels['apps.kubernetes.io/pod-index']"),
            _field("ORCA_WORKER_DATA_HOST", "status.podIP"),
        ],
        mounts=[*place.mounts, certificates.MOUNT, {"name": "shared-memory", "mountPath": "/dev/shm"}],
        more={
            # Loading may take any time and answers meanwhile.
            "readinessProbe": http_probe("/health", "health", period_s=5, failures=2),
            "livenessProbe": http_probe("/health", "health", period_s=5, failures=6),
            "startupProbe": http_probe("/health", "health", period_s=1, failures=120),
        },
    )
    stage = merged(stage, {"resources": _devices(deployment)})
    shared = {"medium": "Memory", "sizeLimit": f"{worker.shared_memory_mib}Mi"}
    return template(
        labels,
        stage,
        account=deployment.name,
        images=spec.images,
        volumes=[
            *place.volumes,
            certificates.volume(deployment),
            {"name": "shared-memory", "emptyDir": shared},
        ],
        more={
            "terminationGracePeriodSeconds": DRAIN_S,
            "hostNetwork": worker.host_network or None,
            "dnsPolicy": "ClusterFirstWithHostNet" if worker.host_network else None,
            "nodeSelector": dict(worker.node_selector) or None,
            "tolerations": [*worker.tolerations, *LOST_NODE],
            "runtimeClassName": worker.runtime_class_name,
        },
        patch=worker.pod_patch,
    )


def _scheduler_pod(
    deployment: Deployment, image: str, group: str, generation: int, labels: dict[str, str], link: pool.Link
) -> Json:
    spec, chosen = deployment.spec, deployment.spec.scheduler
    place = model.place(deployment)
    domain = f"{deployment.namespace}.svc"
    addresses = [f"{group}-{stage}.{group}.{domain}:{STAGE_PORT}" for stage in range(spec.parallelism.stages)]
    values = {
        "model": place.folder,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "group": group,
        "stages": ",".join(addresses),
        "generation": generation,
        "listen": f"0.0.0.0:{RENDEZVOUS_PORT}",
        "advertise": f"{names.scheduler(group)}.{domain}",
        "metrics_listen": f"0.0.0.0:{METRICS_PORT}",
        "deployment": pool.word(deployment),
        "policy": chosen.policy,
        "bounds_file": f"{_SCHEDULE_FOLDER}/{_BOUNDS_FILE}",
        "prefetch": chosen.prefetch,
        "slots": chosen.kv_slots,
        # As a flag, so that no variable gives a group other blocks than those in which its slots are promised.
        "block_tokens": DEFAULT_BLOCK_TOKENS,
        **certificates.settings(deployment),
        "log_format": "json",
    }
    main = container(
        SCHEDULER,
        image,
        ["scheduler", *flags(values)],
        images=spec.images,
        resources=chosen.resources,
        ports={"rendezvous": RENDEZVOUS_PORT, "metrics": METRICS_PORT},
        environment=[{"name": "ORCA_SCHEDULER_POOL", **link.url}, *link.environment],
        mounts=[
            *place.mounts,
            *link.mounts,
            certificates.MOUNT,
            {"name": "schedule", "mountPath": _SCHEDULE_FOLDER, "readOnly": True},
        ],
        more={
            # Ready means that the group is formed; it shows in the status and takes nothing out of service.
            "readinessProbe": http_probe("/ready", "metrics", period_s=1, failures=1),
            "livenessProbe": http_probe("/health", "metrics", period_s=5, failures=3),
            "startupProbe": http_probe("/health", "metrics", period_s=1, failures=300),
        },
    )
    return template(
        labels,
        main,
        account=deployment.name,
        images=spec.images,
        volumes=[
            *place.volumes,
            *link.volumes,
            certificates.volume(deployment),
            {"name": "schedule", "configMap": {"name": names.schedule(deployment.name)}},
        ],
        more={"terminationGracePeriodSeconds": DRAIN_S, "tolerations": list(LOST_NODE)},
        patch=chosen.pod_patch,
    )


LOST_NODE = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
    for taint in ("not-ready", "unreachable")
)
"""A lost node is given up after ten seconds; claim number and epoch make it safe that its pods may still run."""


def _identity(group: str, revision: str) -> dict[str, str]:
    return {names.GROUP_LABEL: group, names.REVISION_LABEL: revision}


def _headless_service(marks: Json, selector: Json, ports: dict[str, int]) -> Json:
    """Names for the pods, also for those that are not ready: a group forms before it is."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": marks,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
    }


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _devices(deployment: Deployment) -> Json:
    """Limits of extended resources, which need no requests beside them."""
    worker = deployment.spec.worker
    limits: dict[str, str] = {}
    if worker.device == "cuda":
        limits["nvidia.com/gpu"] = str(deployment.spec.parallelism.tensor)
    if worker.rdma_resource is not None:
        limits[worker.rdma_resource.name] = str(worker.rdma_resource.count)
    return {"limits": limits} if limits else {}
