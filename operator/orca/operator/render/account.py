"""The account of a deployment's pods. It gives them no token: it is there to be named, by policies and pull secrets."""

from orca.operator.domain.resource import Deployment, Json
from orca.operator.render.objects import metadata

ROLE = "account"


def service_account(deployment: Deployment) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(deployment, deployment.name, ROLE),
        "automountServiceAccountToken": False,
    }
