"""Refuses the keywords of a JSON Schema that llguidance would ignore.

llguidance knows which keywords of the standard it lacks, and refuses those. It ignores every other name. So a wrong
keyword would constrain nothing, and the client would take the answer for one that obeys it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orca.core.domain.errors import InvalidRequest

_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PLAIN = frozenset(
    {"$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties", "minLength"}
    | {"maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# They allow and forbid nothing. `discriminator` is OpenAPI's: it repeats what the alternatives of `oneOf` say, and
# Pydantic writes it.
ANNOTATIONS = frozenset(
    {"$anchor", "$schema", "$id", "id", "$comment", "title", "description", "default", "readOnly", "writeOnly"}
    | {"examples", "example", "deprecated", "contentMediaType", "contentEncoding", "discriminator"}
)
_KNOWN = _ONE | _LISTS | _MAPS | _PLAIN | ANNOTATIONS
_OWN_PREFIX = "x-"
_OPTIONS = "x-guidance"  # llguidance's own options, which are ours to set
_OLD_DRAFTS = ("draft-03", "draft-04")
"""Drafts in which keywords have other meanings: llguidance ignores `const` there."""


def check_keywords(schema: dict[str, Any], param: str) -> None:
    """Raises: InvalidRequest that names field and keyword."""
    waiting: list[tuple[Any, str]] = [(schema, "")]
    while waiting:
        found, path = waiting.pop()
        if not isinstance(found, dict):
            continue  # `true`, `false`, or something that llguidance refuses
        where = f" at {path}" if path else ""
        for name, value in found.items():
            if name == _OPTIONS or (name not in _KNOWN and not name.startswith(_OWN_PREFIX)):
                raise InvalidRequest(f"{param}: the keyword {name!r}{where} is not supported", param=param)
            if name == "$schema" and (path or any(draft in str(value) for draft in _OLD_DRAFTS)):
                raise InvalidRequest(f"{param}: $schema{where}: {value!r} is not supported", param=param)
            waiting += subschemas(name, value, f"{path}/{name}")


def subschemas(name: str, value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas that are the value of a keyword, with their paths."""
    if name in _MAPS and isinstance(value, dict):
        yield from ((each, f"{path}/{key}") for key, each in value.items())
    elif name in _LISTS and isinstance(value, list):
        yield from ((each, f"{path}/{place}") for place, each in enumerate(value))
    elif name in _ONE:
        yield value, path


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema in which each schema that is directly inside of it is changed."""
    changed = dict(schema)
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            changed[name] = {key: change(each) for key, each in value.items()}
        elif name in _LISTS and isinstance(value, list):
            changed[name] = list(map(change, value))
        elif name in _ONE:
            changed[name] = change(value)
    return changed
