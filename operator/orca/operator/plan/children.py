"""Marks of children as ours, and drift: whether a child is still as it was written."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.objects import controllers
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
    """Add the label that identifies what was rendered, and the owner.

    An object that has no owner gets the annotations that keep other tools from pruning it.
    """
    metadata = dict(manifest["metadata"])
    metadata["labels"] = {**metadata["labels"], names.HASH_LABEL: hash_of(deployment, manifest)}
    if _is_owned(deployment, manifest):
        metadata["ownerReferences"] = [deployment.owner_reference]
    else:
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **names.KEPT_ANNOTATIONS}
    return {**manifest, "metadata": metadata}


def hash_of(deployment: OrcaDeployment, manifest: Json) -> str:
    content = [manifest, _is_owned(deployment, manifest)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _is_owned(deployment: OrcaDeployment, manifest: Json) -> bool:
    """Return whether an object ends with the resource. By default volumes, passwords and keys do not."""
    return manifest["kind"] not in KEPT_KINDS or deployment.spec.deletion_policy == "Delete"


def drift(wanted: Any, there: Any, path: str = "") -> str | None:
    """Find where an object is no longer as we wrote it. Fields that others have added do not count.

    Returns: the path of the first difference; None if there is none.
    """
    if wanted == there:
        return None
    if isinstance(wanted, Mapping):
        if not isinstance(there, Mapping):
            return None if not wanted and there is None else path
        return _first_drift((value, there.get(key), f"{path}.{key}".lstrip(".")) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        pairs = enumerate(zip(wanted, there, strict=True))
        return _first_drift((one, other, f"{path}[{index}]") for index, (one, other) in pairs)
    # The API server leaves out empty fields and defaults.
    is_same = (not wanted and there is None) or is_same_quantity(wanted, there)
    return None if is_same else path


def _first_drift(fields: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next((found for wanted, there, path in fields if (found := drift(wanted, there, path)) is not None), None)
