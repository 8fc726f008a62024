"""Templates of pages: Markdown in which blocks and placeholders name figures.

A placeholder is one figure, or the sum of several:

    {{ host: Tokens committed per second; batch = 256; waiting = 1,000; show = range }}
    {{ sum faults: Requests; kind = kills }}

A block is a table or a plot. `where` may be repeated; `|` separates alternatives, whose order is that of the page:

    ```table peers
    what: Generated tokens per second
    where: processor = AMD Zen 4, 2 cores | Intel Xeon with AMX, 2 cores
    rows: system
    columns: model, precision
    compare: system = OpenVINO GenAI
    ```

    ```plot chunks name-of-the-file
    title: What a bound costs
    what: Generated tokens per second
    x: max_batch_tokens
    lines: model
    ```

A block whose figures do not exist is an error, unless it says what the page shows instead: `absent: Not measured yet.`
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orca.bench.figures.figure import Figure, FiguresError
from orca.bench.figures.query import FigureQuery, NothingChosen, Results, shown

_BLOCK = re.compile(r"^```(table|plot) ([^\n]*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PAGE_KEYS = ("title", "rows", "columns", "compare", "show", "x", "lines", "log", "y_title", "sources", "absent")
SHOWS = ("value", "range", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A table or a plot that a template asks for."""

    kind: str  # table or plot
    name: str  # of a plot's file; empty for tables
    query: FigureQuery
    options: Mapping[str, str] = field(default_factory=dict)

    def listed(self, key: str) -> list[str]:
        """Return the comma-separated values of an option."""
        return [part.strip() for part in self.options.get(key, "").split(",") if part.strip()]


def fill(name: str, text: str, results: Results, render: Callable[[Block, Results], str]) -> str:
    """Fill the blocks and placeholders of a template.

    Args:
        name: of the template, for errors.
        render: returns the Markdown of a block.
    Raises: FiguresError that names the template and the line.
    """

    def replaced(found: re.Match[str], make: Callable[[re.Match[str]], str]) -> str:
        try:
            return make(found)
        except ValueError as error:
            line = text[: text.index(found[0])].count("\n") + 1
            raise FiguresError(f"{name}:{line}: {error}") from error

    filled = _BLOCK.sub(lambda found: replaced(found, lambda each: render(_block(each), results)), text)
    return _PLACEHOLDER.sub(lambda found: replaced(found, lambda each: _value(each[1], results)), filled)


def _block(found: re.Match[str]) -> Block:
    kind, (bench, *names), content = found[1], found[2].split(), found[3]
    where: dict[str, list[str]] = {}
    options: dict[str, str] = {}
    what: list[str] = []
    for line in content.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if key == "what":
            what += _alternatives(value)
        elif key == "where":
            where |= _condition(value)
        elif colon and key in _PAGE_KEYS:
            options[key] = value
        else:
            raise ValueError(f"unknown line {line!r}")
    if not what:
        raise ValueError("a block needs a line `what: ...`")
    if bool(names) != (kind == "plot"):
        raise ValueError("a plot needs a name of its file, a table has none")
    query = FigureQuery(bench=bench, what=what, where=where)
    return Block(kind=kind, name=" ".join(names), query=query, options=options)


def _condition(text: str) -> dict[str, list[str]]:
    key, equals, values = text.partition("=")
    if not equals:
        raise ValueError(f"a condition is `key = value`, not {text!r}")
    return {key.strip(): _alternatives(values)}


def _alternatives(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def _value(text: str, results: Results) -> str:
    """Return what a placeholder stands for."""
    head, *conditions = text.split(";")
    bench, colon, what = head.partition(":")
    if not colon:
        raise ValueError(f"a placeholder is `bench: what; key = value`, not {text!r}")
    words = bench.split()
    where: dict[str, list[str]] = {}
    for condition in conditions:
        where |= _condition(condition)
    [show] = where.pop("show", ["value"])
    found = results.choose(FigureQuery(bench=words[-1], what=[" ".join(what.split())], where=where))
    if words[0] == "sum" and len(words) == 2:
        return f"{sum(figure.value for figure in found):,}"
    if len(found) > 1:
        raise NothingChosen(f"{len(found)} figures answer {' '.join(text.split())!r}: name more settings")
    return shown_figure(found[0], show)


def shown_figure(figure: Figure, show: str) -> str:
    """Return a figure as text: its value, also with its range or its unit."""
    if show not in SHOWS:
        raise ValueError(f"show is one of {', '.join(SHOWS)}, not {show!r}")
    if show == "unit":
        return f"{shown(figure.value)} {figure.unit}"
    if show == "range" and figure.spread is not None:
        return f"{shown(figure.value)} ({shown(figure.spread[0])} to {shown(figure.spread[1])})"
    return shown(figure.value)
