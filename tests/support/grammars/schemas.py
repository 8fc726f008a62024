"""JSON Schemas for tests: those that applications send, and generated ones of all supported keywords."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def _object(required: int | None = None, /, **properties: Any) -> Schema:
    """Return a closed object. Args: required: number of the properties that it must have; None: all."""
    names = [*properties]
    return {
        "type": "object",
        "properties": properties,
        "required": names if required is None else names[:required],
        "additionalProperties": False,
    }


_TEXT: Schema = {"type": "string", "maxLength": 8}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 99}

CORPUS: tuple[Schema, ...] = (
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": "string"},
    {"type": "number"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 5},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"kind": "fixed", "n": 1.5}},
    _object(name=_TEXT, age=_COUNT),
    _object(1, name=_TEXT, age=_COUNT, mail={"type": "string", "format": "email"}),
    _object(city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    _object(sentiment={"enum": ["positive", "neutral", "negative"]}, score={"type": "number"}),
    _object(tags={"type": "array", "items": _TEXT, "maxItems": 4}),
    _object(tags={"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}),
    _object(steps={"type": "array", "items": _object(explanation=_TEXT, output=_TEXT), "maxItems": 3}, answer=_TEXT),
    _object(date={"type": "string", "format": "date"}, at={"type": "string", "format": "date-time"}),
    _object(id={"type": "string", "format": "uuid"}),
    _object(host={"type": "string", "format": "ipv4"}, port={"type": "integer", "minimum": 1, "maximum": 65535}),
    _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    _object(price={"type": "number", "minimum": 0, "exclusiveMaximum": 100}),
    _object(even={"type": "integer", "multipleOf": 2}),
    _object(point={"type": "array", "prefixItems": [_COUNT, _COUNT], "items": False, "minItems": 2}),
    _object(value={"anyOf": [_TEXT, _COUNT, {"type": "null"}]}),
    _object(value={"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}),
    {"type": "object", "additionalProperties": _COUNT, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": _COUNT}, "additionalProperties": False},
    {"allOf": [{"type": "object", "properties": {"a": _COUNT}, "required": ["a"]}, {"required": ["b"]}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _object(
                1, value=_COUNT, children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
            )
        },
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe",
        "description": "As an application writes it.",
        "definitions": {"part": _object(name=_TEXT, grams=_COUNT)},
        **_object(title=_TEXT, parts={"type": "array", "items": {"$ref": "#/definitions/part"}, "maxItems": 2}),
    },
    _object(
        kind={"const": "order"},
        lines={"type": "array", "items": _object(sku={"type": "string", "pattern": "[a-z]{3}[0-9]"}, count=_COUNT)},
        note={"type": "string", "default": "", "description": "free text", "examples": ["x"], "x-order": 3},
    ),
)


def generated(count: int, seed: int) -> list[Schema]:
    """Return schemas of random keywords, nested up to three levels."""
    chance = random.Random(seed)
    return [_any(chance, 3) for _ in range(count)]


def _any(chance: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_text, _number, _choice, _word]
    if depth:
        kinds += [_record, _record, _list, _either, _map]
    return chance.choice(kinds)(chance, depth - 1)


def _text(chance: random.Random, _: int) -> Schema:
    least = chance.randint(0, 3)
    return chance.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)},
            {
                "type": "string",
                "pattern": chance.choice(["^[a-f]{1,4}$", "^(yes|no)+$", "[0-9]{2}:[0-9]{2}", "^é?[a-z]$"]),
            },
            {"type": "string", "format": chance.choice(["date", "time", "uuid", "ipv4", "email", "duration"])},
        ]
    )


def _number(chance: random.Random, _: int) -> Schema:
    low = chance.randint(-50, 50)
    bounds = {
        chance.choice(["minimum", "exclusiveMinimum"]): low,
        chance.choice(["maximum", "exclusiveMaximum"]): low + 9,
    }
    return {"type": chance.choice(["integer", "number"])} | (bounds if chance.random() < 0.8 else {})


def _choice(chance: random.Random, _: int) -> Schema:
    values = ["a", 'b\n"c', "é", 1, -2.5, True, None, [], {"k": "v"}]
    return {"enum": chance.sample(values, chance.randint(1, 5))}


def _word(chance: random.Random, _: int) -> Schema:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}


def _record(chance: random.Random, depth: int) -> Schema:
    properties = {
        name: _any(chance, depth) for name in chance.sample(["a", "b", "name", "x y", "ключ"], chance.randint(1, 4))
    }
    required = [name for name in properties if chance.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    return {"type": "array", "items": _any(chance, depth), "minItems": least, "maxItems": least + chance.randint(0, 2)}


def _either(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth) for _ in range(chance.randint(2, 3))]}


def _map(chance: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": _any(chance, depth), "maxProperties": chance.randint(1, 2)}
