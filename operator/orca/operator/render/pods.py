"""What all pods of Orca have in common: the restricted Pod Security level, probes, images, and a user's last word."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca.operator.domain.resource import Images, Json, Resources

USER_ID = 65532
"""Of all images."""

TEMPORARY = "temporary"


def template(
    labels: Mapping[str, str],
    container: Json,
    *,
    account: str,
    images: Images,
    volumes: Sequence[Json] = (),
    annotations: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    patch: Mapping[str, Any] | None = None,
) -> Json:
    """A pod template with one container.

    Args:
        account: name of the ServiceAccount.
        more: fields of the pod's spec; those that are None are left out.
        patch: the user's, merged over everything else.
    """
    spec: Json = {
        "serviceAccountName": account,
        # No pod of the data path talks to the API server.
        "automountServiceAccountToken": False,
        # The variables of Services begin with their names, and a part refuses unknown ones with its own prefix.
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
    return merged({"metadata": metadata, "spec": spec}, patch or {})


def container(
    name: str,
    image: str,
    args: Sequence[str],
    *,
    images: Images,
    resources: Resources,
    ports: Mapping[str, int],
    environment: Sequence[Json] = (),
    mounts: Sequence[Json] = (),
    more: Mapping[str, Any] | None = None,
) -> Json:
    """The one container of a pod. Args: more: probes and hooks."""
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
        # The last words of a part that ends are in its log; the status shows them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": TEMPORARY, "mountPath": "/tmp"}, *mounts],
        **(more or {}),
    }


def secret_volume(name: str, secret: str, files: Mapping[str, str]) -> Json:
    """Files of a Secret for our user alone. Args: files: their names in the volume, by key of the Secret."""
    items = [{"key": key, "path": path} for key, path in files.items()]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}


def http_probe(path: str, port: str, *, period_s: int, failures: int, timeout_s: int = 2) -> Json:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }


def flags(values: Mapping[str, object]) -> list[str]:
    """`{"max_batch_size": 16}` as `--max-batch-size 16`; values that are None are left out."""
    return [
        word
        for name, value in values.items()
        if value is not None
        for word in ("--" + name.replace("_", "-"), _word(value))
    ]


def flags_of(container: Json) -> dict[str, str]:
    """The inverse of `flags`: each `--max-batch-size` of a container with the word behind it.

    The first of the args names the part and is passed over. Where a user has written other args over ours, the pairs
    may be of anything; a container without args has none.
    """
    args = container.get("args") or []
    return dict(zip(args[1::2], args[2::2], strict=False))


def variable(name: str, value: object) -> Json:
    return {"name": name, "value": _word(value)}


def merged(base: Json, patch: Mapping[str, Any]) -> Json:
    """`patch` over `base`: maps by key, lists of named things by name, all else replaced; None takes away."""
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        elif _is_named(value) and _is_named(result.get(key)):
            result[key] = _merged_by_name(result[key], value)
        else:
            result[key] = value
    return result


def _merged_by_name(base: Sequence[Json], patch: Sequence[Json]) -> list[Json]:
    patches = {each["name"]: each for each in patch}
    known = [merged(each, patches.pop(each["name"], {})) for each in base]
    return [*known, *patches.values()]


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "name" in each for each in value)
    )


def _given(values: Mapping[str, Any]) -> Json:
    return {key: value for key, value in values.items() if value is not None}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
