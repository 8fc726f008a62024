"""values.yaml, its schema, and the table in the chart's README say the same."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.chart.rendering import CHART
from values_table import BEGIN, read_values, with_table

VALUES = (CHART / "values.yaml").read_text()

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an object inside a schema, with its place."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, value in schema.items():
            yield from objects(value, f"{path}/{key}")


def names(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> Iterator[tuple[str, bool, bool]]:
    """(path, is in the schema, is in the values) of all that either knows."""
    known = schema.get("properties", {})
    for name in known.keys() | values.keys() if known else ():
        yield f"{path}{name}", name in known, name in values
        if name in known and isinstance(values.get(name), dict) and values[name]:
            yield from names(known[name], values[name], f"{path}{name}.")


def test_every_object_of_the_schema_is_closed_or_a_map_of_one_type() -> None:
    is_open = [path for path, schema in objects(SCHEMA) if schema.get("additionalProperties", True) is True]
    assert is_open == ["/properties/global"]  # Helm's own


def test_schema_and_values_have_the_same_names() -> None:
    apart = {path for path, *known in names(SCHEMA, yaml.safe_load(VALUES)) if not all(known)}
    assert apart == {"global"}


def test_every_value_has_a_comment_and_the_table_is_generated_from_them() -> None:
    readme = (CHART / "README.md").read_text()
    assert with_table(readme, read_values(VALUES)) == readme, "run: python charts/values_table.py"


def test_a_value_without_a_comment_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.c has no comment"):
        read_values("a:\n  # One.\n  b: 1\n\n  c: 2\n")


def test_a_row_joins_the_lines_of_a_comment() -> None:
    [value] = read_values("a:\n  # One\n  # line.\n  b: {c: 1}\n")
    assert (value.path, value.default, value.meaning) == ("a.b", {"c": 1}, "One line.")
    assert '| `a.b` | `{"c": 1}` | One line. |\n' in with_table(BEGIN, [value])
