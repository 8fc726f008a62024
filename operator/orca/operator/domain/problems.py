"""Problems that keep a pod from serving. Reasons are stable; messages name the pod and its container, or the Secret."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orca.operator.domain.objects import condition, has_ended, is_going

NO_CAPACITY = "NoCapacity"
FORBIDDEN = "PodsForbidden"
IMAGE_PULL = "ImagePull"
SECRET_MISSING = "SecretMissing"
CERTIFICATE_UNFIT = "CertificateUnfit"
CERTIFICATE_EXPIRING = "CertificateExpiring"
CERTIFICATE_EXPIRED = "CertificateExpired"
BAD_CONFIGURATION = "BadConfiguration"
OUT_OF_MEMORY = "OutOfMemory"
CRASHING = "Crashing"
STARTING = "Starting"

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CONFIGURATION_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_WORST_FIRST = (BAD_CONFIGURATION, IMAGE_PULL, OUT_OF_MEMORY, NO_CAPACITY, CRASHING, STARTING)

BAD_SETTING_EXIT = 2
"""Exit status of a part of Orca that can never serve with its settings or its model."""


@dataclass(frozen=True, slots=True)
class Problem:
    reason: str
    message: str


def worst(pods: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return the problem to look at first; None if no pod has any. Pods that go or have ended do not count."""
    staying = [pod for pod in pods if not is_going(pod) and not has_ended(pod)]
    found = [problem for pod in staying if (problem := of_pod(pod)) is not None]
    return min(found, key=lambda problem: _WORST_FIRST.index(problem.reason), default=None)


def of_pod(pod: Mapping[str, Any]) -> Problem | None:
    """Return the problem of a pod; None if it serves or starts as it should."""
    name, scheduled = pod["metadata"]["name"], condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return Problem(NO_CAPACITY, f"pod {name} finds no node: {scheduled.get('message', '')}")
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if problem := _of_container(f"pod {name}, container {container['name']}", container):
            return problem
    return None


def last_words(pod: Mapping[str, Any]) -> str | None:
    """Return the last line of the log of a pod that has failed; None if it has not."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            where = f"pod {pod['metadata']['name']}"
            if ended.get("reason") == "OOMKilled":
                return f"{where}: killed for using too much memory"
            return f"{where}: {_last_line(ended.get('message') or '')}"
    return None


def of_secret(
    name: str, secret: Mapping[str, Any] | None, keys: Iterable[str], *, field: str, names_keys: bool
) -> Problem | None:
    """Return the problem of a Secret; None if it has all keys. A pod that waits for one reports that in Events only.

    Args:
        secret: as it is; None if there is none.
        field: of the spec, that names the Secret.
        names_keys: whether the field names the keys too.
    """
    if secret is None:
        return Problem(SECRET_MISSING, f"there is no Secret {name}, which {field} names")
    for key in keys:
        if key not in (secret.get("data") or {}):
            why = f"which {field} {'names' if names_keys else 'needs'}"
            return Problem(SECRET_MISSING, f"the Secret {name} has no key {key}, {why}")
    return None


def _of_container(where: str, container: Mapping[str, Any]) -> Problem | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason"), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        return Problem(IMAGE_PULL, f"{where}: {reason} {message}")
    if reason in _CONFIGURATION_REASONS:
        return Problem(BAD_CONFIGURATION, f"{where}: {message}")
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    if container.get("ready") or not ended:
        return None
    count, status = container["restartCount"], ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return Problem(OUT_OF_MEMORY, f"{where}: killed for using too much memory, {count} restarts so far")
    last_line = _last_line(ended.get("message") or "")
    if status == BAD_SETTING_EXIT:
        return Problem(BAD_CONFIGURATION, f"{where}: {last_line}")
    if reason == "CrashLoopBackOff" and status != 0:
        return Problem(CRASHING, f"{where}: ended with exit status {status}, {count} restarts so far: {last_line}")
    return None


def _last_line(log: str) -> str:
    """Return the last line that is not empty. Of a JSON line only the message would do, but such a line is short."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "its log is empty"
