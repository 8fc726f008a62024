"""Makes grammars that are meant to hurt: deep, recursive, ambiguous, exponential, huge, or not valid at all."""

import random
from collections.abc import Callable
from typing import Any

import orjson

Structured = dict[str, Any]
"""The fields of `structured_outputs`."""


def hostile(count: int, seed: int) -> list[Structured]:
    """Return many of them, in random sizes of all kinds."""
    chance = random.Random(seed)
    return [chance.choice(_KINDS)(chance) for _ in range(count)]


def _size(chance: random.Random, most: int) -> int:
    """Return a size of any magnitude."""
    return int(10 ** chance.uniform(0, len(str(most)) - 1)) + chance.randint(0, 9)


def _repeats(chance: random.Random) -> Structured:
    inner, regex = chance.choice(["a", "[a-z]", r"\w", "(a|b)", "é", "."]), ""
    for _ in range(chance.randint(1, 4)):
        regex = f"({regex or inner}){{{chance.randint(0, 3)},{_size(chance, 10**9)}}}"
    return {"regex": regex}


def _deep_groups(chance: random.Random) -> Structured:
    depth = _size(chance, 30_000)
    text = "(" * depth + "a" + ")" * (depth - chance.choice((0, 0, 1)))
    return (
        {"regex": text}
        if chance.random() < 0.5
        else {"grammar": f"start: {text.replace('a', chr(34) + 'a' + chr(34))}"}
    )


def _automaton(chance: random.Random) -> Structured:
    # The smallest deterministic automaton has 2^n states.
    return {"regex": f"(a|b)*a(a|b){{{_size(chance, 1000)}}}{chance.choice(['', 'c', '(a|b)*'])}"}


def _alternatives(chance: random.Random) -> Structured:
    many = _size(chance, 5_000)
    words = ["".join(chance.choices("ab", k=chance.randint(1, 12))) for _ in range(many)]
    return chance.choice([{"choice": words}, {"regex": "|".join(words)}, {"regex": f"({'|'.join(words)})*"}])


def _rules(chance: random.Random) -> Structured:
    """Rules that refer to each other at random: left recursion, empty ones, circles, exponential ambiguity."""
    many = chance.randint(1, 30)
    names = ["start", *(f"r{place}" for place in range(many))]
    atoms = [*names[1:], '"a"', '"ab"', '""', "/a*/", "/[ab]{0,9}/", "NAME", "<|end|>", "<[0-50]>", "<nobody>"]
    lines = []
    for name in names:
        options = [" ".join(chance.choices(atoms, k=chance.randint(1, 6))) for _ in range(chance.randint(1, 5))]
        lines.append(
            f"{name}: {' | '.join(options)}{chance.choice(['', '', '*', '+', '?', f'{{0,{_size(chance, 10**6)}}}'])}"
        )
    return {"grammar": "\n".join([*lines, "NAME: /[a-z]+/"])}


def _schema_loops(chance: random.Random) -> Structured:
    many = chance.randint(1, 12)
    kinds: list[Callable[[str], Any]] = [
        lambda ref: {"$ref": ref},
        lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]},
        lambda ref: {"anyOf": [{"$ref": ref}, {"type": "string"}]},
        lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"]},
        lambda ref: {"type": "array", "items": {"$ref": ref}, "minItems": 1},
    ]
    refs = [f"#/$defs/d{place}" for place in range(many)]
    return {
        "json": {
            "$ref": refs[0],
            "$defs": {f"d{place}": chance.choice(kinds)(chance.choice(refs)) for place in range(many)},
        }
    }


def _schema_products(chance: random.Random) -> Structured:
    """Alternatives whose combinations are exponential in the size of the schema."""
    sides = [
        {"anyOf": [{"properties": {f"p{side}": {"const": value}}} for value in range(chance.randint(2, 9))]}
        for side in range(chance.randint(2, 30))
    ]
    return {"json": {"type": "object", "allOf": sides}}


def _schema_sizes(chance: random.Random) -> Structured:
    number = _size(chance, 10**12)
    return chance.choice(
        [
            {"json": {"type": "string", "minLength": number, "maxLength": 2 * number}},
            {"json": {"type": "array", "items": {"type": "integer"}, "minItems": number}},
            {"json": {"type": "number", "multipleOf": 1 / number, "maximum": number}},
            {"json": {"type": "integer", "minimum": -number, "maximum": number, "multipleOf": 7}},
            {"json": {"enum": [chance.random() for _ in range(number % 5000)]}},
            {"json": {"properties": {f"p{place}": {} for place in range(number % 2000)}}},
            {"json": {"type": "string", "pattern": f"(a|b)*a(a|b){{{number % 500}}}$"}},
            {"json": {"patternProperties": {f"^a{{{place}}}b*$": {} for place in range(number % 40)}}},
        ]
    )


def _deep_schema(chance: random.Random) -> Structured:
    depth, text = _size(chance, 5_000), "{}"
    for _ in range(depth):
        text = '{"items":' + text + "}" if chance.random() < 0.5 else '{"properties":{"a":' + text + "}}"
    return {"json": text}


def _not_terminals(chance: random.Random) -> Structured:
    parts = [f"/(.*{letter}.{{{chance.randint(1, 30)}}})*/" for letter in "abcdef"[: chance.randint(2, 6)]]
    terms = "\n".join(f"T{place}: {part}" for place, part in enumerate(parts))
    joined = chance.choice([" & ", " | "]).join(f"{chance.choice(['', '~'])}T{place}" for place in range(len(parts)))
    return {"grammar": f"start: ALL\nALL: {joined}\n{terms}"}


def _bytes(chance: random.Random) -> Structured:
    alphabet = "".join(map(chr, range(32, 127))) + "\n\t\\\0é🐋\u202e"
    text = "".join(chance.choices(alphabet, k=_size(chance, 60_000)))
    field = chance.choice(["regex", "grammar", "json"])
    return {field: text if field != "grammar" else f"start: {text}"}


def _odd_schemas(chance: random.Random) -> Structured:
    """Values of the wrong kind at known keywords."""
    keywords = [
        "type",
        "enum",
        "const",
        "minimum",
        "required",
        "properties",
        "items",
        "pattern",
        "format",
        "$ref",
        "allOf",
    ]
    values: list[Any] = [
        None,
        True,
        -1,
        1e308,
        "é" * 60,
        [],
        {},
        ["é" * 99, 1],
        {"a": {"b": []}},
        [[[]]],
        "string",
        "#",
    ]
    return {"json": {chance.choice(keywords): chance.choice(values) for _ in range(chance.randint(1, 5))}}


_KINDS: list[Callable[[random.Random], Structured]] = [
    _repeats,
    _deep_groups,
    _automaton,
    _alternatives,
    _rules,
    _rules,
    _schema_loops,
    _schema_products,
    _schema_sizes,
    _deep_schema,
    _not_terminals,
    _bytes,
    _odd_schemas,
]


def words_of(structured: Structured) -> str:
    """Return them for a failure's message."""
    return orjson.dumps(structured).decode()[:300]
