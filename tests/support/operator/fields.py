"""Every field of an OrcaDeployment, read out of the CRD, with values that must be accepted and values that must not.

Numbers, choices and lengths tell their own values. The module field_examples.py has what a schema does not define: the
form of a name, and the fields that stand beside a field. A field that is in neither fails a test, so nobody forgets a
new one.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orca.operator.domain.resource import Json
from support.operator.deployments import schema
from support.operator.field_examples import BESIDE, DEFAULT, EXAMPLES, NOT_ALONE, UNSTATED_DEFAULTS, Examples

Path = tuple[str, ...]
"""Names of properties below spec; [] goes into the items of a list."""

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an OrcaDeployment's spec, with its schema."""

    path: Path
    schema: Json

    @property
    def name(self) -> str:
        return ".".join(self.path).replace(".[]", "[]")

    @property
    def base(self) -> Json:
        """A spec without this field, in which it may be given."""
        fitting = [beside for name, beside in BESIDE.items() if self.name.startswith(name)]
        return copy.deepcopy(fitting[-1] if fitting else DEFAULT)

    def spec(self, value: Any) -> Json:
        """The base with the field."""
        spec = self.base
        _put(spec, self.path, value)
        return spec


def fields() -> list[Field]:
    """All that hold a value."""
    return [Field(path, of) for path, of in _walk(schema()["properties"]["spec"], ()) if "properties" not in of]


def records() -> list[Field]:
    """All that hold fields."""
    return [Field(path, of) for path, of in _walk(schema()["properties"]["spec"], ()) if "properties" in of]


def valid(field: Field) -> list[Any]:
    """Values other than the default, edges among them. Raises: KeyError for one that nobody has thought of."""
    of, default = field.schema, field.schema.get("default")
    found: list[Any] = []
    if of.get("type") == "boolean":
        found = [True, False]
    elif "enum" in of:
        found = list(of["enum"])
    elif of.get("type") == "integer":
        low, high = _bounds(of)
        found = [low, high, *(value for value in (low + 1, high - 1) if low < value < high)]
    else:
        examples = _examples(field)
        found = [*examples.valid, *(examples.of_length(length) for length in _lengths(of) if examples.of_length)]
    left_out = (default, *NOT_ALONE.get(field.name, ()), *UNSTATED_DEFAULTS.get(field.name, ()))
    return [value for value in found if value not in left_out]


def invalid(field: Field) -> list[Any]:
    """Raises: KeyError for one that nobody has thought of."""
    of = field.schema
    if of.get("type") == "boolean":
        return ["yes", 1]
    if "enum" in of:
        return ["other", "", 5, *NOT_ALONE.get(field.name, ())]
    if of.get("type") == "integer":
        low, high = _bounds(of)
        return [low - 1, high + 1, *NOT_ALONE.get(field.name, ()), "5", 1.5, True]
    examples = _examples(field)
    found = [*examples.invalid, *([5] if of["type"] == "string" else ["word"])]
    if of["type"] == "string":
        found += [""] if of.get("minLength") else []
        found += [examples.of_length(of["maxLength"] + 1)] if examples.of_length else []
    return found


def _walk(of: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Json]]:
    for name, field in of["properties"].items():
        here = (*path, name)
        items = field.get("items", {})
        if "properties" in items:
            yield (*here, "[]"), items
            yield from _walk(items, (*here, "[]"))
        else:
            yield here, field
        if "properties" in field:
            yield from _walk(field, here)


def _bounds(of: Mapping[str, Any]) -> tuple[int, int]:
    wide = INT32_MAX if of["format"] == "int32" else 2**63 - 1
    return of.get("minimum", -wide - 1), of.get("maximum", wide)


def _lengths(of: Mapping[str, Any]) -> list[int]:
    if of["type"] != "string":
        return []
    return [length for length in (of.get("minLength", 0), of["maxLength"]) if length]


def _examples(field: Field) -> Examples:
    if field.name not in EXAMPLES:
        raise KeyError(f"{field.name}: say in field_examples.py what is valid for it, and what is not")
    return EXAMPLES[field.name]


def _put(spec: Json, path: Path, value: Any) -> None:
    name, rest = path[0], path[1:]
    if not rest:
        spec[name] = value
    elif rest[0] == "[]":
        items = spec.setdefault(name, [{}])
        _put(items[0], rest[1:], value)
    else:
        _put(spec.setdefault(name, {}), rest, value)
