"""What is in the cluster for one OrcaDeployment, as plain data: read anew for every reconcile, never remembered."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from orca.core.fetch_report import FetchProgress
from orca.operator.domain import names
from orca.operator.domain.resource import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLook:
    """What the pool said, or why it said nothing."""

    queued: int = 0
    running: int = 0
    oldest_wait_ms: int = 0
    generation: int | None = None  # of the model in force; None while none ever was
    replaced_revisions: tuple[str, ...] = ()  # of models before it, of which somebody may still read an answer
    replaced_unfinished: int = 0  # requests of theirs that wait or run
    revision: str | None = None  # of the model in force, as the pool calls it
    promised_slots: int | None = None  # to one request of it; None until a group formed
    groups_in_force: tuple[str, ...] = ()  # of the model in force, whose schedulers live, formed or not
    offered_slots: int | None = None  # to one request by each formed group; None where one does not say
    # Of the model in force that need more than scheduler.kvSlots and have not ended; 0 also where that was not asked.
    larger_requests: int = 0
    smallest_larger_request: int = 0  # slots that the smallest of them needs
    largest_request: int = 0  # and the largest
    problem: str | None = None  # None when it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All children by (kind, name); `pods` among them."""

    children: Mapping[tuple[str, str], Json] = field(default_factory=dict)
    pool_secret: Json | None = None  # by which the pool is reached; None when there is none
    renewed_pool_secret: Json | None = None  # what that has to become first; None when it may stay as it is
    named_certificates: Json | None = None  # the Secret of that name; None when there is none, or none is named
    keys_problem: str | None = None  # why gateways cannot have the API keys that the spec names; None when they can
    pool: PoolLook = field(default_factory=lambda: PoolLook(problem="it was not asked yet"))
    lost_nodes: frozenset[str] = frozenset()
    fetch: FetchProgress | None = None  # of the model's fetch that runs; None when none does, or it does not answer

    def get(self, kind: str, name: str) -> Json | None:
        return self.children.get((kind, name))

    def of_kind(self, kind: str) -> list[Json]:
        return [child for (of, _), child in sorted(self.children.items()) if of == kind]

    def pods(self, role: str, **labels: str) -> list[Json]:
        """Of a role, by name. Args: labels: such as group=NAME."""
        wanted = {names.ROLE_LABEL: role} | {f"{names.GROUP}/{key}": value for key, value in labels.items()}
        return [pod for pod in self.of_kind("Pod") if wanted.items() <= label_map(pod).items()]

    def pod_specs(self, role: str) -> list[Json]:
        """Of the pods that StatefulSets of a role make."""
        found = (each for each in self.of_kind("StatefulSet") if label_map(each).get(names.ROLE_LABEL) == role)
        return [each["spec"]["template"]["spec"] for each in found]


def by_name(objects: Iterable[Json]) -> dict[tuple[str, str], Json]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def label_map(child: Mapping[str, Any]) -> dict[str, str]:
    """Labels of an object. Those that it gives to its pods count first: nobody edits them in passing, and what makes
    pods carries the same ones."""
    template = child.get("spec", {}).get("template", {}).get("metadata") or {}
    return {**(child["metadata"].get("labels") or {}), **(template.get("labels") or {})}


def controllers(child: Mapping[str, Any]) -> set[str]:
    """Uids of the owner that manages an object: one or none."""
    return {owner["uid"] for owner in child["metadata"].get("ownerReferences") or [] if owner.get("controller")}


def is_going(child: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in child["metadata"]


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether nothing of it runs any more, and never will again, as of one that was evicted."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_pod_ready(pod: Mapping[str, Any]) -> bool:
    """Whether it serves; one that is being deleted does not count."""
    return not is_going(pod) and condition(pod, "Ready") == "True"


def is_placed(pod: Mapping[str, Any]) -> bool:
    return bool(pod.get("spec", {}).get("nodeName"))


def is_rolled_out(workload: Mapping[str, Any]) -> bool:
    """Whether a Deployment or StatefulSet is as it was last written: its controller has seen that, all pods are of it
    and serve, and none of before is left."""
    wanted, status = int(workload["spec"]["replicas"]), workload.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
    serving = min(status.get("updatedReplicas", 0), status.get("availableReplicas", 0))
    return bool(is_seen and serving >= wanted >= status.get("replicas", 0))


def seconds(timestamp: str) -> float:
    """Of the API server's RFC 3339, since 1970."""
    return datetime.fromisoformat(timestamp).timestamp()


def since(child: Mapping[str, Any], kind: str) -> str | None:
    """Timestamp from which on a condition is true; None when it is not."""
    found = condition_of(child, kind)
    return str(found["lastTransitionTime"]) if found.get("status") == "True" else None


def unready_s(pod: Mapping[str, Any], now_s: float) -> float:
    """Seconds since which a pod does not serve; 0 for one that does, or goes, or of which nobody has said anything."""
    told = condition_of(pod, "Ready")
    return now_s - seconds(told["lastTransitionTime"]) if told.get("status") == "False" and not is_going(pod) else 0.0


def condition(child: Mapping[str, Any], kind: str) -> str | None:
    found = condition_of(child, kind)
    return str(found["status"]) if found else None


def condition_of(child: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Empty when there is none of the kind."""
    conditions = child.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})
