"""Percentiles as plans state them: of measured values, and of values that stand for shares of all requests."""

from collections.abc import Iterable


def at_percent(values: Iterable[float], percent: float) -> float:
    """Return the smallest value such that at least so many per cent of all are not larger."""
    return weighted_percentile(((value, 1.0) for value in values), percent)


def weighted_percentile(values: Iterable[tuple[float, float]], percent: float) -> float:
    """Return the smallest value such that at least so many per cent of all are not larger.

    Args: values: each with its weight.
    """
    ordered = sorted(values)
    wanted = percent / 100 * sum(weight for _, weight in ordered) * (1 - 1e-12)
    below = 0.0
    for value, weight in ordered:
        below += weight
        if below >= wanted:
            return value
    return ordered[-1][0]
