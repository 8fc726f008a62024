"""Lists of the Kubernetes API whose items have keys: podPatch merges them by key, and drift compares them by key."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MERGE_KEYS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        (
            *("containers", "initContainers", "ephemeralContainers", "volumes", "env", "imagePullSecrets"),
            *("resourceClaims", "claims", "schedulingGates"),
        ),
        ("name",),
    ),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "hostAliases": ("ip",),
    "ownerReferences": ("uid",),
    # The API server replaces this list as a whole. Here a toleration is known by everything but its seconds, so that
    # the user's come beside the operator's.
    "tolerations": ("key", "operator", "value", "effect"),
}
"""Keys by which the API server tells the items of a list from one another, by the name of the list's field.

The first of several keys names the item in messages and in podPatchRemove.
Source: x-kubernetes-list-map-keys in the OpenAPI of Kubernetes. All other lists are replaced as a whole by an apply.
"""

SETS = frozenset({"tolerations", "finalizers"})
"""Lists to which admission adds and in which order says nothing."""

_DEFAULTS = {"protocol": "TCP", "key": "", "operator": "Equal", "value": "", "effect": ""}


def missing_key(item: Any, keys: Sequence[str]) -> str | None:
    """Return a key that an item has to give and does not; None if there is none. A key with a default may be absent."""
    given = item if isinstance(item, Mapping) else {}
    return next((key for key in keys if key not in _DEFAULTS and given.get(key) is None), None)


def are_keyed(items: Iterable[Any], keys: Sequence[str]) -> bool:
    """Return whether all items of a list are objects with their keys."""
    return all(isinstance(item, Mapping) and missing_key(item, keys) is None for item in items)


def key_of(item: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    values = ((key, item.get(key)) for key in keys)
    return tuple(_DEFAULTS.get(key) if value is None else value for key, value in values)


def name_of(item: Any, field: str) -> str:
    """Return the name of an item in a list: the first of its keys, or the item itself in a list of words."""
    keys = MERGE_KEYS.get(field)
    if isinstance(item, Mapping):
        return str(key_of(item, keys)[0]) if keys else ""
    return str(item)
