"""Branch and bound over integer control variables: Algorithm 1 of ExeGPT (section 5.1), for any number of variables.

Each variable is oriented so that a larger value means more throughput and more latency. A block is a box of points. Its
upper corner bounds the throughput of the box from above, its lower corner bounds the latency from below. So a box whose
lower corner breaks the latency bound holds no solution, and one whose upper corner is slower than the best point so far
holds no better one.

Real costs are monotone within a tolerance only (section 7.8). If no function breaks monotonicity by more than its
tolerance, the throughput found is at most that tolerance below the best one.

Orca differs from the printed algorithm where the paper's text or a proof asks for it:
- The upper corner of the whole space is tested first. If it meets the bound, it is the answer (so says the text).
  Where throughput falls towards that corner, each of some blocks counts as a space (soundings.py).
- Any evaluated point that meets the bound may become the best one, and no other point may.
- Blocks of one point, and blocks whose upper corner meets the bound, are dropped: that corner is their best point.
- If no corner of a block's sides meets the bound, its longest side is split (so says the text).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

Point = tuple[int, ...]
"""A value of each variable."""


@dataclass(frozen=True, slots=True)
class Performance:
    """The figures of one point."""

    latency: float  # seconds; infinite where a point cannot run
    throughput: float  # requests per second

    def meets(self, latency_bound: float) -> bool:
        """Return whether the point can run, and its latency is at most the bound."""
        return self.latency <= latency_bound and self.latency < inf


Perform = Callable[[Point], Performance]


@dataclass(frozen=True, slots=True)
class SearchBlock:
    """A box of points, both corners included."""

    lower: Point
    upper: Point

    @property
    def sides(self) -> tuple[int, ...]:
        """Return the number of values of each variable, less one."""
        return tuple(high - low for low, high in zip(self.lower, self.upper, strict=True))

    def corner(self, variable: int) -> Point:
        """Return the upper corner, but with the lowest value of one variable: top left and bottom right in the paper's
        two dimensions.
        """
        return (*self.upper[:variable], self.lower[variable], *self.upper[variable + 1 :])

    def split(self, variable: int) -> tuple["SearchBlock", "SearchBlock"]:
        """Return the two halves, the one with the lower values first. The side must have two values or more."""
        middle = (self.lower[variable] + self.upper[variable]) // 2
        below = (*self.upper[:variable], middle, *self.upper[variable + 1 :])
        above = (*self.lower[:variable], middle + 1, *self.lower[variable + 1 :])
        return SearchBlock(self.lower, below), SearchBlock(above, self.upper)

    @property
    def points(self) -> int:
        """Return how many points the block has."""
        product = 1
        for side in self.sides:
            product *= side + 1
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Distances of real functions from monotone ones: epsilon_T and epsilon_L of Algorithm 1, as shares."""

    throughput: float = 0.0  # of the best throughput so far
    latency: float = 0.0  # of the latency bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search."""

    best: Point | None  # None: no evaluated point meets the bound
    evaluated: dict[Point, Performance]  # in the order of evaluation

    def ranking(self, latency_bound: float) -> list[Point]:
        """Return the evaluated points that meet the bound: most throughput first, of equal ones the least latency."""
        meeting = [point for point, figures in self.evaluated.items() if figures.meets(latency_bound)]
        return sorted(meeting, key=lambda point: (-self.evaluated[point].throughput, self.evaluated[point].latency))


def search(
    space: SearchBlock,
    perform: Perform,
    *,
    latency_bound: float,
    tolerance: Tolerance = Tolerance(),
    throughput_floor: float = 0.0,
    blocks: Sequence[SearchBlock] = (),
) -> Found:
    """Find the point of `space` with the most throughput whose latency is at most the bound.

    Args:
        blocks: a division of the space (soundings.py); none: the space is one block.
        perform: pure; called once for each point that is evaluated.
        latency_bound: in seconds; infinite for none.
        throughput_floor: blocks below it are dropped: another search has found as much.
    """
    return _Search(perform, latency_bound, tolerance, throughput_floor).run(blocks or (space,))


@dataclass(slots=True)
class _Search:
    """One run of the algorithm."""

    perform: Perform
    bound: float
    tolerance: Tolerance
    most: float  # T*: the best throughput so far
    best: Point | None = None
    evaluated: dict[Point, Performance] = field(default_factory=dict)
    queue: list[tuple[float, int, SearchBlock]] = field(default_factory=list)
    numbers: count = field(default_factory=count)  # type: ignore[type-arg]

    def run(self, blocks: Sequence[SearchBlock]) -> Found:
        for block in blocks:
            if not self.at(block.upper).meets(self.bound) and self.may_hold_better(block):
                self.add(block)
        while self.queue:
            _, _, block = heapq.heappop(self.queue)
            # Line 18: T* may have risen since the block was added.
            if not self.is_too_slow(block):
                for half in block.split(self.side_to_split(block)):
                    if not self.at(half.upper).meets(self.bound) and self.may_hold_better(half):
                        self.add(half)
        return Found(best=self.best, evaluated=self.evaluated)

    def at(self, point: Point) -> Performance:
        """Evaluate a point once, and remember it if it is the best so far."""
        found = self.evaluated.get(point)
        if found is None:
            found = self.evaluated[point] = self.perform(point)
            if found.meets(self.bound) and (found.throughput > self.most or (self.best is None and self.most == 0.0)):
                self.best, self.most = point, found.throughput
        return found

    def may_hold_better(self, block: SearchBlock) -> bool:
        """Return true if the block is worth splitting (lines 14 and 18)."""
        if block.lower == block.upper or self.is_too_slow(block):
            return False
        return self.at(block.lower).latency <= self.bound * (1 + self.tolerance.latency)

    def is_too_slow(self, block: SearchBlock) -> bool:
        return self.at(block.upper).throughput + self.tolerance.throughput * self.most < self.most

    def add(self, block: SearchBlock) -> None:
        # The number keeps blocks of equal throughput in the order in which they came.
        heapq.heappush(self.queue, (-self.at(block.lower).throughput, next(self.numbers), block))

    def side_to_split(self, block: SearchBlock) -> int:
        """Return the variable whose low corner has the most throughput under the bound, or the one with the longest
        side (lines 7 to 10).
        """
        sides = block.sides
        candidates = [variable for variable, side in enumerate(sides) if side]
        figures = {variable: self.at(block.corner(variable)) for variable in candidates}
        meeting = [variable for variable in candidates if figures[variable].meets(self.bound)]
        if meeting:
            return max(meeting, key=lambda variable: figures[variable].throughput)
        return max(candidates, key=lambda variable: sides[variable])
