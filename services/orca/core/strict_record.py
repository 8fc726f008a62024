"""Strict reading of JSON into frozen dataclasses: a wrong, missing or unknown field is refused by its path."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson

from orca.core.domain.errors import SettingError

Record = TypeVar("Record")

_KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class BadRecord(ValueError):
    """A field that does not fit its record. The message names the field."""


def read_record(kind: type[Record], content: object, path: str = "") -> Record:
    """Read a dataclass whose fields are numbers, texts, None, other dataclasses, and tuples of these.

    Args: path: of the content in its file, such as `degrees[0].`; empty for the whole file.
    Raises: BadRecord that names the first field that is wrong.
    """
    if not isinstance(content, dict):
        raise BadRecord(f"{path.rstrip('.') or 'the file'} must be an object, not {_shown(content)}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in content:
        if name not in names:
            raise BadRecord(f"{path}{name} is unknown")
    for name in names:
        if name not in content:
            raise BadRecord(f"{path}{name} is missing")
    values = {name: _read(hints[name], content[name], f"{path}{name}") for name in names}
    try:
        return kind(**values)
    except BadRecord:
        raise
    except ValueError as error:  # a rule of the record itself
        raise BadRecord(f"{path.rstrip('.') or 'the file'}: {error}") from error


def record_to_json(record: Any) -> bytes:
    """Return the file of a record."""
    return orjson.dumps(dataclasses.asdict(record), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def record_from_json(kind: type[Record], text: bytes, title: str) -> Record:
    """Read the JSON of a record. Args: title: names the file in errors. Raises: SettingError that names the field."""
    try:
        return read_record(kind, orjson.loads(text))
    except orjson.JSONDecodeError as error:
        raise SettingError(f"{title} is no JSON: {error}") from error
    except BadRecord as error:
        raise SettingError(f"{title}: {error}") from error


def read_record_file(kind: type[Record], file: Path, noun: str) -> Record:
    """Read the file of a record. Args: noun: of the record, for errors. Raises: SettingError, also for no such file."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise SettingError(f"{noun} {file} cannot be read: {error.strerror}") from error
    return record_from_json(kind, text, f"{noun} {file}")


def _read(hint: Any, content: object, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if content is None:
            return None
        [inner] = [each for each in typing.get_args(hint) if each is not type(None)]
        return _read(inner, content, path)
    if origin is tuple:
        if not isinstance(content, list):
            raise BadRecord(f"{path} must be a list, not {_shown(content)}")
        inner, _ = typing.get_args(hint)
        return tuple(_read(inner, each, f"{path}[{index}]") for index, each in enumerate(content))
    if dataclasses.is_dataclass(hint):
        return read_record(typing.cast("type[Any]", hint), content, f"{path}.")
    is_number = isinstance(content, int) and not isinstance(content, bool)
    is_good = isinstance(content, hint) and (hint is bool) == isinstance(content, bool)
    if hint is float:
        is_good = is_number or (isinstance(content, float) and math.isfinite(content))
    if not is_good:
        raise BadRecord(f"{path} must be {_KINDS[hint]}, not {_shown(content)}")
    return float(content) if hint is float else content  # type: ignore[arg-type]


def _shown(content: object) -> str:
    text = repr(content)
    return text if len(text) <= 40 else f"{text[:37]}..."
