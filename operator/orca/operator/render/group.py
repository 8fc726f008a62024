"""A group: the stage pods of one replica of the model in a StatefulSet, and its scheduler in another.

The stages of a group never change: another image, model or shape is another revision with groups of its own, and the
plan replaces the old groups. The scheduler may change while its stages stay: it drains, and the next one forms the
group again.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.domain.step_tokens import max_batch_tokens
from orca.operator.domain import facts, names
from orca.operator.domain.certificates import CA, CERTIFICATE, FILES, KEY, server_name
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.observation import ModelVersion
from orca.operator.domain.pod_patches.pod_patch import merged
from orca.operator.domain.resource import Json, OrcaDeployment, SchedulerSpec
from orca.operator.render import model, pool
from orca.operator.render.objects import metadata, selector
from orca.operator.render.pods import container, everywhere, flags, http_probe, metric_names, secret_volume, template
from orca.operator.render.pool import PoolConnection

STAGE_PORT = 7000
HEALTH_PORT = 7001
RENDEZVOUS_PORT = 7002
METRICS_PORT = 9090

_SCHEDULE_FOLDER = "/etc/orca/schedule"
_SCHEDULE_VOLUME = "schedule"
_BOUNDS_FILE = "bounds.json"
_CERTIFICATES_FOLDER = "/etc/orca/certificates"
# A folder, not single files: a mounted file would not follow a change of the Secret.
_CERTIFICATES_MOUNT: Json = {"name": "certificates", "mountPath": _CERTIFICATES_FOLDER, "readOnly": True}

DRAIN_S = 30
"""A scheduler drains in one iteration and a stage at once, so this is ample."""


def revision(deployment: OrcaDeployment, image: str) -> str:
    """Return 8 hex digits that name everything whose change needs new stage pods.

    The pod that it hashes is of no group, so it does not prefer other nodes than those of other groups. A preference is
    no reason for new groups.
    """
    content = [_stage_pod(deployment, image, {}), deployment.spec.parallelism.stages]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def stages(deployment: OrcaDeployment, image: str, group: str, pause: Pause) -> list[Json]:
    """Render Service and StatefulSet of a group's stage pods.

    Args: group: its name, from names.group. pause: while it is on there are no pods.
    """
    marks = metadata(deployment, group, names.STAGE, _group_labels(group))
    selector = {names.GROUP_LABEL: group, names.ROLE_LABEL: names.STAGE}
    count = deployment.spec.parallelism.stages
    # The name that clients use is the gateways' alone: a change of it must not touch groups.
    served = replace(model.wanted_model(deployment), name=None)
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": marks | {"annotations": facts.stages_annotations(count, served) | pause.annotations},
        "spec": {
            "serviceName": group,
            "replicas": 0 if pause.is_on else count,
            # No stage can do anything until all are there.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector},
            "template": _stage_pod(deployment, image, marks["labels"]),
        },
    }
    return [_headless_service(marks, selector, {"engine": STAGE_PORT}), stateful_set]


def schedule(deployment: OrcaDeployment, others: Mapping[str, str] | None = None) -> Json:
    """Render the batch bounds, which running schedulers follow (`--bounds-file`).

    Args: others: bounds of schedulers that the spec does not describe any more, by key of the ConfigMap.
    """
    chosen = deployment.spec.scheduler
    tokens = max_batch_tokens(
        chosen.max_batch_tokens,
        device=deployment.spec.worker.device,
        policy=chosen.policy,
        max_batch_size=chosen.max_batch_size,
    )
    bounds = {"max_batch_size": chosen.max_batch_size, "max_batch_tokens": tokens}
    if chosen.rra is not None:
        # None is written too: it switches a control off that a variable of the pod may set.
        bounds |= asdict(chosen.rra)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, names.schedule(deployment.name), names.SCHEDULER),
        "data": {**(others or {}), _bounds_key(deployment): json.dumps(bounds)},
    }


def bounds_key(pod_spec: Json) -> str:
    """Return the key of the ConfigMap from which a scheduler pod has its bounds. Args: pod_spec: as it is."""
    for volume in pod_spec.get("volumes") or []:
        if volume["name"] == _SCHEDULE_VOLUME:
            items = (volume.get("configMap") or {}).get("items") or []
            return next((str(each["key"]) for each in items if each["path"] == _BOUNDS_FILE), _BOUNDS_FILE)
    return _BOUNDS_FILE


def scheduler(
    deployment: OrcaDeployment,
    image: str,
    group: str,
    version: ModelVersion,
    connection: PoolConnection,
    pause: Pause,
) -> list[Json]:
    """Render Service and StatefulSet of a group's scheduler. Args: version: of the wanted model."""
    name = names.scheduler(group)
    marks = metadata(deployment, name, names.SCHEDULER, _group_labels(group))
    labels = marks["labels"] | {
        names.MODEL_LABEL: version.digest,
        names.GENERATION_LABEL: str(version.generation),
    }
    selector = {names.GROUP_LABEL: group, names.ROLE_LABEL: names.SCHEDULER}
    known = facts.slots_annotations(deployment.spec.scheduler.kv_slots)
    known |= facts.pool_annotations(connection.external_url)
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": marks | {"labels": labels, "annotations": known},
        "spec": {
            "serviceName": name,
            "replicas": 0 if pause.is_on else 1,
            # A scheduler becomes ready when its group is formed: a change must not wait for that.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector},
            "template": _scheduler_pod(deployment, image, group, version.generation, labels, connection),
        },
    }
    ports = {"rendezvous": RENDEZVOUS_PORT, "metrics": METRICS_PORT}
    return [_headless_service(marks, selector, ports), stateful_set]


def come_back(stages: Json, scheduler: Json | None, pause: Pause) -> list[Json]:
    """Render the StatefulSets of a group that had given way, with pods again.

    Nothing is rendered if the number of its stages is unknown.

    Args: stages, scheduler: as they are in the cluster.
    """
    count = facts.stage_count(stages)
    if count is None:
        return []
    found = [resized(stages, count, pause)]
    return found if scheduler is None else [*found, resized(scheduler, 1)]


def resized(there: Json, replicas: int, pause: Pause | None = None) -> Json:
    """Render a StatefulSet or Deployment as it is in the cluster, with another number of pods.

    Args: pause: of a group, for its StatefulSet of stages.
    """
    kept = {key: there["metadata"].get(key) for key in ("name", "namespace", "labels", "ownerReferences")}
    annotations = facts.kept_annotations(there) | ({} if pause is None else pause.annotations)
    marks = {key: value for key, value in kept.items() if value is not None} | {"annotations": annotations}
    whole = {key: there[key] for key in ("apiVersion", "kind", "spec")}
    return {**whole, "metadata": marks, "spec": there["spec"] | {"replicas": replicas}}


def _stage_pod(deployment: OrcaDeployment, image: str, labels: dict[str, str]) -> Json:
    """Render the pod of a stage, which all groups of a revision have in common except for its labels."""
    spec, worker = deployment.spec, deployment.spec.worker
    location = model.locate(deployment)
    values = {
        "model": location.folder,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "max_model_len": spec.model.max_model_len,
        "stages": spec.parallelism.stages,
        "layers": ",".join(map(str, spec.parallelism.stage_layers)) or None,
        "tensor": spec.parallelism.tensor,
        "device": worker.device,
        "threads": worker.threads,
        "memory_share": worker.memory_share_percent / 100,
        "network_interface": worker.network_interface,
        "listen": everywhere(STAGE_PORT),
        "health_listen": everywhere(HEALTH_PORT),
        **_certificate_settings(deployment),
        "log_format": "json",
    }
    stage = container(
        names.STAGE,
        image,
        ["worker", *flags(values)],
        images=spec.images,
        resources=worker.resources,
        ports={"engine": STAGE_PORT, "health": HEALTH_PORT},
        environment=[
            _field("ORCA_WORKER_STAGE", f"metadata.labels['{names.POD_INDEX_LABEL}']"),
            _field("ORCA_WORKER_DATA_HOST", "status.podIP"),
        ],
        mounts=[*location.mounts, _CERTIFICATES_MOUNT, {"name": "shared-memory", "mountPath": "/dev/shm"}],
        more={
            # Loading may take any time; the stage answers meanwhile.
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
        account=deployment.account,
        images=spec.images,
        volumes=[
            *location.volumes,
            _certificates_volume(deployment),
            {"name": "shared-memory", "emptyDir": shared},
        ],
        more={
            "terminationGracePeriodSeconds": DRAIN_S,
            "hostNetwork": worker.host_network or None,
            "dnsPolicy": "ClusterFirstWithHostNet" if worker.host_network else None,
            "nodeSelector": dict(worker.node_selector) or None,
            "tolerations": [*worker.tolerations, *LOST_NODE],
            "runtimeClassName": worker.runtime_class_name,
            "affinity": _apart_from_other_groups(deployment, labels.get(names.GROUP_LABEL)),
        },
        patch=worker.pod_patch,
        remove=worker.pod_patch_remove,
    )


def _apart_from_other_groups(deployment: OrcaDeployment, group: str | None) -> Json | None:
    """Render the preference for nodes without stages of other groups, so that not all groups go with one node.

    It says nothing about the stages of its own group. Args: group: its name; None for a pod of no group.
    """
    key, wanted = deployment.spec.spread.topology_key, deployment.spec.model
    # All pods that read such a volume must run on one node, and the scheduler of Kubernetes does not know that.
    is_on_one_node = wanted.is_fetched and wanted.cache.access_mode == "ReadWriteOnce"
    if group is None or not key or is_on_one_node:
        return None
    others = {"key": names.GROUP_LABEL, "operator": "NotIn", "values": [group]}
    selected = {"matchLabels": selector(deployment, names.STAGE), "matchExpressions": [others]}
    term = {"weight": 100, "podAffinityTerm": {"labelSelector": selected, "topologyKey": key}}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


def _scheduler_pod(
    deployment: OrcaDeployment,
    image: str,
    group: str,
    generation: int,
    labels: dict[str, str],
    connection: PoolConnection,
) -> Json:
    spec, chosen = deployment.spec, deployment.spec.scheduler
    location = model.locate(deployment)
    domain = f"{deployment.namespace}.svc"
    addresses = [f"{group}-{stage}.{group}.{domain}:{STAGE_PORT}" for stage in range(spec.parallelism.stages)]
    values = {
        "model": location.folder,
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "group": group,
        "stages": ",".join(addresses),
        "generation": generation,
        "listen": everywhere(RENDEZVOUS_PORT),
        "advertise": f"{names.scheduler(group)}.{domain}",
        "metrics_listen": everywhere(METRICS_PORT),
        "deployment": pool.key_prefix(deployment),
        "policy": chosen.policy,
        **_order_settings(chosen),
        "bounds_file": f"{_SCHEDULE_FOLDER}/{_BOUNDS_FILE}",
        "prefetch": chosen.prefetch,
        # The defaults need no flags: schedulers of earlier releases do not know them.
        "prefix_cache": None if chosen.prefix_cache else False,
        "prefix_charge": None if chosen.prefix_charge == "Each" else chosen.prefix_charge.lower(),
        "slots": chosen.kv_slots,
        # A flag, so that no environment variable sets other blocks than those in which slots are promised.
        "block_tokens": DEFAULT_BLOCK_TOKENS,
        "metric_names": metric_names(spec.metric_names),
        # Only for vLLM's names.
        "name": spec.model.name if metric_names(spec.metric_names) else None,
        **_certificate_settings(deployment),
        "log_format": "json",
    }
    main = container(
        names.SCHEDULER,
        image,
        ["scheduler", *flags(values)],
        images=spec.images,
        resources=chosen.resources,
        ports={"rendezvous": RENDEZVOUS_PORT, "metrics": METRICS_PORT},
        environment=[{"name": "ORCA_SCHEDULER_POOL", **connection.url}, *connection.environment],
        mounts=[
            *location.mounts,
            *connection.mounts,
            _CERTIFICATES_MOUNT,
            {"name": _SCHEDULE_VOLUME, "mountPath": _SCHEDULE_FOLDER, "readOnly": True},
        ],
        more={
            # Ready means that the group is formed. The status shows it; nothing is taken out of service by it.
            "readinessProbe": http_probe("/ready", "metrics", period_s=1, failures=1),
            "livenessProbe": http_probe("/health", "metrics", period_s=5, failures=3),
            "startupProbe": http_probe("/health", "metrics", period_s=1, failures=300),
        },
    )
    return template(
        labels,
        main,
        account=deployment.account,
        images=spec.images,
        volumes=[
            *location.volumes,
            *connection.volumes,
            _certificates_volume(deployment),
            _schedule_volume(deployment),
        ],
        more={"terminationGracePeriodSeconds": DRAIN_S, "tolerations": list(LOST_NODE)},
        patch=chosen.pod_patch,
        remove=chosen.pod_patch_remove,
    )


def _order_settings(chosen: SchedulerSpec) -> dict[str, object]:
    """Return the flags of the order of claims.

    Arrival needs none: its pods stay as they are, and schedulers of earlier releases accept them. Deadline has all of
    them, so a `deadline` that only states defaults restarts nothing.
    """
    if chosen.order == "Arrival":
        return {}
    rules = chosen.deadline
    return {
        "order": _flag_value(chosen.order),
        "utility": _flag_value(rules.utility),
        "eta_percent": rules.eta_percent,
        "patience_s": rules.patience_seconds,
        "drop": _flag_value(rules.drop),
    }


def _flag_value(choice: str) -> str:
    """Return a choice of the resource as flags spell it: InverseLength is inverse_length."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", choice).lower()


def _bounds_key(deployment: OrcaDeployment) -> str:
    """Return the key of the ConfigMap that has the bounds of the wanted schedulers.

    Controls of the policy rra depend on the number of stages, and schedulers of other policies refuse them. So both are
    part of the key. While a rollout changes them, groups that still serve keep the bounds that fit them, also when
    their schedulers start again.
    """
    if deployment.spec.scheduler.rra is None:
        return _BOUNDS_FILE
    return f"bounds-rra-{deployment.spec.parallelism.stages}.json"


def _schedule_volume(deployment: OrcaDeployment) -> Json:
    source: Json = {"name": names.schedule(deployment.name)}
    key = _bounds_key(deployment)
    if key != _BOUNDS_FILE:
        source["items"] = [{"key": key, "path": _BOUNDS_FILE}]
    return {"name": _SCHEDULE_VOLUME, "configMap": source}


LOST_NODE = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
    for taint in ("not-ready", "unreachable")
)
"""Pods leave a lost node after ten seconds. Claim number and epoch make it safe that the old pods may still run."""


def _group_labels(group: str) -> dict[str, str]:
    return {names.GROUP_LABEL: group, names.REVISION_LABEL: names.revision(group)}


def _headless_service(marks: Json, selector: Json, ports: dict[str, int]) -> Json:
    """Render a Service that names the pods, also before they are ready, since a group has to form first."""
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


def _devices(deployment: OrcaDeployment) -> Json:
    """Return the limits of extended resources, which need no requests beside them."""
    worker = deployment.spec.worker
    limits: dict[str, str] = {}
    if worker.device == "cuda":
        limits[worker.accelerator_resource] = str(deployment.spec.parallelism.tensor)
    if worker.rdma_resource is not None:
        limits[worker.rdma_resource.name] = str(worker.rdma_resource.count)
    return {"limits": limits} if limits else {}


def _certificate_settings(deployment: OrcaDeployment) -> dict[str, str]:
    """Return the flags for encrypted links, the same for scheduler and stages. A renewal changes none of them."""
    return {
        "tls_ca_file": f"{_CERTIFICATES_FOLDER}/{CA}",
        "tls_certificate_file": f"{_CERTIFICATES_FOLDER}/{CERTIFICATE}",
        "tls_key_file": f"{_CERTIFICATES_FOLDER}/{KEY}",
        "tls_server_name": server_name(deployment),
    }


def _certificates_volume(deployment: OrcaDeployment) -> Json:
    secret = deployment.spec.certificates.secret_name or names.certificates(deployment.name)
    return secret_volume(_CERTIFICATES_MOUNT["name"], secret, {key: key for key in FILES})
