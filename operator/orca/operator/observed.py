"""What is in the cluster for one OrcaDeployment, as plain data: read anew for every reconcile, never remembered."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from orca.core.fetch_report import Figures
from orca.operator import names
from orca.operator.resource import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLook:
    """What the pool said, or why it said nothing."""

    queued: int = 0
    running: int = 0
    oldest_wait_ms: int = 0
    groups_formed: frozenset[str] = frozenset()
    problem: str | None = None  # None when it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All children by (kind, name); `pods` among them."""

    children: Mapping[tuple[str, str], Json] = field(default_factory=dict)
    pool: PoolLook = field(default_factory=lambda: PoolLook(problem="it was not asked yet"))
    lost_nodes: frozenset[str] = frozenset()
    fetch: Figures | None = None  # of the model's fetch that runs; None when none does, or it does not answer

    def get(self, kind: str, name: str) -> Json | None:
        return self.children.get((kind, name))

    def of_kind(self, kind: str) -> list[Json]:
        return [child for (of, _), child in sorted(self.children.items()) if of == kind]

    def pods(self, role: str, **labels: str) -> list[Json]:
        """Of a role, by name. Args: labels: such as group=NAME."""
        wanted = {names.ROLE_LABEL: role} | {f"{names.GROUP}/{key}": value for key, value in labels.items()}
        return [pod for pod in self.of_kind("Pod") if wanted.items() <= label_map(pod).items()]


def by_name(objects: Iterable[Json]) -> dict[tuple[str, str], Json]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def label_map(child: Mapping[str, Any]) -> dict[str, str]:
    return dict(child["metadata"].get("labels") or {})


def is_going(child: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in child["metadata"]


def is_pod_ready(pod: Mapping[str, Any]) -> bool:
    """Whether it serves; one that is being deleted does not count."""
    return not is_going(pod) and condition(pod, "Ready") == "True"


def is_placed(pod: Mapping[str, Any]) -> bool:
    return bool(pod.get("spec", {}).get("nodeName"))


def seconds(timestamp: str) -> float:
    """Of the API server's RFC 3339, since 1970."""
    return datetime.fromisoformat(timestamp).timestamp()


def since(child: Mapping[str, Any], kind: str) -> str | None:
    """Timestamp from which on a condition is true; None when it is not."""
    for each in child.get("status", {}).get("conditions") or []:
        if each["type"] == kind and each["status"] == "True":
            return str(each["lastTransitionTime"])
    return None


def condition(child: Mapping[str, Any], kind: str) -> str | None:
    for each in child.get("status", {}).get("conditions") or []:
        if each["type"] == kind:
            return str(each["status"])
    return None
