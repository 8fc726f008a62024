"""Parts that all pods of Orca have in common: restricted Pod Security level, probes, images, and the user's patch."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca.core.process.settings import DEFAULT_METRIC_NAMES
from orca.operator.domain.pod_patches.pod_patch import merged, without
from orca.operator.domain.resource import ImagesSpec, Json, ResourcesSpec

USER_ID = 65532
"""The user of all images."""

TEMPORARY = "temporary"


def template(
    labels: Mapping[str, str],
    container: Json,
    *,
    account: str,
    images: ImagesSpec,
    volumes: Sequence[Json] = (),
    annotations: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    patch: Mapping[str, Any] | None = None,
    remove: Sequence[str] = (),
) -> Json:
    """Render a pod template with one container.

    Args:
        account: name of the ServiceAccount.
        more: fields of the pod's spec; those that are None are left out.
        patch: of the user, merged over everything else.
        remove: JSON pointers of the user to fields that are left out before.
    """
    spec: Json = {
        "serviceAccountName": account,
        # No pod of the data path calls the API server.
        "automountServiceAccountToken": False,
        # Variables of Services begin with the names of these, and a part refuses unknown variables with its own prefix.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": TEMPORARY, "emptyDir": {}}, *volumes],
        **_given({"imagePullSecrets": [{"name": name} for name in images.pull_secrets] or None}),
        **_given(more or {}),
    }
    metadata = {"labels": dict(labels), **_given({"annotations": annotations})}
    return merged(without({"metadata": metadata, "spec": spec}, remove), patch or {})


def container(
    name: str,
    image: str,
    args: Sequence[str],
    *,
    images: ImagesSpec,
    resources: ResourcesSpec,
    ports: Mapping[str, int],
    environment: Sequence[Json] = (),
    mounts: Sequence[Json] = (),
    more: Mapping[str, Any] | None = None,
) -> Json:
    """Render the only container of a pod. Args: more: probes and hooks."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": images.pull_policy,
        "args": list(args),
        "env": list(environment),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": {
            key: {name: str(amount) for name, amount in value.items()}
            for key, value in (("requests", resources.requests), ("limits", resources.limits))
            if value
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        # When a part ends, the last line of its log says why; the status shows it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": TEMPORARY, "mountPath": "/tmp"}, *mounts],
        **(more or {}),
    }


def secret_volume(name: str, secret: str, files: Mapping[str, str]) -> Json:
    """Render files of a Secret that only our user can read. Args: files: names in the volume, by key of the Secret."""
    items = [{"key": key, "path": path} for key, path in files.items()]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}


def http_probe(path: str, port: str, *, period_s: int, failures: int, timeout_s: int = 2) -> Json:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }


def everywhere(port: int) -> str:
    """Render the address at which a part listens: all of the pod's, whether its cluster gives it IPv4, IPv6 or both."""
    return f"[::]:{port}"


def flags(values: Mapping[str, object]) -> list[str]:
    """Render `{"max_batch_size": 16}` as `--max-batch-size 16`; values that are None are left out."""
    return [
        argument
        for name, value in values.items()
        if value is not None
        for argument in ("--" + name.replace("_", "-"), _text(value))
    ]


def metric_names(chosen: tuple[str, ...]) -> str | None:
    """Return the value of `--metric-names` for gateways and schedulers; None for the default."""
    return None if chosen == DEFAULT_METRIC_NAMES else ",".join(chosen)


def variable(name: str, value: object) -> Json:
    return {"name": name, "value": _text(value)}


def _given(values: Mapping[str, Any]) -> Json:
    return {key: value for key, value in values.items() if value is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
