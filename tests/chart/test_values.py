"""values.yaml, its schema, and the table in the chart's README say the same."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from rendering import CHART, Refused, needs_helm, render

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


def test_schema_and_values_know_the_same_names() -> None:
    apart = {path for path, *known in names(SCHEMA, yaml.safe_load(VALUES)) if not all(known)}
    assert apart == {"global"}


def test_every_value_has_a_comment_and_the_table_is_made_of_them() -> None:
    readme = (CHART / "README.md").read_text()
    assert with_table(readme, read_values(VALUES)) == readme, "run: python charts/values_table.py"


def test_a_value_without_a_comment_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.c has no comment"):
        read_values("a:\n  # One.\n  b: 1\n\n  c: 2\n")


def test_a_row_joins_the_lines_of_a_comment() -> None:
    [value] = read_values("a:\n  # One\n  # line.\n  b: {c: 1}\n")
    assert (value.path, value.default, value.meaning) == ("a.b", {"c": 1}, "One line.")
    assert '| `a.b` | `{"c": 1}` | One line. |\n' in with_table(BEGIN, [value])


@needs_helm
@pytest.mark.parametrize("path", [*(value.path for value in read_values(VALUES)), "images", "monitoring.rules"])
def test_a_wrong_name_beside_a_value_is_refused_by_name(path: str) -> None:
    *parents, last = path.split(".")
    values: Any = {f"{last}Mistyped": 1}
    for parent in reversed(parents):
        values = {parent: values}
    with pytest.raises(Refused, match=f"{'/'.join(parents)}.*'{last}Mistyped' not allowed"):
        render(values)


@needs_helm
@pytest.mark.parametrize("path", [value.path for value in read_values(VALUES)])
def test_a_wrong_type_is_refused_with_the_name_of_the_value(path: str) -> None:
    values: Any = 1.5
    for name in reversed(path.split(".")):
        values = {name: values}
    with pytest.raises(Refused, match=f"/{path.replace('.', '/')}'"):
        render(values)


@needs_helm
@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"operator": {"resyncSeconds": 4}}, "/operator/resyncSeconds"),
        ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
        ({"operator": {"resources": {"limits": {"memory": "1 GB"}}}}, "/operator/resources/limits/memory"),
        ({"operator": {"tolerations": [{"keys": "a"}]}}, "/operator/tolerations/0"),
        ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
        ({"images": {"registry": "example.com/"}}, "/images/registry"),
        ({"images": {"registry": "https://example.com/orca"}}, "/images/registry"),
        ({"images": {"registry": "example.com/Upper"}}, "/images/registry"),
        ({"images": {"worker": ""}}, "/images/worker"),
        ({"serviceAccount": {"name": "Not_A_Name"}}, "/serviceAccount/name"),
        ({"namespaces": ["Upper"]}, "/namespaces/0"),
        ({"namespaces": ["a", "a"]}, "/namespaces"),
        ({"networkPolicies": {"operatorEgressPorts": [0]}}, "/networkPolicies/operatorEgressPorts/0"),
        ({"monitoring": {"labels": {"a": 1}}}, "/monitoring/labels/a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_refused_with_its_place(values: dict[str, Any], place: str) -> None:
    with pytest.raises(Refused, match=f"'{place}'"):
        render(values)


@needs_helm
@pytest.mark.parametrize("part", ["crds", "images", "operator", "serviceAccount", "monitoring"])
def test_a_part_that_is_taken_away_is_missed_by_its_name(part: str) -> None:
    with pytest.raises(Refused, match=f"missing property '{part}'"):
        render({part: None})


@needs_helm
def test_an_alert_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(Refused, match="no alert named OrcaMistyped"):
        render({"monitoring": {"rules": {"enabled": True, "disabled": ["OrcaMistyped"]}}})


@needs_helm
def test_a_chart_that_contains_this_one_may_set_global_values() -> None:
    assert render({"global": {"imageRegistry": "example.com"}}) == render()
