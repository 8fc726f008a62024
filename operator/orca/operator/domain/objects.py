"""Objects of the cluster as plain JSON: the children of one OrcaDeployment, and questions about a single object."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.resource import GROUP, Json

ObjectKey = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class Children:
    """The objects of one OrcaDeployment, its pods included."""

    by_key: Mapping[ObjectKey, Json] = field(default_factory=dict)

    def get(self, kind: str, name: str) -> Json | None:
        return self.by_key.get((kind, name))

    def of_kind(self, kind: str) -> list[Json]:
        """Return the objects of a kind, by name."""
        return [child for (each, _), child in sorted(self.by_key.items()) if each == kind]

    def pods(self, role: str, **labels: str) -> list[Json]:
        """Return the pods of a role, by name. Args: labels: more labels of ours that they have, such as group=NAME."""
        wanted = {names.ROLE_LABEL: role} | {f"{GROUP}/{key}": value for key, value in labels.items()}
        return [pod for pod in self.of_kind("Pod") if wanted.items() <= label_map(pod).items()]

    def stateful_sets(self, role: str) -> list[Json]:
        """Return the StatefulSets that make pods of a role, by name."""
        found = self.of_kind("StatefulSet")
        return [each for each in found if label_map(each).get(names.ROLE_LABEL) == role]

    def has_ready_pod(self, role: str, group: str) -> bool:
        """Return whether some pod of a role in a group serves."""
        return any(map(is_pod_ready, self.pods(role, group=group)))


@dataclass(frozen=True, slots=True)
class Subject:
    """An OrcaDeployment as Events and log lines name it, whether its spec is valid or not."""

    namespace: str
    name: str
    uid: str

    @property
    def context(self) -> dict[str, str]:
        """The fields of a log line."""
        return {"namespace": self.namespace, "resource": self.name}


def subject(body: Mapping[str, Any]) -> Subject:
    """Return the subject of an OrcaDeployment."""
    metadata = body["metadata"]
    return Subject(metadata["namespace"], metadata["name"], metadata["uid"])


def key_of(manifest: Json) -> ObjectKey:
    return manifest["kind"], manifest["metadata"]["name"]


def by_key(objects: Iterable[Json]) -> dict[ObjectKey, Json]:
    return {key_of(each): each for each in objects}


def label_map(child: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of an object.

    The labels that it gives to its pods count first: people edit those less easily, and everything that makes pods
    carries the same labels itself.
    """
    template = child.get("spec", {}).get("template", {}).get("metadata") or {}
    return {**(child["metadata"].get("labels") or {}), **(template.get("labels") or {})}


def annotations(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations in the metadata of an object or of a pod template."""
    return metadata.get("annotations") or {}


def controllers(child: Mapping[str, Any]) -> set[str]:
    """Return the uid of the owner that manages an object, or an empty set."""
    return {owner["uid"] for owner in child["metadata"].get("ownerReferences") or [] if owner.get("controller")}


def is_going(child: Mapping[str, Any]) -> bool:
    """Return whether an object is being deleted."""
    return "deletionTimestamp" in child["metadata"]


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Return whether nothing of a pod runs any more or ever will again, for example after an eviction."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_pod_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod serves. A pod that is being deleted does not count."""
    return not is_going(pod) and condition_status(pod, "Ready") == "True"


def is_placed(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has a node."""
    return bool(pod.get("spec", {}).get("nodeName"))


def is_rolled_out(workload: Mapping[str, Any]) -> bool:
    """Return whether a Deployment or StatefulSet is as it was last written.

    Its controller has seen the last write, all of its pods are of that version and serve, and no older pod is left.
    """
    wanted, status = int(workload["spec"]["replicas"]), workload.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
    serving = min(status.get("updatedReplicas", 0), status.get("availableReplicas", 0))
    return bool(is_seen and serving >= wanted >= status.get("replicas", 0))


def has_number_from(workload: Mapping[str, Any], manager: str) -> bool:
    """Return whether a field manager has written the number of pods by an apply, and nobody has changed it since."""
    return any(
        entry.get("manager") == manager
        and entry.get("operation") == "Apply"
        and "f:replicas" in (entry.get("fieldsV1", {}).get("f:spec") or {})
        for entry in workload["metadata"].get("managedFields") or []
    )


def seconds(timestamp: str) -> float:
    """Return the seconds since 1970 of an RFC 3339 timestamp of the API server."""
    return datetime.fromisoformat(timestamp).timestamp()


def timestamp(seconds_since_1970: float) -> str:
    """Return a time as the API server writes it, in whole seconds."""
    return datetime.fromtimestamp(seconds_since_1970, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def since(child: Mapping[str, Any], kind: str) -> str | None:
    """Return the timestamp since which a condition is true; None while it is not."""
    found = condition(child, kind)
    return str(found["lastTransitionTime"]) if found.get("status") == "True" else None


def unready_s(pod: Mapping[str, Any], now_s: float) -> float:
    """Return for how many seconds a pod has not served; 0 for one that serves, goes, or has no condition Ready yet."""
    ready = condition(pod, "Ready")
    return now_s - seconds(ready["lastTransitionTime"]) if ready.get("status") == "False" and not is_going(pod) else 0.0


def unplaced_since_s(pod: Mapping[str, Any]) -> float:
    """Return since when a pod without a node has had none, in seconds since 1970."""
    reported = condition(pod, "PodScheduled").get("lastTransitionTime")
    return seconds(reported or pod["metadata"]["creationTimestamp"])


def condition_status(child: Mapping[str, Any], kind: str) -> str | None:
    """Return the status of a condition: True, False or Unknown; None if there is no such condition."""
    found = condition(child, kind)
    return str(found["status"]) if found else None


def condition(child: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition; an empty mapping if there is none of the kind."""
    conditions = child.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})
