"""The state of one OrcaDeployment in a namespace, without the fields that differ from run to run.

Left out: what the API server draws (uids, addresses, times, versions), and what follows from the name of the namespace
(hashes). What is drawn by the operator is named instead: a generation is told by its rank, a Secret by its keys.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain import names
from orca.operator.domain.objects import is_going, is_pod_ready

Json = dict[str, Any]
State = dict[str, Json]
"""Objects by kind and name."""

_DRAWN = {
    "Service": ("clusterIP", "clusterIPs"),
    "PersistentVolumeClaim": ("volumeName",),
    "Job": ("selector",),
}
"""Fields of a spec that others than the operator fill in with something new each time."""
_LABELS = frozenset(
    {
        names.HASH_LABEL,
        "controller-revision-hash",
        "pod-template-hash",
        "controller-uid",
        "batch.kubernetes.io/controller-uid",
    }
)


def end_state(cluster: Cluster, namespace: str, name: str = "shop") -> State:
    """Raises: ApiError."""
    children = cluster.children(namespace, name)
    state: State = {}
    for child in children:
        if child["kind"] == "Pod":
            state[_pod_name(child, state)] = _pod(child)
        else:
            state[f"{child['kind']} {child['metadata']['name']}"] = _child(child)
    resource = cluster.deployment(namespace, name)
    if resource is not None:
        state["OrcaDeployment"] = {"spec": resource["spec"], "status": _status(resource.get("status", {}))}
    told = {} if resource is None else resource.get("status", {})
    return dict(json.loads(_without(json.dumps(state), namespace, children, told)))


def is_at_rest(cluster: Cluster, namespace: str, name: str = "shop") -> bool:
    """Nothing is going, and every pod that has not ended is ready."""
    children = cluster.children(namespace, name)
    pods = [each for each in children if each["kind"] == "Pod" and each["status"]["phase"] != "Succeeded"]
    return not any(map(is_going, children)) and all(map(is_pod_ready, pods))


def difference(wanted: State, found: State) -> str:
    """Lines of both, for people; empty when they are equal."""
    texts = [json.dumps(each, indent=1, sort_keys=True).splitlines() for each in (wanted, found)]
    return "\n".join(difflib.unified_diff(*texts, "undisturbed", "disturbed", lineterm="", n=4))


def _pod_name(pod: Json, others: State) -> str:
    """Its own where it has a place in a StatefulSet; else its role and a number, since its name is drawn."""
    metadata = pod["metadata"]
    if metadata["ownerReferences"][0]["kind"] == "StatefulSet":
        return f"Pod {metadata['name']}"
    role = f"Pod {metadata['labels'][names.ROLE_LABEL]}"
    return f"{role} {sum(each.startswith(role) for each in others)}"


def _child(child: Json) -> Json:
    kind, metadata = child["kind"], child["metadata"]
    spec = {key: value for key, value in child.get("spec", {}).items() if key not in _DRAWN.get(kind, ())}
    if template := spec.get("template", {}).get("metadata"):
        spec["template"] = {**spec["template"], "metadata": {**template, "labels": _labels(template)}}
    data = child.get("data", {})
    return {
        "labels": _labels(metadata),
        "owners": [each["kind"] for each in metadata.get("ownerReferences", [])],
        "spec": spec,
        "data": sorted(data) if kind == "Secret" else data,
    }


def _pod(pod: Json) -> Json:
    metadata = pod["metadata"]
    return {
        "labels": _labels(metadata),
        "owners": [each["kind"] for each in metadata.get("ownerReferences", [])],
        "schedule": (metadata.get("annotations") or {}).get(names.SCHEDULE_ANNOTATION),
        "is ready": is_pod_ready(pod),
    }


def _labels(metadata: Mapping[str, Any]) -> Json:
    return {key: value for key, value in (metadata.get("labels") or {}).items() if key not in _LABELS}


def _status(status: Json) -> Json:
    conditions = {each["type"]: f"{each['status']} {each['reason']}" for each in status.get("conditions", [])}
    return {**status, "conditions": conditions}


def _without(text: str, namespace: str, children: list[Json], status: Json) -> str:
    """Return the text without the namespace's name, hashes over it (schedule, users, revisions), and the clock's
    generations.
    """
    text = text.replace(namespace, "NAMESPACE")
    generations, revisions = set(), {}
    for child in children:
        labels = child["metadata"].get("labels") or {}
        if child["kind"] == "ConfigMap":
            text = text.replace(labels[names.HASH_LABEL], "SCHEDULE")
        if users := child.get("data", {}).get("users.acl"):
            text = text.replace(hashlib.sha256(users.encode()).hexdigest()[:16], "USERS")
        if names.GENERATION_LABEL in labels:
            generations.add(int(labels[names.GENERATION_LABEL]))
        if names.REVISION_LABEL in labels:
            revisions[labels[names.REVISION_LABEL]] = child["metadata"]["creationTimestamp"]
    # Without groups only the status tells one.
    for told in ("currentRevision", "updateRevision"):
        if revision := status.get(told):
            revisions.setdefault(revision, "later than all that are there")
    for rank, revision in enumerate(sorted(revisions, key=lambda each: revisions[each])):
        text = text.replace(revision, f"REVISION {rank}")
    for rank, generation in enumerate(sorted(generations)):
        text = text.replace(str(generation), f"GENERATION {rank}")
    return text
