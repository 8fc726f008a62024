"""Reads the lengths of past requests from a file: CSV, JSON lines, or the output of `orca pool lengths --json`.

Every line that is not understood is refused.

Two public traces are read as they are: Azure's (`ContextTokens`, `GeneratedTokens`) and Mooncake's (`input_length`,
`output_length`).
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from orca.core.domain.errors import SettingError
from orca.planner.workload.counted import read_counted
from orca.planner.workload.lengths import LENGTH_MAX, Range
from orca.planner.workload.workload import Workload

CSV_COLUMNS = (("prompt", "output"), ("prompt_tokens", "output_tokens"), ("ContextTokens", "GeneratedTokens"))
JSON_FIELDS = (("prompt_tokens", "output_tokens"), ("input_length", "output_length"))


class BadLine(Exception):
    """A line that is not understood. Its text is the number of the line and the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number}: {reason}")


def read_workload(path: Path, *, scale: float = 1.0) -> Workload:
    """Return the workload of a file.

    Args: scale: factor of all lengths, for smaller models; a scaled length is at least 1.
    Raises: SettingError with the file, the line and the reason.
    """
    if not 0 < scale <= 1_000:
        raise SettingError(f"the scale of lengths is above 0 and at most 1,000, not {scale:g}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    if (counted := _counted(text)) is not None:
        if scale != 1:
            raise SettingError(f"{path} has ranges of lengths, which cannot be scaled")
        return read_counted(counted, path.name)
    pairs: Counter[tuple[int, int]] = Counter()
    read = _json_lines if text.lstrip().startswith("{") else _csv_lines
    try:
        for number, prompt, output in read(text.splitlines()):
            pairs[_length(number, "prompt", prompt, scale), _length(number, "output", output, scale)] += 1
    except BadLine as error:
        raise SettingError(f"{path}, {error}") from error
    if not pairs:
        raise SettingError(f"{path} has no requests")
    scaled = "" if scale == 1 else f" x {scale:g}"
    cells = ((Range(prompt, prompt), Range(output, output), count) for (prompt, output), count in sorted(pairs.items()))
    return Workload.of_cells(cells, source=f"{path.name}{scaled}", answers=pairs.total())


def _counted(text: str) -> dict[str, Any] | None:
    """Return the object that `orca pool lengths --json` prints, None if the text is not such an object."""
    if '"cells"' not in text:
        return None
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return content if isinstance(content, dict) and "cells" in content else None


def _json_lines(lines: list[str]) -> Iterator[tuple[int, object, object]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise BadLine(number, f"not JSON: {error}") from error
        if not isinstance(content, dict):
            raise BadLine(number, "not a JSON object")
        fields = next((names for names in JSON_FIELDS if names[0] in content and names[1] in content), None)
        if fields is None:
            raise BadLine(number, f"an object needs {_either(JSON_FIELDS)}")
        yield number, content[fields[0]], content[fields[1]]


def _csv_lines(lines: list[str]) -> Iterator[tuple[int, object, object]]:
    reader = csv.reader(lines, strict=True)
    places: tuple[int, int] | None = None
    width = 0
    try:
        for row in reader:
            if not any(value.strip() for value in row):
                continue
            if places is None:
                places, width = _header([value.strip() for value in row], reader.line_num), len(row)
            elif len(row) != width:
                raise BadLine(reader.line_num, f"{len(row)} values for {width} columns")
            else:
                yield reader.line_num, _number(row[places[0]]), _number(row[places[1]])
    except csv.Error as error:
        raise BadLine(reader.line_num, f"not CSV: {error}") from error


def _header(names: list[str], number: int) -> tuple[int, int]:
    for prompt, output in CSV_COLUMNS:
        if prompt in names and output in names:
            return names.index(prompt), names.index(output)
    raise BadLine(number, f"the header needs the columns {_either(CSV_COLUMNS)}")


def _number(text: str) -> object:
    """Return a whole number, or the text if it is none."""
    digits = text.strip()
    return int(digits) if digits.lstrip("-").isdecimal() and len(digits) < 20 else digits


def _length(number: int, name: str, value: object, scale: float) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLine(number, f"{name} tokens are a whole number, not {str(value)[:40]!r}")
    if not 1 <= value <= LENGTH_MAX:
        raise BadLine(
            number, f"{name} tokens are from 1 to {LENGTH_MAX:,}, not {value}: a request without any runs no step"
        )
    return min(max(round(value * scale), 1), LENGTH_MAX)


def _either(names: tuple[tuple[str, str], ...]) -> str:
    return ", or ".join(f"{prompt} and {output}" for prompt, output in names)
