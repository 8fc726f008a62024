"""The user's patch of a pod template: fields that go (podPatchRemove), then fields that are merged (podPatch)."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca.operator.domain.pod_patches.list_keys import MERGE_KEYS, are_keyed, key_of, name_of

Json = dict[str, Any]


def without(template: Json, pointers: Sequence[str]) -> Json:
    """Leave out the fields that JSON pointers name. A pointer to a field that is not there changes nothing."""
    for pointer in pointers:
        template = _without(template, segments(pointer), "")
    return template


def merged(base: Json, patch: Mapping[str, Any]) -> Json:
    """Merge `patch` over `base`: maps by their keys, and lists as the API server does.

    Items of the lists in MERGE_KEYS are merged by their keys. Other values and lists replace. None removes.
    """
    result = dict(base)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        elif name in MERGE_KEYS and _are_both_keyed(result.get(name), value, MERGE_KEYS[name]):
            result[name] = _merged_by_key(result[name], value, MERGE_KEYS[name])
        else:
            result[name] = value
    return result


def segments(pointer: str) -> list[str]:
    """Return the names in a JSON pointer (RFC 6901)."""
    return [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]


def pointer_to(names: Sequence[str]) -> str:
    """Return the JSON pointer that `segments` reads."""
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


def _without(value: Any, path: Sequence[str], field: str) -> Any:
    """Args: field: the name of the field that has the value."""
    name, *rest = path
    if isinstance(value, Mapping):
        if name not in value:
            return value
        kept = {key: each for key, each in value.items() if key != name or rest}
        return {**kept, name: _without(value[name], rest, name)} if rest else kept
    if not isinstance(value, list):
        return value
    left = [each for each in value if rest or name_of(each, field) != name]
    return [_without(each, rest, "") if rest and name_of(each, field) == name else each for each in left]


def _are_both_keyed(base: Any, patch: Any, keys: Sequence[str]) -> bool:
    return isinstance(base, list) and isinstance(patch, list) and are_keyed([*base, *patch], keys)


def _merged_by_key(base: Sequence[Json], patch: Sequence[Json], keys: Sequence[str]) -> list[Json]:
    patches = {key_of(each, keys): each for each in patch}
    known = [merged(each, patches.pop(key_of(each, keys), {})) for each in base]
    return [*known, *patches.values()]
