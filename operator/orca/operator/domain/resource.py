"""An OrcaDeployment as the operator reads it: frozen records in the shape of the CRD's schema.

The API server checks types, ranges and rules and fills in defaults before the operator sees a resource, so the records
repeat neither. `read` checks what no rule of the schema can express, and refuses it with BadSpec, which becomes the
condition Accepted=False. charts/orca/crd/orcadeployments.yaml says what each field means.
"""

import dataclasses
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orca.operator.domain.quantity import is_less

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
class ParallelismSpec:
    stages: int
    tensor: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    policy: str
    max_batch_size: int
    kv_slots: int | None = None
    max_batch_tokens: int | None = None
    prefetch: int
    resources: ResourcesSpec
    pod_patch: Mapping[str, Any] = field(default_factory=dict)


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
    drain_seconds: int
    api_keys_secret: SecretKey | None = None
    open_to_all: bool
    ingress: IngressSpec | None = None
    http_route: HttpRouteSpec | None = None
    limits: LimitsSpec
    cors_origins: tuple[str, ...] = ()
    slo_enforce: bool
    resources: ResourcesSpec
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    pod_patch: Mapping[str, Any] = field(default_factory=dict)


REDIS = "redis"
"""Name of the container of a managed pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedPoolSpec:
    """The only record that may be left out as a whole. Its defaults are those of the CRD; a test compares them."""

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
class CertificatesSpec:
    """The certificate of the links between scheduler and stages."""

    secret_name: str | None = None  # None: the operator makes and renews it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    max_surge: int
    max_unavailable: int


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
    replicas: int
    worker: WorkerSpec
    scheduler: SchedulerSpec
    gateway: GatewaySpec
    pool: PoolSpec
    certificates: CertificatesSpec
    rollout: RolloutSpec
    drain_seconds: int
    startup_seconds: int
    suspend: bool
    deletion_policy: str
    images: ImagesSpec

    @property
    def wanted_groups(self) -> int:
        return 0 if self.suspend else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaDeployment:
    """One OrcaDeployment."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: DeploymentSpec

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
    )


GATEWAY_LEAVE_S = 5
"""A gateway that was told to end still serves for this long, until nobody sends it new calls: endpoints, kube-proxy and
ingress controllers learn of its end one after another. Then its drainSeconds begin."""

_CONTAINERS = {"worker": "stage", "scheduler": "scheduler", "gateway": "gateway", "pool": "pool"}
"""Field of the spec -> name of the container."""


def _check(spec: DeploymentSpec) -> None:
    """Check what the rules of the CRD cannot."""
    for role in ("worker", "scheduler", "gateway", "pool"):
        patch = getattr(spec, role).pod_patch
        if unknown := set(patch) - {"metadata", "spec"}:
            name = sorted(unknown)[0]
            raise BadSpec(f"{role}.podPatch: {name} is not a field of a pod template; give metadata or spec")
        if bad := [name for name, value in patch.items() if not isinstance(value, Mapping)]:
            raise BadSpec(f"{role}.podPatch.{bad[0]} is not an object")
        _check_arguments(role, patch)
        _check_marks(role, patch)
    if spec.gateway.http_route is not None:
        _check_parents(spec.gateway.http_route)
    _check_grace(spec.gateway)
    if spec.pool.external is None:
        _check_pool_memory(spec.pool)


def _check_arguments(role: str, patch: Mapping[str, Any]) -> None:
    """Refuse other arguments than the operator's: its annotations and the pool record what those say."""
    containers = patch.get("spec", {}).get("containers")
    for container in containers if isinstance(containers, list) else ():
        is_own = isinstance(container, Mapping) and container.get("name") == _CONTAINERS[role]
        if is_own and (fields := container.keys() & {"args", "command"}):
            raise BadSpec(
                f"{role}.podPatch: only the operator sets {min(fields)} of the container {_CONTAINERS[role]};"
                f" put settings without a field in this resource into the container's env, as ORCA_{role.upper()}_NAME"
            )


def _check_marks(role: str, patch: Mapping[str, Any]) -> None:
    """Refuse labels and annotations with our prefix: the operator finds its pods by them, and reads facts from them."""
    for kind in ("labels", "annotations"):
        marks = patch.get("metadata", {}).get(kind)
        ours = sorted(key for key in marks if key.startswith(f"{GROUP}/")) if isinstance(marks, Mapping) else []
        if ours:
            raise BadSpec(f"{role}.podPatch.metadata.{kind}: only the operator sets {ours[0]}")


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
    patched, least = gateway.pod_patch.get("spec", {}), GATEWAY_LEAVE_S + gateway.drain_seconds
    grace = patched.get("terminationGracePeriodSeconds", least)
    field = f"gateway.podPatch: terminationGracePeriodSeconds {'null' if grace is None else repr(grace)}"
    if grace is None:
        raise BadSpec(f"{field} means Kubernetes' default of 30 s, but a gateway may take {least} s to end")
    if not isinstance(grace, int):
        raise BadSpec(f"{field} is not a whole number")
    if grace < least:
        raise BadSpec(
            f"{field} is less than the {least} s that a gateway may take to end (gateway.drainSeconds and"
            f" {GATEWAY_LEAVE_S} s before them): open answers would be cut off"
        )


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
