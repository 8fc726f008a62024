"""An OrcaDeployment as the operator reads it: frozen records in the shape of the CRD's schema.

The API server checks types, ranges and rules and fills in defaults before the operator sees a resource, so the records
repeat neither. Only the fields that a plan for spec.slo may decide have their defaults here: an omitted one must not
look like a given one (ShapeConstraints). `read` checks what no rule of the schema can express, and refuses it with
BadSpec, which becomes the condition Accepted=False. charts/orca/crd/orcadeployments.yaml says what each field means.
"""

import dataclasses
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orca.operator.domain.pod_patches import patch_rules
from orca.operator.domain.quantity import is_less
from orca.operator.domain.slo.lengths import find_problem

GROUP = "orca-serving.io"
VERSION = "v1alpha1"
PLURAL = "orcadeployments"
KIND = "OrcaDeployment"

Json = dict[str, Any]
R = TypeVar("R")


class BadSpec(Exception):
    """The spec cannot be served as written. The message is for the author of the spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    size_gib: int
    storage_class_name: str | None = None
    access_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    uri: str
    revision: str | None = None
    endpoint: str | None = None
    served_name: str | None = None
    dtype: str
    quantization: str | None = None
    max_model_len: int | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    token_secret: SecretKey | None = None
    cache: CacheSpec

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_name or (self.uri.partition("://")[2] if self.is_on_hub else self.uri.rpartition("/")[2])

    @property
    def scheme(self) -> str:
        return self.uri.partition("://")[0]

    @property
    def is_on_hub(self) -> bool:
        return self.scheme == "hf"

    @property
    def is_fetched(self) -> bool:
        """True if a Job fetches the model into a volume of ours."""
        return self.scheme in ("hf", "s3")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The requests that a plan is made for."""

    lengths: str | None = None  # None: those of the answers that the pool has counted
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSpec:
    """The goal for the latency of answers. None: no such bound."""

    latency_ms: int
    percentile: int
    kind: str
    devices: int
    ttft_ms: int | None = None
    tpot_ms: int | None = None
    margin_percent: int
    workload: WorkloadSpec
    replan: str

    @property
    def rate(self) -> float | None:
        """Requests per second that arrive; None for a kind that leaves queueing out."""
        per_minute = self.workload.requests_per_minute
        return None if per_minute is None or self.kind != "requests" else per_minute / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSpec:
    stages: int = 1
    tensor: int = 1
    stage_layers: tuple[int, ...] = ()  # empty: as even as possible


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    requests: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaResourceSpec:
    name: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    device: str
    accelerator_resource: str  # name of an extended resource
    threads: int
    memory_share_percent: int
    resources: ResourcesSpec
    network_interface: str | None = None
    host_network: bool
    rdma_resource: RdmaResourceSpec | None = None
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    runtime_class_name: str | None = None
    shared_memory_mib: int
    pod_patch: Mapping[str, Any] = field(default_factory=dict)
    pod_patch_remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RraSpec:
    """The controls of the policy rra. None switches a control off."""

    encode_batch: int
    decode_steps: int
    decode_batch: int | None = None
    encode_tokens: int | None = None
    threshold_percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineSpec:
    """The rules of the order Deadline. It may be left out as a whole, so its defaults are those of the CRD."""

    utility: str = "Equal"
    eta_percent: int = 75
    patience_seconds: int = 30
    drop: str = "Certain"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    policy: str = "iteration"
    rra: RraSpec | None = None
    order: str
    deadline: DeadlineSpec = DeadlineSpec()  # counts under the order Deadline only
    max_batch_size: int = 16
    kv_slots: int | None = None
    max_batch_tokens: int | None = None
    prefetch: int
    prefix_cache: bool
    prefix_charge: str
    resources: ResourcesSpec
    pod_patch: Mapping[str, Any] = field(default_factory=dict)
    pod_patch_remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """The Service of the API. None leaves a field to the API server."""

    type: str
    load_balancer_class: str | None = None
    external_traffic_policy: str | None = None
    ip_family_policy: str
    ip_families: tuple[str, ...] = ()
    labels: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSpec:
    class_name: str | None = None
    host: str | None = None
    tls_secret_name: str | None = None
    annotations: Mapping[str, Any] = field(default_factory=dict)
    wait_for_address: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTimeoutsSpec:
    """None leaves a timeout out of the route; 0 sets no limit."""

    request_seconds: int | None = None
    backend_request_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRouteSpec:
    parent_refs: tuple[Mapping[str, Any], ...]
    timeouts: RouteTimeoutsSpec
    hostnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSpec:
    connections: int
    calls_per_key: int | None = None
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    replicas: int
    autoscaled: bool
    drain_seconds: int
    api_keys_secret: SecretKey | None = None
    open_to_all: bool
    service: ServiceSpec
    ingress: IngressSpec | None = None
    http_route: HttpRouteSpec | None = None
    limits: LimitsSpec
    cors_origins: tuple[str, ...] = ()
    prefix_sharing: str
    slo_enforce: bool
    resources: ResourcesSpec
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    pod_patch: Mapping[str, Any] = field(default_factory=dict)
    pod_patch_remove: tuple[str, ...] = ()


REDIS = "redis"
"""Name of the container of a managed pool."""
REDIS_VOLUME, REDIS_FOLDER = "data", "/data"
"""Volume of a managed pool, and the folder of the container in which Redis keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedPoolSpec:
    """The Redis that the operator runs. It may be left out as a whole, so its defaults are those of the CRD."""

    storage_gib: int = 8
    storage_class_name: str | None = None
    fsync: str = "everysec"
    memory_mib: int = 1536

    @property
    def least_limit(self) -> str:
        """The memory that Redis may take, as a quantity; a rule of the CRD has the same formula.

        A quarter comes on top of what Redis fills: pages that change while a child process rewrites the append-only
        file exist twice, and freed memory leaves gaps. The rest is for the process itself and its connections.
        """
        return f"{self.memory_mib * 5 // 4 + 64}Mi"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalPoolSpec:
    url_secret: SecretKey
    min_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    managed: ManagedPoolSpec = ManagedPoolSpec()
    external: ExternalPoolSpec | None = None
    max_queued: int
    retention_seconds: int
    resources: ResourcesSpec
    pod_patch: Mapping[str, Any] = field(default_factory=dict)
    pod_patch_remove: tuple[str, ...] = ()

    @property
    def patched_resources(self) -> ResourcesSpec:
        """Requests and limits that podPatch gives to the container of Redis."""
        containers = self.pod_patch.get("spec", {}).get("containers")
        patches = [each for each in containers if isinstance(each, Mapping)] if isinstance(containers, list) else []
        given = next((each.get("resources") for each in patches if each.get("name") == REDIS), None)
        amounts = given if isinstance(given, Mapping) else {}
        found = {key: amounts[key] for key in ("requests", "limits") if isinstance(amounts.get(key), Mapping)}
        return ResourcesSpec(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSpec:
    resources: ResourcesSpec
    pod_patch: Mapping[str, Any] = field(default_factory=dict)
    pod_patch_remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatesSpec:
    """The certificate of the links between scheduler and stages."""

    secret_name: str | None = None  # None: the operator makes and renews it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccountSpec:
    name: str | None = None  # None: the operator makes one
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSpec:
    topology_key: str  # empty for no preference


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMetadataSpec:
    """Labels and annotations of all objects but pods."""

    labels: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesSpec:
    """Images that replace those of the operator's release; None takes the release's."""

    gateway: str | None = None
    scheduler: str | None = None
    worker: str | None = None
    pool: str | None = None
    fetch: str | None = None
    pull_policy: str
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    model: ModelSpec
    parallelism: ParallelismSpec
    slo: SloSpec | None = None
    replicas: int
    worker: WorkerSpec
    scheduler: SchedulerSpec
    gateway: GatewaySpec
    pool: PoolSpec
    fetch: FetchSpec
    certificates: CertificatesSpec
    rollout: RolloutSpec
    drain_seconds: int
    startup_seconds: int
    metric_names: tuple[str, ...]
    suspend: bool
    deletion_policy: str
    service_account: ServiceAccountSpec
    spread: SpreadSpec
    object_metadata: ObjectMetadataSpec
    images: ImagesSpec

    @property
    def wanted_groups(self) -> int:
        return 0 if self.suspend else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConstraints:
    """The given ones of the fields that a plan may decide. None: omitted, so the plan is free."""

    stages: int | None = None
    tensor: int | None = None
    stage_layers: tuple[int, ...] | None = None
    policy: str | None = None
    max_batch_size: int | None = None

    def describe(self) -> str:
        """Return the constraints in a few words; empty if there are none."""
        layers = self.stage_layers and "[" + ", ".join(map(str, self.stage_layers)) + "]"
        found = {"stages": self.stages, "tensor": self.tensor, "stageLayers": layers, "policy": self.policy}
        found["maxBatchSize"] = self.max_batch_size
        return ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaDeployment:
    """One OrcaDeployment."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: DeploymentSpec
    constraints: ShapeConstraints = ShapeConstraints()

    @property
    def account(self) -> str:
        """The name of the ServiceAccount of all pods."""
        return self.spec.service_account.name or self.name

    @property
    def owner_reference(self) -> Json:
        """The owner reference by which the cluster deletes a child when this resource is gone."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }


def read(body: Mapping[str, Any]) -> OrcaDeployment:
    """Read an OrcaDeployment from the API server's JSON.

    Raises: BadSpec if it cannot be served as written.
    """
    metadata = body["metadata"]
    spec = _record(DeploymentSpec, body["spec"], "spec")
    _check(spec)
    return OrcaDeployment(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=int(metadata["generation"]),
        spec=spec,
        constraints=_read_constraints(body["spec"]),
    )


def _read_constraints(spec: Mapping[str, Any]) -> ShapeConstraints:
    shape, layers = spec["parallelism"], spec["parallelism"].get("stageLayers")
    return ShapeConstraints(
        stages=shape.get("stages"),
        tensor=shape.get("tensor"),
        stage_layers=None if layers is None else tuple(layers),
        policy=spec["scheduler"].get("policy"),
        max_batch_size=spec["scheduler"].get("maxBatchSize"),
    )


GATEWAY_LEAVE_S = 5
"""A gateway that was told to end still serves for this long, until nobody sends it new calls: endpoints, kube-proxy and
ingress controllers learn of its end one after another. Then its drainSeconds begin."""

_GRACE = "terminationGracePeriodSeconds"


def _check(spec: DeploymentSpec) -> None:
    """Check what the rules of the CRD cannot."""
    _check_patch("worker", spec.worker, container="stage")
    _check_patch("scheduler", spec.scheduler, container="scheduler")
    _check_patch("gateway", spec.gateway, container="gateway")
    _check_patch("pool", spec.pool, container=REDIS)
    _check_patch("fetch", spec.fetch, container="fetch")
    if spec.slo is not None and spec.slo.workload.lengths is not None:
        _check_lengths(spec.slo.workload.lengths)
    if spec.gateway.http_route is not None:
        _check_parents(spec.gateway.http_route)
    _check_grace(spec.gateway)
    if spec.pool.external is None:
        _check_pool_storage(spec.pool)
        _check_pool_memory(spec.pool)


_Role = WorkerSpec | SchedulerSpec | GatewaySpec | PoolSpec | FetchSpec


def _check_patch(field: str, role: _Role, *, container: str) -> None:
    """Args: field: of the role in the spec. container: the operator's in the role's pods."""
    # Redis reads no variables.
    variables = None if container == REDIS else f"ORCA_{field.upper()}"
    patch, remove = role.pod_patch, role.pod_patch_remove
    for problem in patch_rules.find_problems(patch, remove, container=container, variables=variables, domain=GROUP):
        raise BadSpec(f"{field}.{problem}")


def _check_lengths(lengths: str) -> None:
    if (problem := find_problem(lengths)) is not None:
        raise BadSpec(f"slo.workload.lengths: {problem}")


def _check_parents(route: HttpRouteSpec) -> None:
    """Refuse parents that the Gateway API refuses: those of one Gateway must each name another listener.

    As a rule of the CRD this would exceed the cost that an API server allows for a rule.
    """
    parents = Counter((each["name"], each.get("namespace")) for each in route.parent_refs)
    listeners = Counter((each["name"], each.get("namespace"), each.get("sectionName")) for each in route.parent_refs)
    for name, namespace, section in listeners:
        if parents[name, namespace] > 1 and (section is None or listeners[name, namespace, section] > 1):
            raise BadSpec(f"gateway.httpRoute.parentRefs: {name} appears twice; give each its own sectionName")


def _check_grace(gateway: GatewaySpec) -> None:
    """Refuse a grace period in which a gateway could not finish the answers that it is still sending."""
    least = GATEWAY_LEAVE_S + gateway.drain_seconds
    is_removed = f"/spec/{_GRACE}" in gateway.pod_patch_remove
    grace = gateway.pod_patch.get("spec", {}).get(_GRACE, None if is_removed else least)
    field = f"gateway.podPatch: {_GRACE} {'null' if grace is None else repr(grace)}"
    if grace is None:
        field = f"gateway.podPatchRemove: no {_GRACE}" if is_removed else field
        raise BadSpec(f"{field} means Kubernetes' default of 30 s, but a gateway may take {least} s to end")
    if not isinstance(grace, int):
        raise BadSpec(f"{field} is not a whole number")
    if grace < least:
        raise BadSpec(
            f"{field} is less than the {least} s that a gateway may take to end (gateway.drainSeconds and"
            f" {GATEWAY_LEAVE_S} s before them): open answers would be cut off"
        )


def _check_pool_storage(pool: PoolSpec) -> None:
    """Refuse a patch with which Redis would begin without the requests that the pool has accepted."""
    patch, remove = pool.pod_patch, pool.pod_patch_remove
    storage = {"container": REDIS, "volume": REDIS_VOLUME, "folder": REDIS_FOLDER}
    for problem in patch_rules.find_other_storage(patch, remove, **storage):
        raise BadSpec(f"pool.{problem}")


def _check_pool_memory(pool: PoolSpec) -> None:
    """Refuse a limit under which Redis would be killed, again and again, when it has filled its memory.

    The CRD has the same rule. It cannot see a limit in podPatch.
    """
    given, patched = (each.limits.get("memory") for each in (pool.resources, pool.patched_resources))
    limit, place = (given, "resources.limits.memory") if patched is None else (patched, "podPatch: the memory limit")
    least, memory_mib = pool.managed.least_limit, pool.managed.memory_mib
    if limit is not None and is_less(limit, least):
        raise BadSpec(
            f"pool.{place} {limit} is less than the {least} that Redis may take when it has filled its {memory_mib} MiB"
            "; raise the limit, or lower pool.managed.memoryMiB"
        )


def json_name(record_field: "dataclasses.Field[Any]") -> str:
    """Return the schema's name of a field: `storage_class_name` is storageClassName, `size_gib` is sizeGiB."""
    if "name" in record_field.metadata:
        return str(record_field.metadata["name"])
    camel = re.sub(r"_([a-z])", lambda match: match[1].upper(), record_field.name)
    return re.sub(r"Gib$", "GiB", re.sub(r"Mib$", "MiB", camel))


def _record(kind: type[R], value: Mapping[str, Any], path: str) -> R:
    """Read a record of `kind` from its JSON. An absent field takes the record's default.

    Raises: BadSpec if a field is missing, since the CRD in force is older or newer than this operator.
    """
    hints = typing.get_type_hints(kind)
    found = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = json_name(each)
        if value.get(name) is not None:
            found[each.name] = _value(hints[each.name], value[name], f"{path}.{name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise BadSpec(
                f"{path}.{name} is missing: the CRD in this cluster and the operator are of different releases"
            )
    return kind(**found)


def _value(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type[Any], hint), value, path)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return value
