"""Distributions of lengths in tokens: uniform (ORCA, section 6.2) and truncated normal (ExeGPT, section 7.1)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import NormalDist
from typing import Protocol

DEVIATION_MAX = 1_000_000
"""Largest standard deviation of lengths: far above it, all lengths have the same share, which rounding loses."""

LENGTH_MAX = 2**31 - 1
"""Largest length in tokens: more than the longest context that any part of Orca accepts."""


PMF_POINTS = 4096
"""Most lengths in a `pmf`: of more of them, neighbours are represented by the one in their middle."""


class Lengths(Protocol):
    """A distribution of lengths in tokens. Its text is shown in reports."""

    @property
    def low(self) -> int:
        """The shortest length, at least 1."""
        ...

    @property
    def high(self) -> int:
        """The longest length."""
        ...

    def draw(self, numbers: Random) -> int:
        """Return the next length, at least 1."""
        ...

    def quantile(self, share: float) -> int:
        """Return the length below which `share` (0 to 1) of all lengths lie."""
        ...

    def pmf(self, points: int = PMF_POINTS) -> Mapping[int, float]:
        """Return the share of each length, shortest first; the shares sum to 1.

        Args: points: the most lengths to return (see PMF_POINTS).
        """
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """A uniform distribution over whole numbers, both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a range of lengths needs 1 <= low <= high, not {self.low}..{self.high}")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"U({self.low},{self.high})"

    def draw(self, numbers: Random) -> int:
        return numbers.randint(self.low, self.high)

    def quantile(self, share: float) -> int:
        return min(self.low + int(share * (self.high - self.low + 1)), self.high)

    def pmf(self, points: int = PMF_POINTS) -> Mapping[int, float]:
        whole = self.high - self.low + 1
        return {(low + high) // 2: (high - low + 1) / whole for low, high in _thinned(self.low, self.high, points)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedNormal:
    """A normal distribution that is cut off at both ends and rounded to whole numbers; both ends are included.

    `mean` and `deviation` are those of the whole normal distribution. The lengths have the same mean only if both ends
    are equally far from it, and they always deviate less.
    """

    mean: float
    deviation: float  # standard deviation
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a range of lengths needs 1 <= low <= high, not {self.low}..{self.high}")
        # With a mean outside, only a tail would be left, and rounding errors would decide the lengths.
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"the mean of lengths from {self.low} to {self.high} must be one of them, not {self.mean:g}"
            )
        if not 0 < self.deviation <= DEVIATION_MAX:
            raise ValueError(
                f"a standard deviation of lengths is above 0 and at most {DEVIATION_MAX:,}, not {self.deviation:g}"
            )

    def __str__(self) -> str:
        return f"N({self.mean:g},{self.deviation:g};{self.low},{self.high})"

    def draw(self, numbers: Random) -> int:
        # The inverse of the distribution function takes one random number, however little the ends leave. Rejection
        # would take any number of them.
        return self.quantile(numbers.random())

    def quantile(self, share: float) -> int:
        normal = NormalDist(self.mean, self.deviation)
        least, most = normal.cdf(self.low - 0.5), normal.cdf(self.high + 0.5)
        share = least + (most - least) * share
        # The inverse is not defined at 0 and 1, which rounding reaches.
        share = min(max(share, sys.float_info.min), 1 - sys.float_info.epsilon)
        return min(max(round(normal.inv_cdf(share)), self.low), self.high)

    def pmf(self, points: int = PMF_POINTS) -> Mapping[int, float]:
        normal = NormalDist(self.mean, self.deviation)
        least = below = normal.cdf(self.low - 0.5)
        shares: dict[int, float] = {}
        for low, high in _thinned(self.low, self.high, points):
            above = normal.cdf(high + 0.5)
            shares[(low + high) // 2] = above - below
            below = above
        return {length: share / (below - least) for length, share in shares.items()}


def _thinned(low: int, high: int, points: int) -> list[tuple[int, int]]:
    """Return first and last length of at most `points` groups of neighbours, of equal size but for the last one."""
    size = ceil((high - low + 1) / points)
    size += size % 2 == 0  # an odd number of neighbours has one in its middle
    return [(first, min(first + size - 1, high)) for first in range(low, high + 1, size)]


def mean_of(lengths: Lengths) -> float:
    """Return the mean of a distribution's lengths."""
    return sum(share * length for length, share in lengths.pmf().items())


def parse_lengths(text: str) -> Lengths:
    """Read `32` or `32:512`, a Range, or `32:512:200:90`, a TruncatedNormal with its mean and standard deviation last.

    Raises: ValueError.
    """
    parts = text.split(":")
    try:
        ends, moments = [int(part) for part in parts[:2]], [float(part) for part in parts[2:]]
    except ValueError:
        ends, moments = [], []
    if not ends or len(moments) not in (0, 2):
        raise ValueError(f"lengths are N, N:M or N:M:MEAN:SD, in numbers, not {text!r}")
    if max(ends) > LENGTH_MAX:
        raise ValueError(f"a length is at most {LENGTH_MAX:,} tokens, not {max(ends)}")
    if not moments:
        return Range(ends[0], ends[-1])
    return TruncatedNormal(mean=moments[0], deviation=moments[1], low=ends[0], high=ends[1])
