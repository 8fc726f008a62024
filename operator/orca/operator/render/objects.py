"""How every object of a deployment is named and marked, and how its pods of one role are found."""

from collections.abc import Mapping

from orca.operator.domain import names
from orca.operator.domain.resource import Deployment, Json


def metadata(deployment: Deployment, name: str, role: str, more: Mapping[str, str] | None = None) -> Json:
    """Args: more: labels beside those that all objects have."""
    return {"name": name, "namespace": deployment.namespace, "labels": names.labels(deployment.name, role, more)}


def selector(deployment: Deployment, role: str) -> dict[str, str]:
    """Labels that this deployment's pods of a role have, and no others."""
    return {names.DEPLOYMENT_LABEL: deployment.name, names.ROLE_LABEL: role}
