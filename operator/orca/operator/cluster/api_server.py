"""Everything that the operator asks of the API server: objects, their changes, the status of a resource, and a Lease.

Objects are changed by server-side apply under one field manager. So fields that others set beside them stay, and a
repeated write changes nothing. Only a Lease is replaced as a whole, in the version that was read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from orca.operator.cluster.api_calls import CALL_S, ApiCalls, ApiServerError, no_bound
from orca.operator.domain import names
from orca.operator.domain.objects import Subject, controllers, label_map
from orca.operator.domain.resource import GROUP, KIND, PLURAL, VERSION, Json, OrcaDeployment


@dataclass(frozen=True, slots=True)
class ResourceKind:
    api: str  # `api/v1` or `apis/<group>/<version>`
    plural: str
    is_optional: bool = False  # an API that a cluster may not have

    @property
    def api_version(self) -> str:
        return self.api.partition("/")[2]


KINDS: Mapping[str, ResourceKind] = {
    "Pod": ResourceKind("api/v1", "pods"),
    "Service": ResourceKind("api/v1", "services"),
    "ConfigMap": ResourceKind("api/v1", "configmaps"),
    "ServiceAccount": ResourceKind("api/v1", "serviceaccounts"),
    "Secret": ResourceKind("api/v1", "secrets"),
    "PersistentVolumeClaim": ResourceKind("api/v1", "persistentvolumeclaims"),
    "Deployment": ResourceKind("apis/apps/v1", "deployments"),
    "StatefulSet": ResourceKind("apis/apps/v1", "statefulsets"),
    "Job": ResourceKind("apis/batch/v1", "jobs"),
    "PodDisruptionBudget": ResourceKind("apis/policy/v1", "poddisruptionbudgets"),
    "Ingress": ResourceKind("apis/networking.k8s.io/v1", "ingresses"),
    "NetworkPolicy": ResourceKind("apis/networking.k8s.io/v1", "networkpolicies"),
    "HTTPRoute": ResourceKind("apis/gateway.networking.k8s.io/v1", "httproutes", is_optional=True),
}
"""Kinds of children. All of them are namespaced."""

_ALL: Mapping[str, str] = {}
_CREATE = {"fieldManager": names.MANAGER}
_APPLY = {"fieldManager": names.MANAGER, "force": "true"}
_ANNOTATE = {"fieldManager": names.MARKER, "force": "true"}


class Cluster:
    """The objects of OrcaDeployments, as the API server keeps them.

    Raises: ApiServerError, from every method.
    """

    def __init__(
        self, api: client.ApiClient, *, call_s: float = CALL_S, write_s: Callable[[], float] = no_bound
    ) -> None:
        """Args: as of ApiCalls."""
        self.calls = ApiCalls(api, call_s=call_s, write_s=write_s)

    @property
    def write_s(self) -> float:
        """Seconds that a write which begins now may take, here or elsewhere on behalf of a resource; 0 for none."""
        return self.calls.write_s

    def deployment(self, namespace: str, name: str) -> Json | None:
        """Return an OrcaDeployment as it is now; None if there is none."""
        return self.calls.get(_resource_path(namespace, name))

    def deployments(self, namespace: str | None) -> list[Json]:
        """Return all OrcaDeployments of a namespace. Args: namespace: None for the whole cluster."""
        where = "" if namespace is None else f"/namespaces/{namespace}"
        found: list[Json] = self.calls.call("GET", f"/apis/{GROUP}/{VERSION}{where}/{PLURAL}")["items"]
        return found

    def secret(self, namespace: str, name: str) -> Json | None:
        """Return a Secret; None if there is none."""
        return self.calls.get(f"{_folder('Secret', namespace)}/{name}")

    def children(self, namespace: str, name: str) -> list[Json]:
        """Return everything with the label of the OrcaDeployment."""
        found = []
        for kind, resource_kind in KINDS.items():
            query = {"labelSelector": names.selector(name)}
            found += self._list(_folder(kind, namespace), kind, resource_kind, query)
        return found

    def nodes(self) -> list[Json]:
        """Return all nodes. Raises: ApiServerError with status 403 if the operator may see one namespace only."""
        return self._list("/api/v1/nodes", "Node", ResourceKind("api/v1", "nodes"))

    def apply_new(self, manifest: Mapping[str, Any]) -> Json:
        """Apply an object that is not there yet. Raises: ApiServerError 409 if somebody else has one of this name."""
        there = self.calls.get(_path_of(manifest))
        if there is not None:
            _check_is_ours(manifest, there)
        return self.apply(manifest)

    def apply(self, manifest: Mapping[str, Any], *, manager: str = names.MANAGER) -> Json:
        """Apply an object. Args: manager: field manager. Returns: the object as it is now."""
        query = {**_APPLY, "fieldManager": manager}
        made: Json = self.calls.call("PATCH", _path_of(manifest), manifest, query=query)
        return made

    def create(self, manifest: Mapping[str, Any]) -> Json:
        """Create an object, unless it exists. Returns: the object as it is now.

        Raises: ApiServerError 409 if somebody else has one of this name.
        """
        folder = _folder(manifest["kind"], manifest["metadata"]["namespace"])
        try:
            made: Json = self.calls.call("POST", folder, manifest, query=_CREATE)
        except ApiServerError as error:
            if error.status != 409:
                raise
            made = self.calls.call("GET", _path_of(manifest))
            _check_is_ours(manifest, made)
        return made

    def annotate(self, kind: str, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Annotate an object, unless it is gone or another object has its name by now.

        The field manager is another one than that of `apply`: each would take from the object what it does not write.
        """
        metadata = {"name": name, "namespace": namespace, "uid": uid, "annotations": dict(annotations)}
        manifest = {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": metadata}
        try:
            self.calls.call("PATCH", _path_of(manifest), manifest, query=_ANNOTATE)
        except ApiServerError as error:
            if error.status not in (404, 409):
                raise

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, is_forced: bool = False) -> None:
        """Delete an object, unless it is gone or another object has its name by now."""
        body: Json = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if is_forced:
            body["gracePeriodSeconds"] = 0
        try:
            self.calls.call("DELETE", f"{_folder(kind, namespace)}/{name}", body)
        except ApiServerError as error:
            if error.status not in (404, 409):
                raise

    def write_status(self, namespace: str, name: str, status: Json) -> None:
        """Write the status of an OrcaDeployment, unless that is gone."""
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": status,
        }
        path = f"{_resource_path(namespace, name)}/status"
        try:
            self.calls.call("PATCH", path, body, query=_APPLY)
        except ApiServerError as error:
            if error.status != 404:
                raise

    def record_event(
        self, about: Subject | OrcaDeployment, reason: str, message: str, *, is_warning: bool, now: str
    ) -> None:
        """Record an Event on an OrcaDeployment. Args: now: RFC 3339."""
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{about.name}.", "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
            "reason": reason,
            "message": message[:1000],
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": names.MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self.calls.call("POST", f"/api/v1/namespaces/{about.namespace}/events", event)

    def _list(self, path: str, kind: str, resource_kind: ResourceKind, query: Mapping[str, str] = _ALL) -> list[Json]:
        try:
            items = self.calls.call("GET", path, query=query)["items"]
        except ApiServerError as error:
            if error.status == 404 and resource_kind.is_optional:
                return []
            raise
        # Items of a list lack their own apiVersion and kind.
        return [{**item, "apiVersion": resource_kind.api_version, "kind": kind} for item in items]


class Leases:
    """Leases, as the API server keeps them. Raises: ApiServerError, from every method."""

    def __init__(self, api: client.ApiClient, *, call_s: float) -> None:
        """Args: as of ApiCalls."""
        self._calls = ApiCalls(api, call_s=call_s)

    def read(self, namespace: str, name: str) -> Json | None:
        """Return a Lease; None if there is none."""
        return self._calls.get(f"{_leases_path(namespace)}/{name}")

    def create(self, lease: Json) -> Json:
        """Raises: ApiServerError 409 if there is one."""
        made: Json = self._calls.call("POST", _leases_path(lease["metadata"]["namespace"]), lease)
        return made

    def replace(self, lease: Json) -> Json:
        """Raises: ApiServerError 409 if it has changed since it was read."""
        metadata = lease["metadata"]
        made: Json = self._calls.call("PUT", f"{_leases_path(metadata['namespace'])}/{metadata['name']}", lease)
        return made


def _check_is_ours(manifest: Mapping[str, Any], there: Json) -> None:
    """Raises: ApiServerError 409 if an object of this name does not belong to the resource that we write it for."""
    label = names.DEPLOYMENT_LABEL
    if label_map(there).get(label) != label_map(manifest).get(label) or controllers(there) - controllers(manifest):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        raise ApiServerError(
            409,
            f"{kind} {name} exists already and does not belong to this resource; delete or rename that {kind}, or give"
            " this resource another name",
        )


def _folder(kind: str, namespace: str) -> str:
    """Return the path of all objects of a kind."""
    resource_kind = KINDS[kind]
    return f"/{resource_kind.api}/namespaces/{namespace}/{resource_kind.plural}"


def _path_of(manifest: Mapping[str, Any]) -> str:
    metadata = manifest["metadata"]
    return f"{_folder(manifest['kind'], metadata['namespace'])}/{metadata['name']}"


def _resource_path(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"


def _leases_path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
