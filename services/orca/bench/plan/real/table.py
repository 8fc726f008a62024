"""The table, the figures and the JSON of `orca bench plan real`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from statistics import fmean, median
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.plan.real.compare import BASELINE, DEFAULT, GRID, PLAN, SYSTEMS, BoundRuns

COLUMNS = ("model", "task", "bound", "s", "plan", "predicted", "p99 s", "measured", "p99 s", "met", *SYSTEMS[1:], "won")
GOALS = (
    "goals: bound met in 95 % of runs; 0.95x the best of the grid; 2x request_level on average; 1x default iteration"
)


def lines(results: Sequence[BoundRuns]) -> list[str]:
    """Return the table: a line for each bound with ratios of the plan to other systems, then reasons and summary."""
    rows: list[Sequence[str]] = [COLUMNS]
    for each in results:
        own = each.runs[PLAN]
        rows.append(
            (
                each.model,
                each.task,
                each.bound,
                f"{each.bound_s:.3g}",
                each.plan,
                f"{each.predicted.throughput:.3g}/s",
                "-" if each.predicted.latency_s is None else f"{each.predicted.latency_s:.3g}",
                f"{median(run.throughput for run in own):.3g}/s",
                f"{median(run.latency_s for run in own):.3g}",
                f"{sum(each.met)} of {len(each.met)}",
                *(_ratio(each.ratios(system)) for system in SYSTEMS[1:]),
                each.winner,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = [f"{each.model}, {each.task}, {each.bound}: {each.winner}, {each.reason}" for each in results]
    summary = [
        f"{what} {value:.1f} %" if unit == "%" else f"{what} {value:.3g}x" for what, value, unit in _summary(results)
    ]
    return [*table, "", *reasons, "", *summary, GOALS]


def _ratio(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _summary(results: Sequence[BoundRuns]) -> Iterator[tuple[str, float, str]]:
    """Yield what the goals are about, its value, and its unit."""
    met = [is_met for each in results if isfinite(each.bound_s) for is_met in each.met]
    if met:
        yield "Runs that meet their bound", 100 * fmean(met), "%"
    for system, is_mean in ((GRID, False), (BASELINE, True), (DEFAULT, False)):
        ratios = [median(found) for each in results if (found := each.ratios(system))]
        if ratios and is_mean:
            yield f"Mean throughput over {system}", fmean(ratios), "x"
        if ratios:
            yield f"Least throughput over {system}", min(ratios), "x"


def figures(results: Sequence[BoundRuns]) -> list[Measured]:
    """Return every bound, the figures of each system under it, the ratios, the winners, and the summary."""
    found: list[Measured] = []
    for each in results:
        settings: dict[str, Setting] = {"model": each.model, "task": each.task, "bound": each.bound}
        found += _bound_figures(each, settings)
    found += [measured(what, value, unit, {"bounds": len(results)}, runs=1) for what, value, unit in _summary(results)]
    return found


def _bound_figures(each: BoundRuns, settings: dict[str, Setting]) -> Iterator[Measured]:
    if isfinite(each.bound_s):
        yield measured("Latency bound", each.bound_s, "s", settings, runs=1)
    predicted = {**settings, "system": "plan, predicted"}
    yield measured("Throughput under a bound", each.predicted.throughput, "requests/s", predicted, runs=1)
    if each.predicted.latency_s is not None:
        yield measured("p99 latency under a bound", each.predicted.latency_s, "s", predicted, runs=1)
    for system, runs in each.runs.items():
        own = {**settings, "system": system}
        yield measured("Throughput under a bound", [run.throughput for run in runs], "requests/s", own)
        yield measured("p99 latency under a bound", [run.latency_s for run in runs], "s", own)
        if system != PLAN:
            ratios = each.ratios(system)
            yield measured("Throughput of the plan over others", ratios, "x", {**settings, "over": system})
    if each.best:
        best = each.best[0]
        words = {"plan": each.plan, "won": best.setting.strategy, "by": best.setting.text, "why": each.reason}
        yield measured("Most throughput", best.figures.throughput, "requests/s", {**settings, **words}, runs=1)


def to_json(results: Sequence[BoundRuns]) -> list[dict[str, Any]]:
    """Return every run as plain data. A bound without end is null."""
    return [
        {
            "model": each.model,
            "task": each.task,
            "bound": each.bound,
            "bound_s": each.bound_s if isfinite(each.bound_s) else None,
            "plan": each.plan,
            "predicted": asdict(each.predicted),
            "is_promised": each.is_promised,
            "settings": {system: setting.words() for system, setting in each.settings.items()},
            "runs": {system: [asdict(run) for run in runs] for system, runs in each.runs.items()},
            "best": [
                {"setting": best.setting.text, "words": best.setting.words(), "figures": asdict(best.figures)}
                for best in each.best
            ],
            "winner": each.winner,
            "reason": each.reason,
        }
        for each in results
    ]
