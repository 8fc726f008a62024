"""Shows a comparison of orders: as text, as plain data, and as figures for the benchmark pages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from orca.bench.deadlines.choices import OrderChoice
from orca.bench.deadlines.compare import Comparison
from orca.bench.deadlines.score import MISSES, DeadlineScore
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.pool.order.order_rules import Order

Read = Callable[[DeadlineScore], float | None]

QUANTITIES: Sequence[tuple[str, Read, str, float]] = (
    ("Goodput", lambda score: score.goodput_per_s, "requests/s", 1),
    ("Utility", lambda score: score.utility_per_s, "1/1000 per second", 1000),
    ("Requests in time", lambda score: score.in_time, "%", 100),
    ("Time to first token, p99", lambda score: score.first_token_p99_s, "ms", 1000),
    ("Requests without a token", lambda score: score.no_token, "%", 100),
    ("Tokens of late requests", lambda score: score.late_tokens, "%", 100),
)
"""Name, value, unit and scale of each quantity. Utility is the sum of 1 / tokens of the answers in time."""


def lines(comparison: Comparison, choices: Sequence[OrderChoice], loads: Sequence[float]) -> list[str]:
    """Return the medians as a table for a terminal, and what stands against the goals."""
    capacity = median(each.capacity_per_s for each in comparison.surveyed)
    head = [f"{name}, {unit}" for name, _, unit, _ in QUANTITIES]
    found = [
        f"capacity {capacity:.3g} requests/s",
        f"{'load':<6}{'order':<20}" + "".join(f"{each:>30}" for each in head),
    ]
    for load in loads:
        for choice in choices:
            scores = comparison.of(choice, load)
            values = (_median(scores, read, scale) for _, read, _, scale in QUANTITIES)
            found.append(f"{load:<6g}{choice.name:<20}" + "".join(f"{value:>30.4g}" for value in values))
    for what, load, choice, ratios in _ratios(comparison, choices, loads):
        low, high = min(ratios), max(ratios)
        found.append(f"load {load:g}, {choice.name}: {what.lower()} {median(ratios):.3f} ({low:.3f} to {high:.3f})")
    return found


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return all figures of all seeds as plain data."""
    scores = [
        {"order": each.choice.name, "load": each.load, "seed": each.seed, **asdict(each.score)}
        for each in comparison.scores
    ]
    return {"surveyed": [asdict(each) for each in comparison.surveyed], "scores": scores}


def figures(
    comparison: Comparison,
    choices: Sequence[OrderChoice],
    loads: Sequence[float],
    settings: Mapping[str, Setting | None],
) -> list[Measured]:
    """Return the medians over the seeds as figures."""
    found = [measured("Capacity", [each.capacity_per_s for each in comparison.surveyed], "requests/s", settings)]
    for load in loads:
        for choice in choices:
            chosen = {**settings, "load": load, "order": choice.order.value, "eta_percent": choice.eta_percent}
            scores = comparison.of(choice, load)
            for what, read, unit, scale in QUANTITIES:
                values = [value for value in map(read, scores) if value is not None]
                if values:
                    found.append(measured(what, values, unit, chosen, scale=scale))
            for cause in MISSES:
                shares = [score.misses.get(cause, 0) / score.requests for score in scores]
                found.append(measured("Misses", shares, "%", {**chosen, "cause": cause}, scale=100))
    for what, load, choice, ratios in _ratios(comparison, choices, loads):
        chosen = {**settings, "load": load, "order": choice.order.value, "eta_percent": choice.eta_percent}
        found.append(measured(what, ratios, "x", chosen))
    return found


def _median(scores: Sequence[DeadlineScore], read: Read, scale: float) -> float:
    values = [value for value in map(read, scores) if value is not None]
    return scale * median(values) if values else float("nan")


def _ratios(
    comparison: Comparison, choices: Sequence[OrderChoice], loads: Sequence[float]
) -> Iterator[tuple[str, float, OrderChoice, list[float]]]:
    """Yield the goodput of order deadline against arrival and against the best other order, one ratio per seed."""
    others = [choice for choice in choices if choice.order is not Order.DEADLINE]
    for choice in (choice for choice in choices if choice.order is Order.DEADLINE):
        for load in loads:
            own = _goodputs(comparison, choice, load)
            for other in others:
                if other.order is Order.ARRIVAL:
                    yield "Goodput against arrival", load, choice, _divided(own, _goodputs(comparison, other, load))
            if others:
                best = [
                    max(values) for values in zip(*(_goodputs(comparison, each, load) for each in others), strict=True)
                ]
                yield "Goodput against the best other order", load, choice, _divided(own, best)


def _goodputs(comparison: Comparison, choice: OrderChoice, load: float) -> list[float]:
    return [score.goodput_per_s for score in comparison.of(choice, load)]


def _divided(values: Sequence[float], by: Sequence[float]) -> list[float]:
    return [value / other if other else 0.0 for value, other in zip(values, by, strict=True)]
