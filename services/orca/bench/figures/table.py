"""Tables of figures in Markdown, and the lines that show how these figures were measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from orca.bench.figures.figure import NOT_RECORDED, Figure
from orca.bench.figures.query import FigureQuery, Results, shown
from orca.bench.figures.template import Block, shown_figure

_NONE = "-"
_Key = tuple[str, ...]


def render_table(block: Block, results: Results) -> str:
    """Return a table and its sources. Raises: ValueError where two figures want one cell, or nothing is chosen."""
    figures = results.choose(block.query)
    rows, columns = block.listed("rows"), block.listed("columns")
    cells: dict[tuple[_Key, _Key], Figure] = {}
    for figure in figures:
        place = _key(figure, rows), _key(figure, columns)
        if place in cells:
            raise ValueError(f"two figures for {place}: {dict(cells[place].settings)} and {dict(figure.settings)}")
        cells[place] = figure
    lines = _ordered((row for row, _ in cells), rows, block.query)
    heads = _ordered((column for _, column in cells), columns, block.query)
    has_units = len({figure.unit for figure in figures}) > 1 and "what" not in columns
    cell = _cell_of(block, cells, has_units=has_units)
    table = [
        [*map(_title, rows), *(_head(head, columns, figures) for head in heads)],
        ["---"] * (len(rows) + len(heads)),
        *([*line, *(cell(line, head) for head in heads)] for line in lines),
    ]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"{_caption(figures, block)}{text}\n\n{_legend(figures, block)}{sources(figures, block)}"


def _head(values: _Key, keys: Sequence[str], figures: Sequence[Figure]) -> str:
    """Return the title of a column: the quantity, its unit, and the settings that distinguish it from other columns."""
    if not keys:
        return "Value"
    parts = []
    for key, value in zip(keys, values, strict=True):
        if key == "what":
            units = {figure.unit for figure in figures if figure.what == value}
            unit = next(iter(units)) if len(units) == 1 and len({figure.unit for figure in figures}) > 1 else ""
            parts.append(f"{value} ({unit})" if unit and unit not in value.lower().split() else value)
        else:
            parts.append(f"{_title(key)} {value}" if value[0].isdigit() else value)
    return ", ".join(parts)


def _caption(figures: Sequence[Figure], block: Block) -> str:
    """Return the line above a table: what all of its figures measure, and their unit."""
    whats, units = {figure.what for figure in figures}, {figure.unit for figure in figures}
    has_unit = len(units) == 1 and units != {"x"} and block.options.get("show") != "unit"
    unit = next(iter(units)) if has_unit and not units & {what.lower() for what in whats} else ""
    if len(whats) == 1:
        return f"**{next(iter(whats))}**{f', in {unit}' if unit else ''}:\n\n"
    return f"In {unit}:\n\n" if unit else ""


def _cell_of(
    block: Block, cells: Mapping[tuple[_Key, _Key], Figure], *, has_units: bool
) -> Callable[[_Key, _Key], str]:
    rows, columns = block.listed("rows"), block.listed("columns")
    compared, _, reference = (part.strip() for part in block.options.get("compare", "").partition("="))

    def cell(row: _Key, column: _Key) -> str:
        figure = cells.get((row, column))
        if figure is None:
            return _NONE
        text = shown_figure(figure, block.options.get("show", "range"))
        text += f" {figure.unit}" if has_units and block.options.get("show") != "unit" else ""
        if not compared or figure.get(compared) == reference:
            return text
        there = _replaced(row, rows, compared, reference), _replaced(column, columns, compared, reference)
        other = cells.get(there)
        # Only figures of one command on one day may be divided: machines change between hours.
        if other is None or (other.command, other.date) != (figure.command, figure.date):
            return text
        return f"{text}; {figure.value / other.value:.2f}x"

    return cell


def _key(figure: Figure, keys: Sequence[str]) -> _Key:
    return tuple(shown(figure.get(key)) for key in keys)


def _replaced(values: _Key, keys: Sequence[str], key: str, value: str) -> _Key:
    return tuple(value if name == key else old for name, old in zip(keys, values, strict=True))


def _ordered(found: Iterable[_Key], keys: Sequence[str], query: FigureQuery) -> list[_Key]:
    """Sort as the template lists the values, otherwise as the file does; numbers rise."""
    distinct = list(dict.fromkeys(found))
    for place, key in reversed(list(enumerate(keys))):
        values = list(dict.fromkeys(one[place] for one in distinct))
        listed = query.what if key == "what" else query.where.get(key, ())
        if all(value.replace(",", "").replace(".", "").isdigit() for value in values):
            values.sort(key=lambda value: float(value.replace(",", "")))
        order = [value for value in listed if value in values] + [value for value in values if value not in listed]
        distinct.sort(key=lambda one, place=place, order=order: order.index(one[place]))  # type: ignore[misc]
    return distinct


def _title(key: str) -> str:
    return "Figure" if key == "what" else key.replace("_", " ").capitalize()


def _legend(figures: Sequence[Figure], block: Block) -> str:
    said = []
    if block.options.get("show", "range") == "range" and any(figure.spread for figure in figures):
        said.append("A value is the median of the runs, with the lowest and the highest in brackets.")
    if "compare" in block.options:
        said.append(f"The factor is against {block.options['compare'].partition('=')[2].strip()} in the same run.")
    return " ".join(said) + "\n\n" if said else ""


def sources(figures: Iterable[Figure], block: Block) -> str:
    """Return a list of the commands, each with its machine and date; nothing if a block below has the same list."""
    if block.options.get("sources") == "below":
        return ""
    ran: dict[str, dict[str, set[int]]] = {}
    for figure in figures:
        commit = "" if figure.commit is None else f", commit {figure.commit}"
        places = ran.setdefault(figure.command, {})
        runs = places.setdefault(f"{figure.processor}, {figure.date.isoformat()}{commit}", set())
        if figure.runs is not None:
            runs.add(figure.runs)
    lines = ["Measured with:", ""]
    for command, places in ran.items():
        name = "a command that was not recorded" if command == NOT_RECORDED else f"`{command}`"
        lines.append(f"- {name} ({'; '.join(place + _runs(runs) for place, runs in places.items())})")
    return "\n".join(lines) + "\n"


def _runs(runs: set[int]) -> str:
    if not runs:
        return ""
    return f", {' or '.join(map(str, sorted(runs)))} run{'' if runs == {1} else 's'}"
