"""Marks of children as ours, and drift: whether a child is still as it was written."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.objects import controllers
from orca.operator.domain.pod_patches.list_keys import MERGE_KEYS, SETS, are_keyed, key_of
from orca.operator.domain.quantity import is_same_quantity
from orca.operator.domain.resource import Json, OrcaDeployment

KEPT_KINDS = frozenset({"PersistentVolumeClaim", "Secret"})
"""Kinds that may hold something nobody can make again. They stay when the spec does not need them any more."""


def is_ours(deployment: OrcaDeployment, child: Mapping[str, Any]) -> bool:
    """Return whether an object with our labels was made for this very resource.

    Anybody may set our labels, and an earlier resource may have had this name. Pods belong to objects of ours; volumes
    and Secrets may have no owner. Of the other objects without an owner, only those count that an operator has
    rendered: an earlier resource was deleted and left its children in place.
    """
    metadata, controlling = child["metadata"], controllers(child)
    if child["kind"] == "Pod" or (child["kind"] in KEPT_KINDS and not controlling):
        return True
    is_orphan = not metadata.get("ownerReferences") and names.HASH_LABEL in metadata["labels"]
    return is_orphan or controlling == {deployment.uid}


def finish(deployment: OrcaDeployment, manifest: Json) -> Json:
    """Add the label that identifies what was rendered, the owner, and what the spec adds to the metadata.

    An object that has no owner gets the annotations that keep other tools from pruning it.
    """
    manifest, digest = with_object_metadata(deployment, manifest), hash_of(deployment, manifest)
    metadata = dict(manifest["metadata"])
    metadata["labels"] = {**metadata["labels"], names.HASH_LABEL: digest}
    if _is_owned(deployment, manifest):
        metadata["ownerReferences"] = [deployment.owner_reference]
    else:
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **names.KEPT_ANNOTATIONS}
    return {**manifest, "metadata": metadata}


def with_object_metadata(deployment: OrcaDeployment, manifest: Json) -> Json:
    """Add the labels and annotations that the spec gives to all objects. Those that an object has of its own stay."""
    metadata, more = dict(manifest["metadata"]), deployment.spec.object_metadata
    metadata["labels"] = {**more.labels, **metadata["labels"]}
    if more.annotations:
        metadata["annotations"] = {**more.annotations, **(metadata.get("annotations") or {})}
    return {**manifest, "metadata": metadata}


def hash_of(deployment: OrcaDeployment, manifest: Json) -> str:
    """Hash everything whose change makes the operator write an object again."""
    more = deployment.spec.object_metadata
    # A Job is not written again but replaced, and no label is worth another fetch.
    if manifest["kind"] == "Job" or not (more.labels or more.annotations):
        return content_hash(deployment, manifest)
    return _hash([content_hash(deployment, manifest), dict(more.labels), dict(more.annotations)])


def content_hash(deployment: OrcaDeployment, manifest: Json) -> str:
    """Hash what is rendered for one object, without the metadata that the spec gives to all."""
    return _hash([manifest, _is_owned(deployment, manifest)])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _is_owned(deployment: OrcaDeployment, manifest: Json) -> bool:
    """Return whether an object ends with the resource. By default volumes, passwords and keys do not."""
    return manifest["kind"] not in KEPT_KINDS or deployment.spec.deletion_policy == "Delete"


_SERVICE_PORTS, _SERVICE_PORT_KEYS = "spec.ports", ("port", "protocol")
"""The ports of a Service have another key than those of a container. Those of a NetworkPolicy have none."""

_ORDERED = frozenset({"env", "initContainers"})
"""Lists with keys whose order counts: a variable may refer to earlier ones, and containers run one after another."""


def drift(wanted: Any, there: Any, path: str = "") -> str | None:
    """Find where an object is no longer as we wrote it. Fields and items that others have added do not count.

    Lists are compared as the API server merges them: by a key of their items, or as a whole. The items of a set only
    have to be there. Where the order counts, our items must be in our order; items of others may be between them.

    Returns: the path of the first difference; None if there is none.
    """
    if wanted == there:
        return None
    if isinstance(wanted, Mapping):
        if not isinstance(there, Mapping):
            return None if not wanted and there is None else path
        return _first_drift((value, there.get(key), f"{path}.{key}".lstrip(".")) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(there, list):
        return _drift_of_list(wanted, there, path)
    # The API server leaves out empty fields and defaults.
    is_same = (not wanted and there is None) or is_same_quantity(wanted, there)
    return None if is_same else path


def _drift_of_list(wanted: Sequence[Any], there: Sequence[Any], path: str) -> str | None:
    field = path.rpartition(".")[2]
    if field in SETS:
        is_there = (any(drift(each, other) is None for other in there) for each in wanted)
        return None if all(is_there) else path
    keys = _SERVICE_PORT_KEYS if path == _SERVICE_PORTS else MERGE_KEYS.get(field)
    if keys is not None and are_keyed((*wanted, *there), keys):
        known = {key_of(each, keys): each for each in there}
        ours = {key_of(each, keys): each for each in wanted}
        found = _first_drift((each, known.get(key), f"{path}[{key[0]}]") for key, each in ours.items())
        is_moved = field in _ORDERED and [*ours] != [key for key in known if key in ours]
        return path if found is None and is_moved else found
    if len(wanted) != len(there):
        return path
    return _first_drift(
        (one, other, f"{path}[{index}]") for index, (one, other) in enumerate(zip(wanted, there, strict=True))
    )


def _first_drift(fields: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next((found for wanted, there, path in fields if (found := drift(wanted, there, path)) is not None), None)
