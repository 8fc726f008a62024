"""A figure of the paper beside ours, with a verdict: the rows that every item prints and records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured

PAPER, OURS = "paper", "Orca"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One quantity."""

    what: str  # a noun phrase
    unit: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    ours: float
    paper: float | None = None  # None: the paper does not print it
    goal: tuple[float, float] | None = None  # lowest and highest value that is good; None: published without a goal

    @property
    def is_met(self) -> bool | None:
        """Return whether the goal is met; None without one."""
        return None if self.goal is None else self.goal[0] <= self.ours <= self.goal[1]

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return "-"
        return f"{'met' if self.is_met else 'MISSED'} ({_number(self.goal[0])} to {_number(self.goal[1])})"


def within(paper: float, share: float) -> tuple[float, float]:
    """Return the goal of a value that is within a share of the paper's."""
    return paper * (1 - share), paper * (1 + share)


def lines(rows: Iterable[PaperRow]) -> list[str]:
    """Return a table: what, settings, the paper's value, ours, and the verdict."""
    cells: list[Sequence[str]] = [("figure", "settings", "paper", "ours", "unit", "verdict")]
    for row in rows:
        settings = ", ".join(f"{key} {value}" for key, value in row.settings.items())
        paper = "-" if row.paper is None else _number(row.paper)
        cells.append((row.what, settings, paper, _number(row.ours), row.unit, row.verdict))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in (2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def figures(rows: Iterable[PaperRow]) -> list[Measured]:
    """Return the figures of rows; the paper's value stands beside ours under the setting `source`."""
    found = []
    for row in rows:
        found.append(measured(row.what, row.ours, row.unit, {**row.settings, "source": OURS}, runs=1))
        if row.paper is not None:
            found.append(measured(row.what, row.paper, row.unit, {**row.settings, "source": PAPER}, runs=1))
    return found


def to_json(rows: Iterable[PaperRow]) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    return [
        {
            "what": row.what,
            "unit": row.unit,
            "settings": dict(row.settings),
            "ours": row.ours,
            "paper": row.paper,
            "goal": row.goal,
            "is_met": row.is_met,
        }
        for row in rows
    ]


def _number(value: float) -> str:
    return f"{value:.4g}"
