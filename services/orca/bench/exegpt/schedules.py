"""The best schedule of each strategy in one setting of the paper, for any latency bound.

The search is the planner's, on a thinned grid: neighbouring values differ by about a tenth. Layouts use all devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from types import MappingProxyType

from orca.bench.exegpt.setups import Setup
from orca.planner.search.branch_and_bound import Performance, Point, SearchBlock
from orca.planner.search.planner import FLOOR_SHARE, TOLERANCE, Candidate, PlacedLayout
from orca.planner.search.soundings import sounded_search
from orca.planner.search.strategies import STRATEGIES, WHOLE, IterationStrategy, RoundRobinStrategy, Strategy
from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.rra import estimate_rra
from orca.planner.workload.workload import Workload

VALUES = 48
"""Most values of a variable on the thinned grid."""


@dataclass(frozen=True, slots=True)
class PaperFormulas(RoundRobinStrategy):
    """Round-robin allocation by the formulas of the paper."""

    def estimate(self, scenario: Scenario, point: Point, rate: float | None) -> Estimate:
        return estimate_rra(scenario, point[0], -point[1], rate=rate, formula="paper")


SYSTEMS: Mapping[str, Strategy] = MappingProxyType(
    {"RRA": STRATEGIES["rra"], "RRA, formulas of the paper": PaperFormulas(), "iteration": STRATEGIES["iteration"]}
)
"""Strategies by the names of figures."""


@dataclass(frozen=True, slots=True)
class ThinnedSpace:
    """A space of which some values of each variable are searched. Its points are places in these values."""

    values: Sequence[Sequence[int]]  # of each variable, rising

    @staticmethod
    def of(space: SearchBlock, count: int | None) -> "ThinnedSpace":
        """Return values in nearly equal ratios, counted from the end of the variable that is nearer to 0.

        Args: count: most of each variable; None: all.
        """
        return ThinnedSpace(
            [_thinned(low, high, count) for low, high in zip(space.lower, space.upper, strict=True)],
        )

    @property
    def block(self) -> SearchBlock:
        return SearchBlock((0,) * len(self.values), tuple(len(values) - 1 for values in self.values))

    def point(self, place: Point) -> Point:
        return tuple(values[index] for values, index in zip(self.values, place, strict=True))


def _thinned(low: int, high: int, count: int | None) -> list[int]:
    if count is None or high - low < count:
        return list(range(low, high + 1))
    if high < 0:  # decode steps count backwards
        return sorted(-value for value in _thinned(-high, -low, count))
    ratio = (high / max(low, 1)) ** (1 / (count - 1))
    return sorted({round(max(low, 1) * ratio**number) for number in range(count)} | {low, high})


@dataclass(eq=False)
class Schedules:
    """All schedules of a model on its devices for one workload. Points are estimated once, whatever the bound."""

    setup: Setup
    workload: Workload
    degrees: Sequence[int] | None = None  # None: all that use all devices
    values: int | None = VALUES  # most values of a variable; None: all
    evaluated: int = 0
    _known: dict[tuple[str, int, Point], Estimate] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> Sequence[PlacedLayout]:
        """All layouts, those with much tensor parallelism first: only they reach tight bounds."""
        degrees = self.setup.degrees() if self.degrees is None else self.degrees
        return [self.setup.placed(ranks, self.workload) for ranks in sorted(degrees, reverse=True)]

    @cached_property
    def scenarios(self) -> Sequence[Scenario]:
        return [self.setup.scenario(placed.layout.ranks, self.workload) for placed in self.layouts]

    def best(self, system: str, bound_s: float) -> Candidate | None:
        """Return the schedule with the most throughput within a bound, by formulas; None if there is none."""
        best: Candidate | None = None
        for number, placed in enumerate(self.layouts):
            for space in self.spaces(SYSTEMS[system], number):
                floor = 0.0 if best is None else FLOOR_SHARE * best.expected.throughput
                found = self._search(system, number, space, bound_s, floor)
                if found is None:
                    continue
                expected = self._known[system, number, found]
                if best is None or expected.throughput > best.expected.throughput:
                    best = Candidate(
                        strategy=SYSTEMS[system],
                        placed=placed,
                        scenario=self.scenarios[number],
                        point=found,
                        expected=expected,
                    )
        return best

    def spaces(self, strategy: Strategy, number: int) -> Sequence[SearchBlock]:
        """Return the spaces of a strategy on a layout. Of the chunks of `iteration`, every other one is enough."""
        scenario = self.scenarios[number]
        spaces = strategy.spaces(scenario, scenario.places)
        if not isinstance(strategy, IterationStrategy):
            return spaces
        return [space for space in spaces if space.lower[1] == WHOLE or not space.lower[1] % 2]

    def perform(self, system: str, number: int) -> Callable[[Point], Performance]:
        """Return the function that a search calls for the points of a layout."""
        strategy, scenario = SYSTEMS[system], self.scenarios[number]

        def performance(point: Point) -> Performance:
            found = self._known.get((system, number, point))
            if found is None:
                found = self._known[system, number, point] = strategy.estimate(scenario, point, None)
                self.evaluated += 1
            return Performance(found.latency_s if found.fits else inf, found.throughput)

        return performance

    def _search(self, system: str, number: int, space: SearchBlock, bound_s: float, floor: float) -> Point | None:
        thinned, perform = ThinnedSpace.of(space, self.values), self.perform(system, number)
        found = sounded_search(
            thinned.block,
            lambda place: perform(thinned.point(place)),
            latency_bound=bound_s,
            tolerance=TOLERANCE,
            throughput_floor=floor,
        )
        return None if found.best is None else thinned.point(found.best)
