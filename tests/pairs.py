"""Pairwise cover: few combinations in which every two values of different settings meet at least once."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A greedy cover, the same at every call; about as long as the product of the two longest settings."""
    names = list(settings)
    rows = list(product(*settings.values()))
    open_pairs = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: len(open_pairs & _pairs(row)))
        open_pairs -= _pairs(best)
        chosen.append(dict(zip(names, best, strict=True)))
    return chosen


def full(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(settings, row, strict=True)) for row in product(*settings.values())]


def covered(settings: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Every combination as a parameter of a test: `make test` runs those of `pairwise`, `make prove` all."""
    chosen = pairwise(settings)
    return [
        pytest.param(
            *each.values(), id="-".join(map(str, each.values())), marks=() if each in chosen else pytest.mark.prove
        )
        for each in full(settings)
    ]


def _pairs(row: Sequence[Any]) -> set[tuple[Any, ...]]:
    return set(combinations(enumerate(row), 2))
