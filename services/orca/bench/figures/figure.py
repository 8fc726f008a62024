"""A measured figure: one line of JSON in `results/`, with the machine, the day, the commit and the command.

This module needs no library besides Python, because the GPU bench runs where few are installed.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from orca.core.domain.errors import OrcaError

Setting = str | int | float

RESULTS = Path(__file__).parent.parent / "results"
"""One file per bench, `NAME.jsonl`."""

NOT_RECORDED = "not recorded"
"""Stands for the command of an old figure that came without one."""

_COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")
_KEY = re.compile(r"[a-z][a-z0-9_]*")


class FiguresError(OrcaError):
    """A line of results, or a template that shows it, is wrong. The message names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A figure as a bench measures it."""

    what: str  # a noun phrase: "Generated tokens per second"; figures that are compared have the same one
    settings: Mapping[str, Setting]  # what distinguishes this figure from others with the same `what`
    value: float  # the median where there were several runs
    unit: str
    spread: tuple[float, float] | None = None  # the lowest and the highest of the runs; None if unknown
    runs: int | None = None  # None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Measured):
    """A figure with its origin: where, when and how it was measured."""

    processor: str
    date: date
    commit: str | None  # of the code that ran; None if unknown
    command: str

    @property
    def identity(self) -> tuple[str, tuple[tuple[str, Setting], ...], str]:
        """Figures with equal identities measure the same thing at different times."""
        return self.what, tuple(sorted(self.settings.items())), self.processor

    def get(self, key: str) -> Setting | None:
        """Return what a template calls `key`: what, unit, processor, date or a setting. None: no such key."""
        if key in ("what", "unit", "processor"):
            return str(getattr(self, key))
        return self.date.isoformat() if key == "date" else self.settings.get(key)

    def to_line(self) -> str:
        """Return the line of JSON without its end."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content |= {"settings": dict(self.settings), "date": self.date.isoformat()}
        return json.dumps(content, ensure_ascii=False, allow_nan=False)


def read_results(folder: Path = RESULTS) -> dict[str, list[Figure]]:
    """Read the figures of each bench, in the order of their lines.

    Raises: FiguresError for the first line that is wrong.
    """
    return {file.stem: read_file(file) for file in sorted(folder.glob("*.jsonl"))}


def read_file(file: Path) -> list[Figure]:
    """Read the figures of one file. Raises: FiguresError."""
    figures = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            figures.append(parse(line))
        except ValueError as error:
            raise FiguresError(f"{file.name}:{number}: {error}") from error
    return figures


def parse(line: str) -> Figure:
    """Read a line. Raises: ValueError that names the key and its value."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("a line must be a JSON object")
    names = {each.name for each in fields(Figure)}
    if unknown := sorted(content.keys() - names):
        raise ValueError(f"unknown key {unknown[0]!r}")
    if missing := sorted(names - content.keys()):
        raise ValueError(f"missing key {missing[0]!r}")
    value, runs = _number(content["value"], "value"), content["runs"]
    if runs is not None and (type(runs) is not int or runs < 1):
        raise ValueError(f"runs must be null or a whole number from 1 on, not {runs!r}")
    return Figure(
        what=_text(content, "what"),
        settings=_settings(content["settings"]),
        value=value,
        unit=_text(content, "unit"),
        spread=_spread(content["spread"], value),
        runs=runs,
        processor=_text(content, "processor"),
        date=_date(content["date"]),
        commit=_commit(content["commit"]),
        command=_text(content, "command"),
    )


def _text(content: Mapping[str, Any], key: str) -> str:
    text = content[key]
    if not isinstance(text, str) or not text.strip() or "\n" in text or "|" in text:
        raise ValueError(f"{key} must be a text of one line without '|', not {text!r}")
    return text


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, not {value!r}")
    return value


def _spread(spread: Sequence[object] | None, value: float) -> tuple[float, float] | None:
    if spread is None:
        return None
    if not isinstance(spread, list) or len(spread) != 2:
        raise ValueError(f"spread must be null or [lowest, highest], not {spread!r}")
    lowest, highest = (_number(each, "spread") for each in spread)
    if not lowest <= value <= highest:
        raise ValueError(f"value {value} is not within spread {spread}")
    return lowest, highest


def _settings(settings: object) -> Mapping[str, Setting]:
    if not isinstance(settings, dict):
        raise ValueError(f"settings must be an object, not {settings!r}")
    for key, value in settings.items():
        if not _KEY.fullmatch(key) or key in ("what", "unit", "processor", "date"):
            raise ValueError(f"settings cannot have the key {key!r}")
        if isinstance(value, str):
            _text(settings, key)
        else:
            _number(value, key)
    return settings


def _date(text: object) -> date:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"date must be YYYY-MM-DD, not {text!r}") from None


def _commit(commit: object) -> str | None:
    if commit is not None and not (isinstance(commit, str) and _COMMIT.fullmatch(commit)):
        raise ValueError(f"commit must be null or a hash as git shows it, not {commit!r}")
    return commit
