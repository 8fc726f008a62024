"""Writes the values of a tagged call (`TaggedCall`) as parts of a grammar.

Such a call has a text for each parameter, without quotes. Whatever is no string is written as JSON. A string can only
be one of a few words, or any text: other keywords of its schema cannot hold.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from orca.core.domain.errors import InvalidRequest
from orca.gateway.errors import shown
from orca.gateway.formats.readers import NAME_CHARACTERS_MAX, closes_early, referenced, typed_value, types_of
from orca.gateway.formats.tables import TaggedCall
from orca.gateway.formats.tools import Function
from orca.gateway.grammars.fields import json_rule, literal
from orca.gateway.grammars.json_schema import ANNOTATIONS, subschemas, with_subschemas

_OBJECT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""Keywords of an object that a tagged call can obey."""
_ALTERNATIVES_MAX = 64
"""Alternatives and references that are followed to find the words of a parameter."""
_ROOT = "parameters"
"""Name of the whole schema among the definitions of the schema of one parameter."""
_DEFINITIONS = ("$defs", "definitions")
_NAMES_OF_SCHEMAS = ("$schema", "$id", "id")


def check_object(schema: Mapping[str, Any], function: Function) -> None:
    """Raises: InvalidRequest for the schema of an object that tags cannot obey."""
    param, properties, required = function.param, schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(map(_is_tag_name, properties)):
        raise InvalidRequest(
            f"{param}: properties must be an object whose names have neither '>' nor white space at an end, and 1 to "
            f"{NAME_CHARACTERS_MAX} characters",
            param=param,
        )
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"{param}: required must be a list of names, not {shown(required)}", param=param)
    others = [name for name in schema if name not in _OBJECT]
    if "properties" not in schema and isinstance(schema.get("additionalProperties"), dict):
        others.append("additionalProperties")
    if set(required) - properties.keys():
        others.append("required")
    if function.is_strict and others:
        raise InvalidRequest(
            f"{param}: has the keyword {min(others)!r}, which the model's format of calls cannot obey; leave strict or "
            "the keyword out, and declare all that is required in properties",
            param=param,
        )


def value_rule(name: str, declared: Any, schema: Mapping[str, Any], function: Function, body: TaggedCall) -> str | None:
    """Return the part of a rule that matches the value of a parameter; None for any text.

    Args:
        declared: the schema of the parameter.
        schema: of all parameters, to which references lead.
    Raises: InvalidRequest for a strict function and a text that cannot obey its schema.
    """
    types = types_of(declared, schema)
    if types and "string" not in types:
        return json_rule(_alone(declared, schema))
    declared = _resolved(declared, schema)
    texts = _texts_of(declared, schema)
    if texts is not None:
        untold = next((text for text in texts if not _comes_back(text, types, body)), None)
        if untold is None:
            return " | ".join(literal("null" if text is None else text) for text in texts)
        if function.is_strict:
            raise InvalidRequest(
                f"{function.param}: the parameter {name!r} has the word {shown(untold)}, which the model's format of "
                "calls cannot write as a value; leave strict or the word out",
                param=function.param,
            )
    if function.is_strict and not _takes_any_text(declared):
        unknown = set(declared) - ANNOTATIONS if isinstance(declared, dict) else {str(declared).lower()}
        keyword = min(unknown - {"type"} or unknown)
        raise InvalidRequest(
            f"{function.param}: the parameter {name!r} is a string with the keyword {keyword!r}, which the model's "
            "format of calls cannot obey; leave strict or the keyword out",
            param=function.param,
        )
    return None


def _is_tag_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name == name.strip() and not set(name) & {">", "\n"}


def _alone(declared: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of one parameter with all that its references name, as a schema of its own."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    alone = {**definitions, **declared}
    inside = tuple(f"#/{name}/" for name in _DEFINITIONS)
    if all(reference.startswith(inside) or not reference.startswith("#") for reference in _references([alone])):
        return alone
    whole = {name: value for name, value in schema.items() if name not in _NAMES_OF_SCHEMAS}
    return {"$defs": {_ROOT: _moved(whole)}, **_moved(declared)}


def _references(schemas: Iterable[Any]) -> set[str]:
    """Return all references in schemas."""
    found, waiting = set[str](), list(schemas)
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            found.update(each for each in [schema.get("$ref")] if isinstance(each, str))
            waiting += [each for name, value in schema.items() for each, _ in subschemas(name, value, "")]
    return found


def _moved(schema: Any) -> Any:
    """Return a schema whose references find their place in the whole schema below its definition `_ROOT`."""
    if not isinstance(schema, dict):
        return schema
    moved = with_subschemas(schema, _moved)
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return moved


def _resolved(declared: Any, schema: Mapping[str, Any]) -> Any:
    """Return the schema to which a schema that is nothing else refers."""
    for _ in range(_ALTERNATIVES_MAX):
        if not isinstance(declared, dict) or set(declared) - ANNOTATIONS != {"$ref"}:
            break
        declared = referenced(str(declared["$ref"]), schema)
    return declared


def _texts_of(declared: Any, schema: Mapping[str, Any]) -> list[str | None] | None:
    """Return the texts that a schema allows, where these are few words, and None for null; None for other schemas."""
    texts: list[str | None] = []
    waiting = [declared]
    for _ in range(_ALTERNATIVES_MAX):
        if not waiting:
            break
        found = _resolved(waiting.pop(), schema)
        if not isinstance(found, dict) or set(found) - ANNOTATIONS - {"type", "enum", "const", "anyOf"}:
            return None
        if "anyOf" in found and isinstance(found["anyOf"], list) and not {"enum", "const"} & set(found):
            waiting += found["anyOf"]
            continue
        values = [None] if found.get("type") == "null" else found.get("enum")
        if "const" in found:
            values = [found["const"]]
        if not isinstance(values, list) or not all(
            value is None or (isinstance(value, str) and value) for value in values
        ):
            return None
        texts += values
    return None if waiting else texts or None


def _comes_back(text: str | None, types: set[str], body: TaggedCall) -> bool:
    """Return whether a word is read as what it stands for."""
    written = "null" if text is None else text
    return not closes_early(written, body) and typed_value(written, types) == text


def _takes_any_text(declared: Any) -> bool:
    """Return whether a schema allows every string."""
    if not isinstance(declared, dict):
        return declared is True
    types = declared.get("type", "string")
    has_string = "string" in (types if isinstance(types, list) else [types])
    some = declared.get("anyOf")
    is_any = some is None or (isinstance(some, list) and any(map(_takes_any_text, some)))
    return has_string and is_any and not set(declared) - ANNOTATIONS - {"type", "anyOf"}
