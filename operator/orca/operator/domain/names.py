"""Names and labels of everything that belongs to an OrcaDeployment: they follow from its own name, and are built here.

shop                       Service, Ingress or HTTPRoute of the API; ServiceAccount of all pods
shop-gateway               Deployment, PodDisruptionBudget
shop-<role>                NetworkPolicy of the pods of a role
shop-schedule              ConfigMap of what schedulers follow while they run
shop-api-key               Secret of the key that was made, where none was given
shop-certificates          Secret of what schedulers and stages show each other
shop-pool                  StatefulSet, Service, PersistentVolumeClaim, Secret of the managed Redis
shop-model-<digest>        Job and PersistentVolumeClaim of a fetched model
shop-3fa91c02-0            Service and StatefulSet of group 0 of the revision 3fa91c02; its pods are stages
shop-3fa91c02-0-scheduler  Service and StatefulSet of the group's scheduler
"""

from collections.abc import Mapping
from typing import Any

from orca.operator.domain.resource import GROUP

MANAGER = "orca-operator"
"""Field manager of every server-side apply."""

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
ROLE_LABEL = f"{GROUP}/role"
GROUP_LABEL = f"{GROUP}/group"
REVISION_LABEL = f"{GROUP}/revision"
HASH_LABEL = f"{GROUP}/hash"
MODEL_LABEL = f"{GROUP}/model"
"""Of schedulers: digest of what the spec says about the model. Of fetches: of where it comes from."""
GENERATION_LABEL = f"{GROUP}/generation"
"""Of schedulers: number of the model's revision."""

SCHEDULE_ANNOTATION = f"{GROUP}/schedule"
"""Of scheduler pods: hash of the ConfigMap that they should have by now. A kubelet brings a changed ConfigMap to a pod
when it next looks at the pod, which may take a minute; a changed annotation makes it look at once."""

PAUSE_ANNOTATION = f"{GROUP}/pause"
"""Of the StatefulSets of stages: JSON of pauses.Pause, while the group has given way or has not served since."""

USERS_ANNOTATION = f"{GROUP}/users"
"""Of the pool's pod: digest of the file of users that Redis has read at its start."""

API_KEYS_FILE = "keys"
"""Key of a made Secret that holds the file of hashed keys; `key` beside it holds the key itself, for people."""


def gateway(name: str) -> str:
    return f"{name}-gateway"


def schedule(name: str) -> str:
    return f"{name}-schedule"


def pool(name: str) -> str:
    return f"{name}-pool"


def certificates(name: str) -> str:
    return f"{name}-certificates"


def policy(name: str, role: str) -> str:
    return f"{name}-{role}"


def api_key(name: str) -> str:
    return f"{name}-api-key"


def group(name: str, revision: str, ordinal: int) -> str:
    """Args: revision: 8 hex digits. At most 28 + 1 + 8 + 1 + 4 characters: with `-scheduler`
    behind it that is 52, beyond which a StatefulSet cannot label its pods."""
    return f"{name}-{revision}-{ordinal}"


def scheduler(group_name: str) -> str:
    return f"{group_name}-scheduler"


def model(name: str, digest: str) -> str:
    return f"{name}-model-{digest}"


def ordinal(group_name: str) -> int:
    """Of a name that `group` built."""
    return int(group_name.rpartition("-")[2])


def labels(name: str, role: str, more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Of an object and of the pods that it makes."""
    return {
        "app.kubernetes.io/name": "orca",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": MANAGER,
        DEPLOYMENT_LABEL: name,
        ROLE_LABEL: role,
        **(more or {}),
    }


def selector(name: str) -> str:
    """Label selector of everything that belongs to an OrcaDeployment."""
    return f"{DEPLOYMENT_LABEL}={name}"
