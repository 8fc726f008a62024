"""Volumes as they are asked for: what the API server would refuse of one that is there is not asked."""

from orca.operator.domain.quantity import is_less
from orca.operator.domain.resource import Json


def claim(metadata: Json, size_gib: int, access_mode: str, storage_class: str | None, there: Json | None) -> Json:
    """A PersistentVolumeClaim.

    Args: there: the claim as it is, which keeps what cannot change of one: its class, its access mode, and its size
        from shrinking. Whether it can grow is its class's.
    """
    size, modes = f"{size_gib}Gi", [access_mode]
    if there is not None:
        modes, storage_class = there["spec"]["accessModes"], there["spec"].get("storageClassName")
        size_there = there["spec"]["resources"]["requests"]["storage"]
        size = size_there if is_less(size, size_there) else size
    spec: Json = {"accessModes": modes, "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
