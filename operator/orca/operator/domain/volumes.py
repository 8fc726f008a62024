"""Volumes that only one node can use at a time, and the pods that wait for one on another node."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.objects import Children, has_ended, is_going, is_placed
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json

ELSEWHERE = "VolumeElsewhere"
GOING = "VolumeIsGoing"


def claims_of(pod_spec: Mapping[str, Any]) -> Iterable[str]:
    """Yield the names of the claims that a pod mounts."""
    for volume in pod_spec.get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]


def find_problem(children: Children, pods: Sequence[Json]) -> Problem | None:
    """Return why one of the pods cannot start if a pod on another node has its volume; None if no pod waits for that.

    A storage class may call a volume ReadWriteOnce and still let all nodes use it, so only a pod that has not started
    counts.
    """
    for pod in pods:
        if not is_placed(pod) or has_started(pod):
            continue
        for claim in claims_of(pod["spec"]):
            node = _node_that_has(children, claim)
            if node not in (None, pod["spec"]["nodeName"]):
                return Problem(
                    ELSEWHERE,
                    f"pod {pod['metadata']['name']} waits on node {pod['spec']['nodeName']} for the volume {claim},"
                    f" which is ReadWriteOnce and in use on node {node}: place all pods that read the model on one node"
                    " (nodeSelector), or choose the accessMode ReadWriteMany",
                )
    return None


def find_going_pool(children: Children, name: str) -> Problem | None:
    """Return the problem of a pool's volume that is being deleted while Redis uses it; None if it is not.

    Args: name: of the resource.
    """
    claim = children.get("PersistentVolumeClaim", names.pool(name))
    users = [pod for pod in children.pods(names.POOL) if not has_ended(pod)]
    if claim is None or not is_going(claim) or not users:
        return None
    volume = claim.get("spec", {}).get("volumeName", "")
    return Problem(
        GOING,
        f"somebody deletes the volume claim {names.pool(name)}, which holds all requests: it goes when the pod of Redis"
        " ends, so the operator does not restart that. To keep the data, set persistentVolumeReclaimPolicy of the"
        f" PersistentVolume {volume} to Retain; otherwise let all requests end first",
    )


def _node_that_has(children: Children, claim: str) -> str | None:
    there = children.get("PersistentVolumeClaim", claim)
    if there is None or there["spec"]["accessModes"] != ["ReadWriteOnce"]:
        return None
    users = [pod for pod in children.of_kind("Pod") if has_started(pod) and claim in claims_of(pod["spec"])]
    return users[0]["spec"]["nodeName"] if users else None


def has_started(pod: Json) -> bool:
    """Return whether a container of the pod runs: then all of its volumes are mounted."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return any("running" in container.get("state", {}) for container in containers)
