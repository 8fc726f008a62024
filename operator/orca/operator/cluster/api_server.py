"""The API server, as far as the operator needs it: list, apply, create, delete, the status of a resource, and a Lease.

What is there is changed by server-side apply under one field manager, so what others set beside it stays and a repeated
write changes nothing; only a Lease is replaced whole, in the version that was read. Calls block; whoever has an event
loop makes them in a thread.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from orca.operator.domain import names
from orca.operator.domain.observed import controllers, label_map
from orca.operator.domain.resource import GROUP, KIND, PLURAL, VERSION, Deployment, Json

CALL_S = 20.0
"""Bound on one call."""


@dataclass(frozen=True, slots=True)
class Kind:
    api: str  # `api/v1` or `apis/<group>/<version>`
    plural: str
    is_optional: bool = False  # an API that a cluster may not have

    @property
    def api_version(self) -> str:
        return self.api.partition("/")[2]


KINDS: Mapping[str, Kind] = {
    "Pod": Kind("api/v1", "pods"),
    "Service": Kind("api/v1", "services"),
    "ConfigMap": Kind("api/v1", "configmaps"),
    "ServiceAccount": Kind("api/v1", "serviceaccounts"),
    "Secret": Kind("api/v1", "secrets"),
    "PersistentVolumeClaim": Kind("api/v1", "persistentvolumeclaims"),
    "Deployment": Kind("apis/apps/v1", "deployments"),
    "StatefulSet": Kind("apis/apps/v1", "statefulsets"),
    "Job": Kind("apis/batch/v1", "jobs"),
    "PodDisruptionBudget": Kind("apis/policy/v1", "poddisruptionbudgets"),
    "Ingress": Kind("apis/networking.k8s.io/v1", "ingresses"),
    "NetworkPolicy": Kind("apis/networking.k8s.io/v1", "networkpolicies"),
    "HTTPRoute": Kind("apis/gateway.networking.k8s.io/v1", "httproutes", is_optional=True),
}
"""Of which children are made; all of them are namespaced."""


class ApiError(Exception):
    """The API server did not do what it was asked; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        """Args: status: of HTTP; 0 when there was no answer."""
        super().__init__(message)
        self.status = status

    @property
    def is_answer(self) -> bool:
        """Whether the API server is there, and said no to this one call."""
        return self.status != 0

    @property
    def is_refusal(self) -> bool:
        """Whether it would say the same again: a right, a quota, an admission, not the load or a fault of its own."""
        return 400 <= self.status < 500 and self.status != 429


class Cluster:
    """Raises: ApiError, from every method."""

    def __init__(
        self, api: client.ApiClient, *, call_s: float = CALL_S, write_s: Callable[[], float] = lambda: math.inf
    ) -> None:
        """
        Args:
            api: without retries of its own, which would go on after a bound.
            call_s: bound on one call.
            write_s: asked before each write: seconds that it may take; 0 when it must not be sent.
        """
        self._api = api
        self._call_s = call_s
        self._write_s = write_s

    @property
    def write_s(self) -> float:
        """Seconds that a write which begins now may take, here or on behalf of a resource elsewhere; 0 for none."""
        return min(self._call_s, self._write_s())

    def deployment(self, namespace: str, name: str) -> Json | None:
        """An OrcaDeployment as it is now; None when there is none."""
        return self._get(_resource_path(namespace, name))

    def deployments(self, namespaces: Sequence[str]) -> list[Json]:
        """All OrcaDeployments. Args: namespaces: none for those of the whole cluster."""
        base = f"/apis/{GROUP}/{VERSION}"
        paths = [f"{base}/namespaces/{namespace}/{PLURAL}" for namespace in namespaces] or [f"{base}/{PLURAL}"]
        return [each for path in paths for each in self._call("GET", path)["items"]]

    def secret(self, namespace: str, name: str) -> Json | None:
        """None when there is none."""
        return self._get(f"{_folder('Secret', namespace)}/{name}")

    def children(self, namespace: str, name: str) -> list[Json]:
        """Everything that bears the label of the OrcaDeployment."""
        found = []
        for kind, of in KINDS.items():
            found += self._list(_folder(kind, namespace), kind, of, names.selector(name))
        return found

    def lease(self, namespace: str, name: str) -> Json | None:
        """None when there is none."""
        return self._get(f"{_leases_path(namespace)}/{name}")

    def create_lease(self, lease: Json) -> Json:
        """Raises: ApiError 409 where there is one."""
        made: Json = self._call("POST", _leases_path(lease["metadata"]["namespace"]), lease)
        return made

    def replace_lease(self, lease: Json) -> Json:
        """Raises: ApiError 409 when it is not of the version any more that was read."""
        metadata = lease["metadata"]
        made: Json = self._call("PUT", f"{_leases_path(metadata['namespace'])}/{metadata['name']}", lease)
        return made

    def nodes(self) -> list[Json]:
        """Raises: ApiError with status 403 where the operator may see one namespace only."""
        return self._list("/api/v1/nodes", "Node", Kind("api/v1", "nodes"), None)

    def apply_new(self, manifest: Mapping[str, Any]) -> Json:
        """As `apply`, for what is not there yet. Raises: ApiError 409 where somebody else has one of this name."""
        there = self._get(_path_of(manifest))
        label = names.DEPLOYMENT_LABEL
        if there is not None and (
            label_map(there).get(label) != label_map(manifest)[label] or controllers(there) - controllers(manifest)
        ):
            name = manifest["metadata"]["name"]
            raise ApiError(409, f"{manifest['kind']} {name} is there already and is not of this resource")
        return self.apply(manifest)

    def apply(self, manifest: Mapping[str, Any]) -> Json:
        """Returns: what is there now."""
        made: Json = self._call("PATCH", _path_of(manifest), manifest, fieldManager=names.MANAGER, force="true")
        return made

    def create(self, manifest: Mapping[str, Any]) -> Json:
        """Harmless where it exists. Returns: what is there now."""
        folder = _folder(manifest["kind"], manifest["metadata"]["namespace"])
        try:
            made: Json = self._call("POST", folder, manifest, fieldManager=names.MANAGER)
        except ApiError as error:
            if error.status != 409:
                raise
            made = self._call("GET", _path_of(manifest))
        return made

    def annotate_pod(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Harmless where the pod is gone, or is another by now."""
        metadata = {"name": name, "namespace": namespace, "uid": uid, "annotations": dict(annotations)}
        try:
            self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, is_forced: bool = False) -> None:
        """Harmless where it is gone, or another one has its name by now."""
        body: Json = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        if is_forced:
            body["gracePeriodSeconds"] = 0
        try:
            self._call("DELETE", f"{_folder(kind, namespace)}/{name}", body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def write_status(self, namespace: str, name: str, status: Json) -> None:
        """Harmless where the resource is gone."""
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": status,
        }
        path = f"{_resource_path(namespace, name)}/status"
        try:
            self._call("PATCH", path, body, fieldManager=names.MANAGER, force="true")
        except ApiError as error:
            if error.status != 404:
                raise

    def tell(self, deployment: Deployment, reason: str, message: str, *, is_warning: bool, now: str) -> None:
        """An Event on the resource."""
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{deployment.name}.", "namespace": deployment.namespace},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": deployment.name,
                "namespace": deployment.namespace,
                "uid": deployment.uid,
            },
            "reason": reason,
            "message": message[:1000],
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": names.MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._call("POST", f"/api/v1/namespaces/{deployment.namespace}/events", event)

    def _get(self, path: str) -> Json | None:
        try:
            found: Json = self._call("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def _list(self, path: str, kind: str, of: Kind, selector: str | None) -> list[Json]:
        query = {} if selector is None else {"labelSelector": selector}
        try:
            items = self._call("GET", path, **query)["items"]
        except ApiError as error:
            if error.status == 404 and of.is_optional:
                return []
            raise
        # Items of a list do not say what they are.
        return [{**item, "apiVersion": of.api_version, "kind": kind} for item in items]

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        bound_s = self._call_s if method == "GET" else self.write_s
        if bound_s <= 0:
            raise ApiError(0, f"{method} {path}: not sent, as this operator does not hold the Lease")
        is_apply = method == "PATCH"
        content_type = "application/apply-patch+yaml" if is_apply else "application/json"
        params = self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            # JSON is YAML too; the client library writes only what is called JSON itself.
            body=json.dumps(body) if is_apply else body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*params, _request_timeout=bound_s)
            content = response.read()
        except (ApiException, HTTPError, OSError) as error:
            raise ApiError(getattr(error, "status", None) or 0, f"{method} {path}: {error}") from error
        if not 200 <= response.status <= 299:
            raise ApiError(response.status, f"{method} {path}: {_message(content, response.reason)}")
        return json.loads(content)


def _folder(kind: str, namespace: str) -> str:
    """Where all of a kind are."""
    of = KINDS[kind]
    return f"/{of.api}/namespaces/{namespace}/{of.plural}"


def _path_of(manifest: Mapping[str, Any]) -> str:
    metadata = manifest["metadata"]
    return f"{_folder(manifest['kind'], metadata['namespace'])}/{metadata['name']}"


def _resource_path(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"


def _leases_path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def _message(content: bytes, reason: str) -> str:
    try:
        return str(json.loads(content)["message"])
    except (TypeError, ValueError, KeyError):
        return reason
