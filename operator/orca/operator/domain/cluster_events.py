"""Events of the cluster that say why a child has no pods, or why a pod or a claim waits. Nothing else says it.

The API server may refuse pods: a quota, a LimitRange, a Pod Security level, a webhook. A Deployment reports that in a
condition, but a StatefulSet and a Job only in Events. A kubelet reports a mount that waits in Events, too. The operator
reads them only while something is missing, and asks for each kind by its reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca.operator.domain import group_pauses
from orca.operator.domain.objects import (
    Children,
    condition,
    condition_status,
    controllers,
    has_ended,
    is_going,
    is_placed,
    is_pod_ready,
    seconds,
)
from orca.operator.domain.problems import FORBIDDEN, Problem
from orca.operator.domain.resource import Json
from orca.operator.domain.volumes import claims_of, has_started

MOUNT_FAILED = "MountFailed"
CLAIM_UNBOUND = "VolumeUnbound"

_NO_POD = ("FailedCreate",)
_NO_START = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
_NO_VOLUME = ("ProvisioningFailed", "FailedBinding")

PATIENCE_S = 15.0
"""A pod that is younger may still wait for a mount: kubelets report a Secret that they have not seen yet as missing."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """The newest Event about an object."""

    uid: str
    message: str
    at_s: float  # seconds since 1970


Events = Mapping[tuple[str, str], ClusterEvent]
"""The keys are kind and name of the object."""


def reasons_to_read(children: Children, now_s: float) -> list[str]:
    """Return the reasons of the Events that may say what is missing; none while nothing is."""
    reasons: list[str] = []
    if any(_lacks_pods(each) or _has_given_way(each) for each in _makers(children)):
        reasons += _NO_POD
    waiting = [pod for pod in children.of_kind("Pod") if not is_pod_ready(pod) and not is_going(pod)]
    if any(_waits_to_start(pod, now_s) for pod in waiting):
        reasons += _NO_START
    if any(not is_placed(pod) and not has_ended(pod) for pod in waiting):
        reasons += _NO_VOLUME
    return reasons


def read_events(items: Iterable[Json]) -> Events:
    """Return the newest Event about each object. Args: items: as the API server lists them."""
    found: dict[tuple[str, str], ClusterEvent] = {}
    for item in items:
        about = item.get("involvedObject") or {}
        key = str(about.get("kind")), str(about.get("name"))
        event = ClusterEvent(str(about.get("uid")), " ".join(str(item.get("message") or "").split()), _time_of(item))
        if key not in found or found[key].at_s <= event.at_s:
            found[key] = event
    return found


def why_no_pods(children: Children, events: Events, makers: Iterable[Json]) -> Problem | None:
    """Return why one of these StatefulSets, Deployments and Jobs cannot make its pods; None if nothing says so."""
    for maker in makers:
        if maker["kind"] == "Deployment":
            failure = condition(maker, "ReplicaFailure")
            message = str(failure.get("message", "")) if failure.get("status") == "True" else None
        else:
            message = _refusal_of(children, events, maker) if _lacks_pods(maker) else None
        if message is not None:
            return Problem(FORBIDDEN, f"{maker['kind']} {maker['metadata']['name']} cannot make its pods: {message}")
    return None


def last_refusal(events: Events, maker: Json) -> str | None:
    """Return the last refusal of a pod of a StatefulSet or Job, also of one that has no pods now by intention."""
    event = _event_of(events, maker)
    return None if event is None else event.message


def why_pods_wait(children: Children, events: Events, pods: Sequence[Json], now_s: float) -> Problem | None:
    """Return why one of these pods waits for a volume or a mount; None if nothing says so."""
    for pod in pods:
        name = pod["metadata"]["name"]
        for claim in claims_of(pod["spec"]) if not is_placed(pod) else ():
            there = children.get("PersistentVolumeClaim", claim)
            event = events.get(("PersistentVolumeClaim", claim))
            is_pending = there is None or there.get("status", {}).get("phase") == "Pending"
            if event is not None and is_pending:
                return Problem(CLAIM_UNBOUND, f"pod {name} waits for the volume claim {claim}: {event.message}")
        event = _event_of(events, pod)
        if event is not None and _waits_to_start(pod, now_s):
            return Problem(MOUNT_FAILED, f"pod {name} does not start: {event.message}")
    return None


def _makers(children: Children) -> list[Json]:
    return [*children.of_kind("StatefulSet"), *children.of_kind("Job")]


def _has_given_way(maker: Json) -> bool:
    """Return whether a group has given way: then the last refusal still says why."""
    return group_pauses.read(maker).reason == FORBIDDEN


def _lacks_pods(maker: Json) -> bool:
    status = maker.get("status", {})
    if maker["kind"] == "Job":
        is_over = any(condition_status(maker, kind) == "True" for kind in ("Complete", "Failed"))
        return not is_over and not status.get("active")
    return bool(int(status.get("replicas", 0)) < int(maker["spec"]["replicas"]))


def _refusal_of(children: Children, events: Events, maker: Json) -> str | None:
    """Return the last refusal, unless the maker has made a pod since."""
    event = _event_of(events, maker)
    uid = maker["metadata"].get("uid")
    born = [
        seconds(pod["metadata"]["creationTimestamp"])
        for pod in children.of_kind("Pod")
        if uid in controllers(pod) and "creationTimestamp" in pod["metadata"]
    ]
    return None if event is None or event.at_s < max(born, default=0.0) else event.message


def _event_of(events: Events, child: Json) -> ClusterEvent | None:
    """Return the Event about this very object. Another one may have had its name before."""
    event = events.get((child["kind"], child["metadata"]["name"]))
    return event if event is not None and event.uid == child["metadata"].get("uid") else None


def _waits_to_start(pod: Json, now_s: float) -> bool:
    is_old = now_s - seconds(pod["metadata"]["creationTimestamp"]) > PATIENCE_S
    return is_old and is_placed(pod) and not (has_started(pod) or has_ended(pod) or is_going(pod))


def _time_of(item: Mapping[str, Any]) -> float:
    series = item.get("series") or {}
    times = (item.get("lastTimestamp"), series.get("lastObservedTime"), item.get("eventTime"))
    known = [seconds(time) for time in times if time]
    return max(known, default=0.0)
