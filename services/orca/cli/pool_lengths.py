"""The lengths of a revision's answers as `orca pool lengths` prints them: a few lines, or JSON with every cell.

A bin is a range of lengths, so mean and percentiles are as exact as the bins: up to an eighth off from 16 tokens on
(length_bins.py). A percentile is the largest length of its bin: at least so many percent of the answers are no longer.
"""

import json
from bisect import bisect_left
from itertools import accumulate
from typing import Any

from orca.pool.length_bins import bounds_of
from orca.pool.records import Cell, LengthCounts

_PERCENTILES = (50, 90, 99)


def lengths_text(revision: str, counts: LengthCounts, half_life_s: int) -> str:
    """Return the lines for a person. `counts` has at least one answer."""
    weights = counts.weighed(half_life_s)
    lines = [
        f"revision {revision}: {counts.answers} answers in the last 4 hours, half-life {half_life_s} s",
        f"cut by max_tokens: {counts.cut_share:.1%}",
        f"{'tokens':<8}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{percent}" for percent in _PERCENTILES))),
    ]
    for name, side in (("prompt", 0), ("output", 1)):
        figures = _figures(weights, side).values()
        lines.append(f"{name:<8}" + "".join(f"{figure:>10}" for figure in figures))
    return "\n".join(lines)


def lengths_json(revision: str, counts: LengthCounts, half_life_s: int) -> str:
    """Return the same as JSON, with the weight of each cell. `counts` has at least one answer."""
    weights = counts.weighed(half_life_s)
    return json.dumps(
        {
            "revision": revision,
            "answers": counts.answers,
            "cut_share": counts.cut_share,
            "half_life_s": half_life_s,
            "prompt_tokens": _figures(weights, 0),
            "output_tokens": _figures(weights, 1),
            "cells": [
                {"prompt_tokens": bounds_of(cell[0]), "output_tokens": bounds_of(cell[1]), "weight": weight}
                for cell, weight in sorted(weights.items())
            ],
        }
    )


def _figures(weights: dict[Cell, float], side: int) -> dict[str, Any]:
    """Return mean and percentiles of one side of the cells: 0 is the prompt, 1 is the output."""
    by_bin: dict[int, float] = {}
    for cell, weight in sorted(weights.items(), key=lambda item: item[0][side]):
        by_bin[cell[side]] = by_bin.get(cell[side], 0.0) + weight
    total = sum(by_bin.values())
    mean = sum(sum(bounds_of(length_bin)) / 2 * weight for length_bin, weight in by_bin.items()) / total
    figures: dict[str, Any] = {"mean": round(mean, 1)}
    for percent in _PERCENTILES:
        figures[f"p{percent}"] = _percentile(by_bin, total * percent / 100)
    return figures


def _percentile(by_bin: dict[int, float], wanted: float) -> int:
    """Return the largest length of the first bin up to which the weights reach `wanted`. Bins are in rising order."""
    reached = list(accumulate(by_bin.values()))
    return bounds_of(list(by_bin)[bisect_left(reached, wanted)])[1]
