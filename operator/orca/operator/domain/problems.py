"""What keeps a pod from serving: each reason is a word that stays, each message names pod and container, or Secret."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orca.operator.domain.observed import condition_of, has_ended, is_going

NO_CAPACITY = "NoCapacity"
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
"""How a part of Orca ends for a setting or a model with which it can never serve."""


@dataclass(frozen=True, slots=True)
class Trouble:
    reason: str
    message: str


def worst(pods: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """The trouble that somebody has to see first; None when no pod has any. What ends or was evicted is over."""
    staying = [pod for pod in pods if not is_going(pod) and not has_ended(pod)]
    found = [trouble for pod in staying if (trouble := of_pod(pod)) is not None]
    return min(found, key=lambda trouble: _WORST_FIRST.index(trouble.reason), default=None)


def of_pod(pod: Mapping[str, Any]) -> Trouble | None:
    """None for a pod that serves or is on its way without a hitch."""
    name, scheduled = pod["metadata"]["name"], condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return Trouble(NO_CAPACITY, f"pod {name} finds no node: {scheduled.get('message', '')}")
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if trouble := _of_container(f"pod {name}, container {container['name']}", container):
            return trouble
    return None


def of_secret(
    name: str, secret: Mapping[str, Any] | None, keys: Iterable[str], *, field: str, names_keys: bool
) -> Trouble | None:
    """None for a Secret that has all keys. A pod that waits for one says so in events only.

    Args:
        secret: as it is; None when there is none.
        field: of the spec, that names the Secret.
        names_keys: whether the field names the keys too.
    """
    if secret is None:
        return Trouble(SECRET_MISSING, f"there is no Secret {name}, which {field} names")
    for key in keys:
        if key not in (secret.get("data") or {}):
            why = f"which {field} {'names' if names_keys else 'needs'}"
            return Trouble(SECRET_MISSING, f"the Secret {name} has no key {key}, {why}")
    return None


def _of_container(where: str, container: Mapping[str, Any]) -> Trouble | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, said = waiting.get("reason"), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        return Trouble(IMAGE_PULL, f"{where}: {reason} {said}")
    if reason in _CONFIGURATION_REASONS:
        return Trouble(BAD_CONFIGURATION, f"{where}: {said}")
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    if container.get("ready") or not ended:
        return None
    if ended.get("reason") == "OOMKilled":
        return Trouble(OUT_OF_MEMORY, f"{where}: killed for memory; it has ended {container['restartCount']} times")
    last_words = _last_words(ended.get("message") or "")
    if ended.get("exitCode") == BAD_SETTING_EXIT:
        return Trouble(BAD_CONFIGURATION, f"{where}: {last_words}")
    if reason == "CrashLoopBackOff" and ended.get("exitCode") != 0:
        return Trouble(
            CRASHING, f"{where}: ended with {ended.get('exitCode')} {container['restartCount']} times: {last_words}"
        )
    return None


def _last_words(log: str) -> str:
    """The last line that says something; of a JSON line only its message would do, but the line is short."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"
