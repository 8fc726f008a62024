"""Few combinations in which every two, or every three, values of different settings meet at least once."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(settings: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """A greedy cover, the same at every call; about as long as the product of the longest settings.

    Args: strength: so many values meet.
    """
    names = list(settings)
    parts = {row: set(combinations(enumerate(row), strength)) for row in product(*settings.values())}
    open_parts = set().union(*parts.values())
    chosen = []
    while open_parts:
        best = max(parts, key=lambda row: len(open_parts & parts[row]))
        open_parts -= parts[best]
        chosen.append(dict(zip(names, best, strict=True)))
    return chosen


def full(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(settings, row, strict=True)) for row in product(*settings.values())]


def covered(settings: Mapping[str, Sequence[Any]], strength: int) -> list[Any]:
    """Every combination as a parameter of a test: `make test` runs those in which all values meet by so many, and `make
    prove` the rest. A value that shows nothing (one token, which sees all that there is) must not be what a fault needs
    to be met by: choose the strength so that others meet it, too."""
    chosen = pairwise(settings, strength)
    return [
        pytest.param(
            *each.values(), id="-".join(map(str, each.values())), marks=() if each in chosen else pytest.mark.prove
        )
        for each in full(settings)
    ]
