"""Appends figures to a file of results: `orca bench ... --figures FILE`."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median

from orca.bench.figures.figure import Figure, Measured, Setting, parse
from orca.bench.figures.origin import commit, processor, shown_command, today

_DIGITS = 4
"""Significant digits that are kept: more than any two runs have in common."""


def measured(
    what: str, values: float | Sequence[float], unit: str, *, scale: float = 1, **settings: Setting | None
) -> Measured:
    """Return the median of some runs as a figure, or the value of a single run.

    Args:
        scale: multiplies the values: 1000 for milliseconds out of seconds.
        settings: those that are None are left out.
    """
    found = [values] if isinstance(values, int | float) else list(values)
    runs = sorted(_rounded(scale * value) for value in found)
    return Measured(
        what=what,
        settings={key: value for key, value in settings.items() if value is not None},
        value=_rounded(median(runs)),
        unit=unit,
        spread=(runs[0], runs[-1]) if len(runs) > 1 else None,
        runs=len(runs),
    )


def _rounded(value: float) -> float:
    number = float(f"{value:.{_DIGITS}g}")
    return int(number) if number.is_integer() else number


def append(file: Path | None, found: Iterable[Measured], *, words: Sequence[str], device: str | None = None) -> None:
    """Append the figures of one command.

    Args:
        file: None: nobody asked for it, so nothing happens.
        words: the command line, from the program on.
        device: the GPU that was measured (None: the processor of this machine).
    """
    if file is None:
        return
    origin = {
        "processor": device or processor(),
        "date": today(),
        "commit": commit(),
        "command": shown_command(words),
    }
    lines = []
    for each in found:
        figure = Figure(**{one.name: getattr(each, one.name) for one in fields(Measured)}, **origin)
        parse(figure.to_line())  # a figure that nobody can read back is refused here
        lines.append(figure.to_line() + "\n")
    with file.open("a", encoding="utf-8") as results:
        results.writelines(lines)
