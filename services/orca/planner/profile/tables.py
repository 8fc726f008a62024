"""Interpolation of measured times: piecewise linear over one number, bilinear over two.

Beyond the first and the last place the line through the two nearest ones goes on. No time is below 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Line:
    """A piecewise linear function of one number. A single place is a constant."""

    at: tuple[float, ...]  # rising, at least one
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(self.at, self.values)

    def __call__(self, x: float) -> float:
        """Return the value at x, at least 0."""
        at, values = self.at, self.values
        last = len(at) - 1
        if not last:
            return values[0] if values[0] > 0.0 else 0.0
        high = bisect_right(at, x)
        if high < 1:
            high = 1
        elif high > last:
            high = last
        low = high - 1
        low_at, low_value = at[low], values[low]
        value = low_value + (values[high] - low_value) * (x - low_at) / (at[high] - low_at)
        return value if value > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Grid:
    """A function of two numbers: a line over the second one at each place of the first, and linear between lines.

    Lines may have different places. So the corner of a grid that fits into no memory can be left out.
    """

    at: tuple[float, ...]  # rising, at least one
    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        _check(self.at, self.lines)

    def __call__(self, x: float, y: float) -> float:
        """Return the value at x and y, at least 0."""
        at, lines = self.at, self.lines
        last = len(at) - 1
        if not last:
            return lines[0](y)
        high = bisect_right(at, x)
        if high < 1:
            high = 1
        elif high > last:
            high = last
        low = high - 1
        low_at, low_value = at[low], lines[low](y)
        value = low_value + (lines[high](y) - low_value) * (x - low_at) / (at[high] - low_at)
        return value if value > 0.0 else 0.0


def _check(at: Sequence[float], values: Sequence[object]) -> None:
    if not at or len(at) != len(values) or any(low >= high for low, high in pairwise(at)):
        raise ValueError(f"{len(values)} values at {list(at)}: places must rise, with one value each")
