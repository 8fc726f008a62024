"""Names, labels, annotations and roles of everything that belongs to an OrcaDeployment.

Every name follows from the name of the OrcaDeployment, and this module alone builds it. Of a resource named `shop`:

shop                       Service, Ingress or HTTPRoute of the API; ServiceAccount of all pods
shop-gateway               Deployment, PodDisruptionBudget
shop-<role>                NetworkPolicy of the pods of a role
shop-schedule              ConfigMap with the batch bounds, which schedulers follow while they run
shop-api-key               Secret of the API key that the operator makes if the spec names none
shop-certificates          Secret of the certificate that schedulers and stages show each other
shop-pool                  StatefulSet, Service, PersistentVolumeClaim and Secret of the managed Redis
shop-model-<digest>        Job and PersistentVolumeClaim of a fetched model
shop-profile-<key>         Job that measures the model for a plan, and ConfigMap with what it measured
shop-plan-<key>            Job that makes a plan for spec.slo, and ConfigMap with the plan
shop-follow-<key>          ConfigMap with the last check of a plan, and the plan that it has put in force
shop-check-<key>-<number>  Job that checks a plan for spec.slo on the lengths of now
shop-3fa91c02-0            Service and StatefulSet of group 0 of the revision 3fa91c02; its pods are stages
shop-3fa91c02-0-scheduler  Service and StatefulSet of the group's scheduler
"""

import re
from collections.abc import Mapping
from typing import Any

from orca.operator.domain.resource import GROUP

MANAGER = "orca-operator"
"""Field manager of the objects that are written as a whole, by server-side apply."""

MARKER = "orca-operator-marks"
"""Field manager of annotations on objects that somebody else writes, or that are written apart from their spec."""

REPLICAS_MANAGER = "orca-operator-replicas"
"""Field manager of the number of gateways, from when the operator leaves it to an autoscaler until that changes it."""

GATEWAY, SCHEDULER, STAGE, POOL, FETCH, ACCOUNT = "gateway", "scheduler", "stage", "pool", "fetch", "account"
PROFILE, PLAN, FOLLOW = "profile", "plan", "follow"
"""Roles of pods, and of the objects that belong to them; ACCOUNT is for the ServiceAccount that all pods share."""

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
ROLE_LABEL = f"{GROUP}/role"
GROUP_LABEL = f"{GROUP}/group"
REVISION_LABEL = f"{GROUP}/revision"
HASH_LABEL = f"{GROUP}/hash"
MODEL_LABEL = f"{GROUP}/model"
"""Digest of what the spec says about the model, on schedulers; of where the model comes from, on fetch Jobs. On results
of Jobs it is that of what decides whether a plan runs with the model (slo/keys.py)."""
GENERATION_LABEL = f"{GROUP}/generation"
"""Generation of the model, on schedulers (observation.ModelVersion)."""

POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
"""Label by which Kubernetes numbers the pods of a StatefulSet."""

SCHEDULE_ANNOTATION = f"{GROUP}/schedule"
"""Hash of the ConfigMap that a scheduler pod should have by now, on the pod. A kubelet brings a changed ConfigMap at
its next sync of the pod, which may take a minute. A changed annotation makes it sync at once."""

PAUSE_ANNOTATION = f"{GROUP}/pause"
"""JSON of group_pauses.Pause, on StatefulSets of stages, from when the group gives way until it serves again."""

OPERATOR_ANNOTATION = f"{GROUP}/operator"
"""NAMESPACE/NAME of the operator that a person chooses for an OrcaDeployment (plan/ownership.py)."""
OPERATOR_FIELD = "operator"
"""Field of the status: NAMESPACE/NAME of the operator that serves an OrcaDeployment."""
OWNER_MANAGER = f"{MANAGER}-owner"
"""Field manager of that field alone, so that no other write of the status sets or removes it."""

USERS_ANNOTATION = f"{GROUP}/users"
"""Digest of the users file that Redis has read at its start, on the pool's pod."""

STAGES_ANNOTATION = f"{GROUP}/stages"
SLOTS_ANNOTATION = f"{GROUP}/slots"
MODELS_ANNOTATION = f"{GROUP}/models"
POOL_ANNOTATION = f"{GROUP}/pool"
"""Facts about what runs: facts.py writes and reads these four."""

KEPT_ANNOTATIONS = {
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
    "argocd.argoproj.io/compare-options": "IgnoreExtraneous",
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
    "helm.sh/resource-policy": "keep",
}
"""Annotations of objects without an owner. They hold what nobody can make again, so tools must not prune them."""

FETCHED_ANNOTATION = f"{GROUP}/fetched"
"""JSON of the model that a fetch has completed in a claim, on that claim: facts.py writes and reads it."""

LOAN_ANNOTATION = f"{GROUP}/devices-lent"
"""Timestamp at which a group began to lend its devices to a Job, on that Job: facts.py writes and reads it."""

_GROUP = re.compile(r".+-[0-9a-f]{8}-[0-9]{1,9}")

API_KEYS_FILE = "keys"
"""Key of a made Secret that holds the file of hashed API keys. `key` beside it holds the API key itself, for people."""


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
    """Name a group. Args: revision: 8 hex digits.

    The name has at most 28 + 1 + 8 + 1 + 4 characters. With `-scheduler` after it that makes 52, and a StatefulSet with
    a longer name cannot label its pods.
    """
    return f"{name}-{revision}-{ordinal}"


def is_group(name: str) -> bool:
    """Return whether a name has the form that `group` builds."""
    return _GROUP.fullmatch(name) is not None


def revision(group_name: str) -> str:
    """Return the revision in a name that `group` built. Unlike the label, nobody can edit a name."""
    return group_name.rsplit("-", 2)[1]


def ordinal(group_name: str) -> int:
    """Return the ordinal in a name that `group` built."""
    return int(group_name.rpartition("-")[2])


def scheduler(group_name: str) -> str:
    return f"{group_name}-scheduler"


def model(name: str, digest: str) -> str:
    return f"{name}-model-{digest}"


def profile(name: str, key: str) -> str:
    return f"{name}-profile-{key}"


def plan(name: str, key: str) -> str:
    return f"{name}-plan-{key}"


def follow(name: str, key: str) -> str:
    return f"{name}-follow-{key}"


def check(name: str, key: str, number: int) -> str:
    """Name a check of a plan. Args: number: of the check, from 1 on."""
    return f"{name}-check-{key}-{number}"


def labels(name: str, role: str, more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the labels of an object, which are also those of the pods that it makes.

    `app.kubernetes.io/instance` is not among them: Argo CD takes an object with that label and without an owner for its
    own, and prunes it.
    """
    return {
        "app.kubernetes.io/name": "orca",
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": MANAGER,
        DEPLOYMENT_LABEL: name,
        ROLE_LABEL: role,
        **(more or {}),
    }


def selector(name: str) -> str:
    """Return the label selector of everything that belongs to an OrcaDeployment."""
    return f"{DEPLOYMENT_LABEL}={name}"
