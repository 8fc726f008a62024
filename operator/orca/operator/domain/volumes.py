"""Volumes that one node at a time can have, and the pods that wait for one on another node."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orca.operator.domain.observed import Observed, is_placed
from orca.operator.domain.problems import Trouble
from orca.operator.domain.resource import Json

ELSEWHERE = "VolumeElsewhere"


def claims_of(pod_spec: Mapping[str, Any]) -> Iterable[str]:
    """Names of the claims that a pod mounts."""
    for volume in pod_spec.get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]


def trouble(observed: Observed, pods: Sequence[Json]) -> Trouble | None:
    """Why one of the pods cannot begin, where a pod on another node has its volume; None when none waits for that.

    A class may call a volume ReadWriteOnce and let all nodes have it, so only a pod that has not begun counts.
    """
    for pod in pods:
        if not is_placed(pod) or _has_begun(pod):
            continue
        for claim in claims_of(pod["spec"]):
            node = _node_that_has(observed, claim)
            if node not in (None, pod["spec"]["nodeName"]):
                return Trouble(
                    ELSEWHERE,
                    f"pod {pod['metadata']['name']} waits on node {pod['spec']['nodeName']} for the volume {claim},"
                    f" which is ReadWriteOnce and in use on node {node}: place all that read the model on one node"
                    " (nodeSelector), or choose the accessMode ReadWriteMany",
                )
    return None


def _node_that_has(observed: Observed, claim: str) -> str | None:
    there = observed.get("PersistentVolumeClaim", claim)
    if there is None or there["spec"]["accessModes"] != ["ReadWriteOnce"]:
        return None
    users = [pod for pod in observed.of_kind("Pod") if _has_begun(pod) and claim in claims_of(pod["spec"])]
    return users[0]["spec"]["nodeName"] if users else None


def _has_begun(pod: Json) -> bool:
    """Whether a container of it runs: all of its volumes are mounted then."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return any("running" in container.get("state", {}) for container in containers)
