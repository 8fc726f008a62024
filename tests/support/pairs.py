"""Few combinations in which every two, or every three, values of different settings meet at least once."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(settings: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Few combinations; about as many as the product of the longest settings.

    Args: strength: so many values meet.
    """
    rows = full(settings)
    return [rows[place] for place in cover(rows, strength)]


def cover(rows: Sequence[Mapping[Any, Hashable]], strength: int) -> list[int]:
    """Choose few rows in which every `strength` values of different names meet that meet in any row.

    A greedy choice, the same at every call. Returns: their places.
    """
    parts = [set(combinations(row.items(), min(strength, len(row)))) for row in rows]
    open_parts = set().union(*parts)
    chosen = []
    while open_parts:
        best = max(range(len(rows)), key=lambda place: len(open_parts & parts[place]))
        open_parts -= parts[best]
        chosen.append(best)
    return chosen


def full(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(settings, row, strict=True)) for row in product(*settings.values())]


def covered(settings: Mapping[str, Sequence[Any]], strength: int) -> list[Any]:
    """Every combination as a parameter of a test: `make test` runs those in which all values meet by so many, and `make
    prove` the rest. Some values show nothing, such as one token, which sees all that there is. A fault must not need
    such a value to be met: choose the strength so that other values meet it too.
    """
    chosen = pairwise(settings, strength)
    return [
        pytest.param(
            *each.values(), id="-".join(map(str, each.values())), marks=() if each in chosen else pytest.mark.prove
        )
        for each in full(settings)
    ]
