"""The schema of an OrcaDeployment and the records that read it have the same fields."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from orca.operator.domain.resource import DeploymentSpec, Json, json_name
from support.operator.deployments import schema, with_defaults
from support.operator.fields import Field, fields, invalid, valid


def record_of(hint: Any) -> Any:
    """Return the record that a type hint names, or None. `RdmaResourceSpec | None` names RdmaResourceSpec."""
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((each for each in hints if dataclasses.is_dataclass(each)), None)


def pairs(record: Any, of: Json, path: str = "spec") -> Iterator[tuple[str, Any, Json]]:
    """Yield the path, the record and the schema of every object of the spec that a record reads."""
    yield path, record, of
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        name, inner = json_name(field), record_of(hints[field.name])
        if inner is not None and name in of["properties"]:
            yield from pairs(inner, of["properties"][name], f"{path}.{name}")


PAIRS = {path: (record, of) for path, record, of in pairs(DeploymentSpec, schema()["properties"]["spec"])}


@pytest.mark.parametrize("path", PAIRS)
def test_a_record_reads_every_field_of_its_section_and_no_other(path: str) -> None:
    record, of = PAIRS[path]
    assert {json_name(field) for field in dataclasses.fields(record)} == of["properties"].keys()


@pytest.mark.parametrize("path", PAIRS)
def test_a_field_that_the_schema_may_leave_out_has_a_default_in_its_record(path: str) -> None:
    record, of = PAIRS[path]
    always_there = {
        name for name, field in of["properties"].items() if "default" in field or name in of.get("required", ())
    }
    needed = {
        json_name(field)
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert needed <= always_there


@pytest.mark.parametrize("path", PAIRS)
def test_a_record_that_may_be_left_out_as_a_whole_has_the_defaults_of_the_schema(path: str) -> None:
    for field in dataclasses.fields(PAIRS[path][0]):
        if dataclasses.is_dataclass(field.default):
            of = PAIRS[path][1]["properties"][json_name(field)]
            assert field.default == read_section(type(field.default), with_defaults(of, {}))


def read_section(record: Any, section: Json) -> Any:
    """Return a record that is read from a section of a spec in which every field has a value or a default."""
    names = {json_name(field): field.name for field in dataclasses.fields(record)}
    return record(**{names[name]: value for name, value in section.items()})


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_every_field_has_values_to_test_it_with(field: Field) -> None:
    """A field whose values do not follow from its type or range needs an entry in `EXAMPLES` (field_examples.py)."""
    assert valid(field)
    invalid(field)
