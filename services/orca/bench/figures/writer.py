"""Appends figures to a file of results: `orca bench ... --figures FILE`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from orca.bench.figures.figure import Figure, Measured, Setting, parse
from orca.bench.figures.origin import commit, processor, shown_command, today

_DIGITS = 4
"""Significant digits that are kept: more than any two runs have in common."""


def measured(
    what: str,
    values: float | Sequence[float],
    unit: str,
    settings: Mapping[str, Setting | None],
    *,
    scale: float = 1,
    runs: int | None = None,
) -> Measured:
    """Return the median of some runs as a figure.

    Args:
        values: one for each run, or one for all of them.
        settings: those that are None are left out.
        scale: multiplies the values: 1000 for milliseconds out of seconds.
        runs: how many there were (None: as many as values).
    """
    found = [values] if isinstance(values, int | float) else list(values)
    ordered = sorted(_rounded(scale * value) for value in found)
    return Measured(
        what=what,
        settings={key: value for key, value in settings.items() if value is not None},
        value=_rounded(median(ordered)),
        unit=unit,
        spread=(ordered[0], ordered[-1]) if len(ordered) > 1 else None,
        runs=runs or len(ordered),
    )


def _rounded(value: float) -> float:
    number = float(f"{value:.{_DIGITS}g}")
    return int(number) if number.is_integer() else number


def append(file: Path | None, found: Iterable[Measured], *, words: Sequence[str], device: str | None = None) -> None:
    """Append the figures of one command.

    Args:
        file: None: write nothing.
        words: the command line, from the program on.
        device: the GPU that was measured (None: the processor of this machine).
    """
    if file is None:
        return
    where, when, revision, command = device or processor(), today(), commit(), shown_command(words)
    lines = []
    for each in found:
        figure = Figure(
            what=each.what,
            settings=each.settings,
            value=each.value,
            unit=each.unit,
            spread=each.spread,
            runs=each.runs,
            processor=where,
            date=when,
            commit=revision,
            command=command,
        )
        parse(figure.to_line())  # refuse a figure that cannot be read back
        lines.append(figure.to_line() + "\n")
    with file.open("a", encoding="utf-8") as results:
        results.writelines(lines)
