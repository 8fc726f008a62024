"""Rules for the user's patch of a pod template: what it may not contain, and what it may not take from a pod.

The API server refuses a pod that makes no sense, and the condition Accepted shows its words. These rules are for what
it would accept, and Orca could not run with. They are also for what it would refuse in words that say too little.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orca.operator.domain.pod_patches.list_keys import MERGE_KEYS, SETS, key_of, missing_key, name_of
from orca.operator.domain.pod_patches.pod_patch import pointer_to, segments

_NEEDED_OF_POD = frozenset({"containers", "volumes", "enableServiceLinks"})
_NEEDED_OF_CONTAINER = frozenset({"name", "image", "args", "command", "env", "ports", "volumeMounts", "readinessProbe"})


def find_problems(
    patch: Mapping[str, Any], remove: Sequence[str], *, container: str, variables: str | None, domain: str
) -> Iterator[str]:
    """Yield what is wrong with a patch. Each text begins with the name of the field.

    Args:
        patch, remove: podPatch and podPatchRemove of one role.
        container: name of the operator's container in its pods.
        variables: prefix of the variables that the container reads, such as ORCA_GATEWAY; None if it reads none.
        domain: of the labels and annotations that are the operator's.
    """
    if unknown := set(patch) - {"metadata", "spec"}:
        yield f"podPatch: {min(unknown)} is not a field of a pod template; give metadata or spec"
    if bad := [name for name, value in patch.items() if not isinstance(value, Mapping)]:
        yield f"podPatch.{bad[0]} is not an object"
        return
    yield from _arguments(patch, container, variables)
    yield from _marks(patch, domain)
    yield from _lists(patch, "podPatch")
    for path in _nulls(patch, ()):
        if _is_needed(path, container, domain):
            yield f"podPatch: null removes {pointer_to(path)}, which the operator needs"
    yield from _removed(remove, container, domain)


def find_other_storage(
    patch: Mapping[str, Any], remove: Sequence[str], *, container: str, volume: str, folder: str
) -> Iterator[str]:
    """Yield what puts other storage in the place of a volume. Its container would start with nothing, and say nothing.

    Args:
        patch, remove: podPatch and podPatchRemove of one role, in which `find_problems` finds none.
        container: name of the operator's container in its pods.
        volume: its name. folder: where the container has it.
    """
    rule = f"only the operator sets the volume {volume} and what is mounted at {folder}: it holds all requests"
    spec = patch.get("spec", {})
    if any(each.get("name") == volume for each in _objects(spec.get("volumes"))):
        yield f"podPatch: {rule}"
    for each in _own_containers(spec, container):
        paths = [_normal(mount["mountPath"]) for mount in _objects(each.get("volumeMounts"))]
        if any(path == folder or path.startswith(f"{folder}/") for path in paths):
            yield f"podPatch: {rule}"
    for pointer in remove:
        match segments(pointer):
            case ["spec", "volumes", name, *_] if name == volume:
                yield f"podPatchRemove: {rule}"
            case ["spec", "containers", name, "volumeMounts", path, *_] if (name, path) == (container, folder):
                yield f"podPatchRemove: {rule}"


def _normal(path: object) -> str:
    """Return the one spelling of an absolute path: `/data/` and `//data` are `/data`."""
    return posixpath.normpath("/" + str(path).lstrip("/"))


def _objects(items: Any) -> list[Mapping[str, Any]]:
    return [each for each in items if isinstance(each, Mapping)] if isinstance(items, list) else []


def _own_containers(spec: Mapping[str, Any], container: str) -> list[Mapping[str, Any]]:
    return [each for each in _objects(spec.get("containers")) if each.get("name") == container]


def _arguments(patch: Mapping[str, Any], container: str, variables: str | None) -> Iterator[str]:
    """Refuse other arguments than the operator's: its annotations and the pool record what those say."""
    hint = f"; put settings without a field in this resource into the container's env, as {variables}_NAME"
    for each in _own_containers(patch.get("spec", {}), container):
        if fields := each.keys() & {"args", "command"}:
            problem = f"podPatch: only the operator sets {min(fields)} of the container {container}"
            yield problem if variables is None else problem + hint


def _marks(patch: Mapping[str, Any], domain: str) -> Iterator[str]:
    """Refuse labels and annotations of ours: the operator finds its pods by them, and reads facts from them."""
    for kind in ("labels", "annotations"):
        marks = patch.get("metadata", {}).get(kind)
        for key in sorted(marks) if isinstance(marks, Mapping) else ():
            if key.startswith(f"{domain}/"):
                yield f"podPatch.metadata.{kind}: only the operator sets {key}"


def _lists(value: Any, path: str) -> Iterator[str]:
    """Refuse items that cannot be merged, and the directives of Kubernetes' own patches."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        here = f"{path}.{name}"
        if str(name).startswith("$"):
            yield f"{path}: the directive {name} is not known; name fields to leave out in podPatchRemove"
        keys = MERGE_KEYS.get(name)
        if keys is not None and isinstance(inner, list):
            yield from _items(inner, keys, here, is_set=name in SETS)
        for each in inner if isinstance(inner, list) else (inner,):
            yield from _lists(each, f"{here}[{name_of(each, name)}]" if isinstance(inner, list) else here)


def _items(items: Sequence[Any], keys: Sequence[str], path: str, *, is_set: bool) -> Iterator[str]:
    found: list[tuple[Any, ...]] = []
    for each in items:
        if not isinstance(each, Mapping):
            yield f"{path}: {each!r} is not an object"
        elif (missing := missing_key(each, keys)) is not None:
            yield f"{path}: every item needs {missing}, by which it is merged"
        elif bad := [value for value in key_of(each, keys) if not isinstance(value, str | int)]:
            yield f"{path}: {bad[0]!r} is neither a text nor a number"
        elif (key := key_of(each, keys)) in found and not is_set:
            yield f"{path}: there are two items with the {keys[0]} {key[0]!r}"
        else:
            found.append(key)


def _removed(remove: Sequence[str], container: str, domain: str) -> Iterator[str]:
    for pointer in remove:
        path = segments(pointer)
        if path[:2] == ["spec", "containers"] and path[2:] and path[2] != container:
            yield f"podPatchRemove: the operator's container is {container}, not {path[2]}, in {pointer}"
        elif _is_needed(path, container, domain):
            yield f"podPatchRemove: the operator needs {pointer}"


def _nulls(value: Any, path: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the paths that null removes."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if inner is None:
            yield (*path, name)
        elif isinstance(inner, list):
            for each in inner:
                yield from _nulls(each, (*path, name, name_of(each, name)))
        else:
            yield from _nulls(inner, (*path, name))


def _is_needed(path: Sequence[str], container: str, domain: str) -> bool:
    """Return whether the operator, the API server or the part in the pod relies on a field of the operator's."""
    match list(path):
        case ["metadata", "labels" | "annotations"]:
            return True
        case ["metadata", _, key]:
            return key.startswith(f"{domain}/")
        case ["spec", field]:
            return field in _NEEDED_OF_POD
        case ["spec", "containers", name]:
            return name == container
        case ["spec", "containers", name, field]:
            return name == container and field in _NEEDED_OF_CONTAINER
        case ["spec", "containers", name, "args" | "command" | "ports", *_]:
            return name == container
        case ["spec", "containers", name, "env", variable, *_]:
            return name == container and variable.startswith("ORCA_")
    return False
