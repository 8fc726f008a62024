"""How a child is marked as ours, and whether one that is there is still what was written."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.observed import controllers
from orca.operator.domain.quantity import is_same_quantity
from orca.operator.domain.resource import Deployment, Json

KEPT_KINDS = frozenset({"PersistentVolumeClaim", "Secret"})
"""They may hold what cannot be made again, so they outlive the need of them."""


def is_ours(deployment: Deployment, child: Mapping[str, Any]) -> bool:
    """Whether an object that bears our labels is made for this very resource: they may be anybody's, or of one that
    had its name. Pods belong to what we made; volumes and Secrets may have no owner.

    Without an owner, only what an operator has rendered is taken up: of a resource that was deleted with its children
    left in place, and made again.
    """
    metadata, controlling = child["metadata"], controllers(child)
    if child["kind"] == "Pod" or (child["kind"] in KEPT_KINDS and not controlling):
        return True
    is_orphan = not metadata.get("ownerReferences") and names.HASH_LABEL in metadata["labels"]
    return is_orphan or controlling == {deployment.uid}


def finish(deployment: Deployment, manifest: Json) -> Json:
    """With its owner, where it has one, and the label that tells what was rendered."""
    metadata = dict(manifest["metadata"])
    metadata["labels"] = {**metadata["labels"], names.HASH_LABEL: hash_of(deployment, manifest)}
    if _is_owned(deployment, manifest):
        metadata["ownerReferences"] = [deployment.owner_reference]
    return {**manifest, "metadata": metadata}


def hash_of(deployment: Deployment, manifest: Json) -> str:
    content = [manifest, _is_owned(deployment, manifest)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _is_owned(deployment: Deployment, manifest: Json) -> bool:
    """Volumes, passwords and keys outlive the resource unless told otherwise."""
    return manifest["kind"] not in KEPT_KINDS or deployment.spec.deletion_policy == "Delete"


def drift(wanted: Any, there: Any, path: str = "") -> str | None:
    """Where something that we wrote does not stand any more; what others added does not matter.

    Returns: the path of the first difference; None when all is as written.
    """
    if isinstance(wanted, Mapping):
        if not isinstance(there, Mapping):
            return None if not wanted and there is None else path
        found = (drift(value, there.get(key), f"{path}.{key}".lstrip(".")) for key, value in wanted.items())
        return next((each for each in found if each is not None), None)
    if isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        found = (drift(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(wanted, there, strict=True)))
        return next((each for each in found if each is not None), None)
    # The API server leaves out what is empty or the default.
    is_same = wanted == there or (not wanted and there is None) or is_same_quantity(wanted, there)
    return None if is_same else path
