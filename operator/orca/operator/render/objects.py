"""Parts of objects that several renderers need, and the ServiceAccount that all pods share."""

from collections.abc import Mapping

from orca.operator.domain import names
from orca.operator.domain.quantity import is_less
from orca.operator.domain.resource import Json, OrcaDeployment


def metadata(deployment: OrcaDeployment, name: str, role: str, more: Mapping[str, str] | None = None) -> Json:
    """Return the metadata of an object. Args: more: labels beside those that all objects have."""
    return {"name": name, "namespace": deployment.namespace, "labels": names.labels(deployment.name, role, more)}


def selector(deployment: OrcaDeployment, role: str) -> dict[str, str]:
    """Return the labels that this deployment's pods of a role have, and no other pods."""
    return {names.DEPLOYMENT_LABEL: deployment.name, names.ROLE_LABEL: role}


def service_account(deployment: OrcaDeployment) -> Json:
    """Render the account of a deployment's pods. It gives them no token: clouds, policies and pull secrets refer to it.

    It is there also if the spec names another one: pods of old groups may still have it.
    """
    marks = metadata(deployment, deployment.name, names.ACCOUNT)
    if annotations := deployment.spec.service_account.annotations:
        marks["annotations"] = dict(annotations)
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": marks, "automountServiceAccountToken": False}


def claim(metadata: Json, size_gib: int, access_mode: str, storage_class: str | None, there: Json | None) -> Json:
    """Render a PersistentVolumeClaim.

    Args: there: the claim as it is; None if there is none. It keeps what the API server would refuse to change: class
        and access mode, and its size from shrinking. Whether it can grow is up to its class.
    """
    size, modes = f"{size_gib}Gi", [access_mode]
    if there is not None:
        modes, storage_class = there["spec"]["accessModes"], there["spec"].get("storageClassName")
        size_there = there["spec"]["resources"]["requests"]["storage"]
        size = size_there if is_less(size, size_there) else size
    spec: Json = {"accessModes": modes, "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
