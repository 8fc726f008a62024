"""An OrcaDeployment as the operator reads it: frozen records in the shape of the CRD's schema.

The API server has checked types, ranges and rules and has filled in defaults before the operator sees a resource, so
the records say neither again. What only a whole look can tell is checked here: `read` refuses it with BadSpec, which
becomes the condition Accepted=False. charts/orca/crd/orcadeployments.yaml says what each field means.
"""

import dataclasses
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

GROUP = "orca-serving.io"
VERSION = "v1alpha1"
PLURAL = "orcadeployments"
KIND = "OrcaDeployment"

Json = dict[str, Any]
R = TypeVar("R")


class BadSpec(Exception):
    """A spec that cannot be served as written; the message is for its author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    size_gib: int
    storage_class_name: str | None = None
    access_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    uri: str
    revision: str | None = None
    endpoint: str | None = None
    served_name: str | None = None
    dtype: str
    quantization: str | None = None
    max_model_len: int | None = None
    token_secret: SecretKey | None = None
    cache: Cache

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.served_name or (self.uri.partition("://")[2] if self.is_on_hub else self.uri.rpartition("/")[2])

    @property
    def scheme(self) -> str:
        return self.uri.partition("://")[0]

    @property
    def is_on_hub(self) -> bool:
        return self.scheme == "hf"

    @property
    def is_fetched(self) -> bool:
        """Whether a Job brings it into a volume of ours."""
        return self.scheme in ("hf", "s3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    stages: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    requests: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaResource:
    name: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    device: str
    threads: int
    memory_share_percent: int
    resources: Resources
    network_interface: str | None = None
    host_network: bool
    rdma_resource: RdmaResource | None = None
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    runtime_class_name: str | None = None
    shared_memory_mib: int
    pod_patch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    policy: str
    max_batch_size: int
    kv_slots: int | None = None
    max_batch_tokens: int | None = None
    prefetch: int
    resources: Resources
    pod_patch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingress:
    class_name: str | None = None
    host: str | None = None
    tls_secret_name: str | None = None
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    parent_refs: tuple[Mapping[str, Any], ...]
    hostnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connections: int
    calls_per_key: int | None = None
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    replicas: int
    drain_seconds: int
    api_keys_secret: SecretKey | None = None
    open_to_all: bool
    ingress: Ingress | None = None
    http_route: HttpRoute | None = None
    limits: Limits
    slo_enforce: bool
    resources: Resources
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    pod_patch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedPool:
    """The one record that may be left out whole; its defaults are the CRD's (a test compares them)."""

    storage_gib: int = 8
    storage_class_name: str | None = None
    fsync: str = "everysec"
    memory_mib: int = 1536


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalPool:
    url_secret: SecretKey
    min_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    managed: ManagedPool = ManagedPool()
    external: ExternalPool | None = None
    max_queued: int
    retention_seconds: int
    resources: Resources
    pod_patch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Between scheduler and stages; None has them made and renewed."""

    secret_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """None takes the operator's own release."""

    gateway: str | None = None
    scheduler: str | None = None
    worker: str | None = None
    pool: str | None = None
    fetch: str | None = None
    pull_policy: str
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    model: Model
    parallelism: Parallelism
    replicas: int
    worker: Worker
    scheduler: Scheduler
    gateway: Gateway
    pool: Pool
    certificates: Certificates
    rollout: Rollout
    drain_seconds: int
    startup_seconds: int
    suspend: bool
    deletion_policy: str
    images: Images

    @property
    def wanted_groups(self) -> int:
        return 0 if self.suspend else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One OrcaDeployment."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec

    @property
    def owner_reference(self) -> Json:
        """What makes the cluster delete a child when this resource is gone."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }


def read(body: Mapping[str, Any]) -> Deployment:
    """From the API server's JSON.

    Raises: BadSpec when it cannot be served as written.
    """
    metadata = body["metadata"]
    spec = _record(Spec, body["spec"], "spec")
    _check(spec)
    return Deployment(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=int(metadata["generation"]),
        spec=spec,
    )


GATEWAY_LEAVE_S = 5
"""A gateway that ends serves on for so long, until nobody sends it new calls any more: endpoints, kube-proxy and
ingress controllers learn of its end one after another. Then its drainSeconds begin."""

_CONTAINERS = {"worker": "stage", "scheduler": "scheduler", "gateway": "gateway", "pool": "pool"}
"""Role in the spec -> name of its container."""


def _check(spec: Spec) -> None:
    """What the rules of the CRD do not see."""
    for role in ("worker", "scheduler", "gateway", "pool"):
        patch = getattr(spec, role).pod_patch
        if unknown := set(patch) - {"metadata", "spec"}:
            raise BadSpec(f"{role}.podPatch: {sorted(unknown)[0]} is no field of a pod template (metadata, spec)")
        if bad := [name for name, value in patch.items() if not isinstance(value, Mapping)]:
            raise BadSpec(f"{role}.podPatch.{bad[0]} is not an object")
        _check_words(role, patch)
    if spec.gateway.http_route is not None:
        _check_parents(spec.gateway.http_route)
    _check_grace(spec.gateway)


def _check_words(role: str, patch: Mapping[str, Any]) -> None:
    """The operator reads back from its pods what they were told."""
    containers = patch.get("spec", {}).get("containers")
    for container in containers if isinstance(containers, list) else ():
        own = isinstance(container, Mapping) and container.get("name") == _CONTAINERS[role]
        if own and (words := container.keys() & {"args", "command"}):
            raise BadSpec(
                f"{role}.podPatch: {min(words)} of the container {_CONTAINERS[role]} are the operator's;"
                f" settings that the resource has no field for go into its env, as ORCA_{role.upper()}_NAME"
            )


def _check_parents(route: HttpRoute) -> None:
    """The Gateway API wants those of one Gateway to name its listeners, each once. As a rule of the CRD this would cost
    more than an API server lets a rule cost."""
    parents = Counter((each["name"], each.get("namespace")) for each in route.parent_refs)
    listeners = Counter((each["name"], each.get("namespace"), each.get("sectionName")) for each in route.parent_refs)
    for name, namespace, section in listeners:
        if parents[name, namespace] > 1 and (section is None or listeners[name, namespace, section] > 1):
            raise BadSpec(f"gateway.httpRoute.parentRefs: {name} is there twice without a sectionName of its own each")


def _check_grace(gateway: Gateway) -> None:
    """A gateway that is ended before its time cuts the answers that it still sends."""
    patched, least = gateway.pod_patch.get("spec", {}), GATEWAY_LEAVE_S + gateway.drain_seconds
    grace = patched.get("terminationGracePeriodSeconds", least)
    field = f"gateway.podPatch: terminationGracePeriodSeconds {'null' if grace is None else repr(grace)}"
    if grace is None:
        raise BadSpec(f"{field} leaves Kubernetes' own 30 s, and a gateway may take {least} s to end")
    if not isinstance(grace, int):
        raise BadSpec(f"{field} is not a whole number")
    if grace < least:
        raise BadSpec(
            f"{field} is less than the {least} s that a gateway may take to end, gateway.drainSeconds and"
            f" {GATEWAY_LEAVE_S} s before them: open answers would be cut"
        )


def json_name(of: "dataclasses.Field[Any]") -> str:
    """`storage_class_name` as the schema writes it: storageClassName, and GiB where a unit is meant."""
    if "name" in of.metadata:
        return str(of.metadata["name"])
    camel = re.sub(r"_([a-z])", lambda match: match[1].upper(), of.name)
    return re.sub(r"Gib$", "GiB", re.sub(r"Mib$", "MiB", camel))


def _record(kind: type[R], value: Mapping[str, Any], path: str) -> R:
    """A record of `kind` from its JSON. A field that is absent takes the record's default.

    Raises: BadSpec where the schema in force is older or newer than this operator and a field is missing.
    """
    hints = typing.get_type_hints(kind)
    found = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = json_name(each)
        if value.get(name) is not None:
            found[each.name] = _value(hints[each.name], value[name], f"{path}.{name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise BadSpec(f"{path}.{name} is missing: the CRD in this cluster is of another release than the operator")
    return kind(**found)


def _value(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type[Any], hint), value, path)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return value
