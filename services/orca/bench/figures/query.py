"""Query the figures that a page shows: the latest of each identity."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orca.bench.figures.figure import Figure, Setting


class NothingChosen(ValueError):
    """A template asks for a figure that no file of results has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureQuery:
    """The figures that a table, a plot or a placeholder asks for, all of one bench."""

    bench: str
    what: Sequence[str]
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)  # key -> its allowed values, as text

    def allows(self, figure: Figure) -> bool:
        return figure.what in self.what and all(
            shown(figure.get(key)) in allowed for key, allowed in self.where.items()
        )


def shown(value: Setting | None) -> str:
    """Return a setting as a template writes it and a page shows it; `-` for none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}"


class Results:
    """The figures of all benches, and which of them were chosen so far."""

    def __init__(self, benches: Mapping[str, Sequence[Figure]]) -> None:
        self._latest = {bench: _latest(figures) for bench, figures in benches.items()}
        self._used: set[tuple[str, object]] = set()

    def choose(self, query: FigureQuery) -> list[Figure]:
        """Return the figures that answer a query, in the order of their file. Raises: NothingChosen."""
        if query.bench not in self._latest:
            raise NothingChosen(f"there are no results of {query.bench!r}")
        found = [figure for figure in self._latest[query.bench] if query.allows(figure)]
        for what in query.what:
            if not any(figure.what == what for figure in found):
                raise NothingChosen(f"no figure of {query.bench} answers {what!r}, where {dict(query.where)}")
        self._used |= {(query.bench, figure.identity) for figure in found}
        return found

    @property
    def unused(self) -> list[str]:
        """Count the figures that nothing has chosen, by their bench and what they measure."""
        counts = Counter(
            f"{bench}: {figure.what}"
            for bench, figures in self._latest.items()
            for figure in figures
            if (bench, figure.identity) not in self._used
        )
        return [f"{name} ({count} figure{'s' if count > 1 else ''})" for name, count in counts.items()]


def _latest(figures: Iterable[Figure]) -> list[Figure]:
    """Return one figure of each identity, the one of the latest day, and of that day the last line."""
    latest: dict[object, Figure] = {}
    for figure in figures:
        if figure.identity not in latest or latest[figure.identity].date <= figure.date:
            latest[figure.identity] = figure
    return list(latest.values())
