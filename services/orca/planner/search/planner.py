"""Finds the plan: searches every strategy on every layout by formulas, and judges the best points by simulation.

The formulas take milliseconds and are within some percent. The simulation runs the real scheduler, takes seconds, and
decides. If it shows that the formulas of a strategy err about latency, its search is repeated with a bound that is
corrected by just that ratio. Under a loose bound, both steps together give up the last percent of throughput for less
latency (least_latency.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isinf, log
from statistics import median
from typing import Protocol

from orca.core.domain.request import reserved_slots
from orca.planner.profile.step_shape import ShapeCost
from orca.planner.search.branch_and_bound import Performance, Point, SearchBlock, Tolerance
from orca.planner.search.goal import PlanGoal, ScheduleLatencies
from orca.planner.search.grid import grid_search
from orca.planner.search.least_latency import STEP_SHARE, least_latency, preferred
from orca.planner.search.soundings import sounded_search
from orca.planner.search.strategies import Strategy
from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.layout import GroupCapacity, Layout
from orca.planner.workload.workload import Workload
from orca.scheduler.policy.policy import BatchBounds

JUDGED = 10
"""Points that the simulation judges in each round."""

ALIKE = 0.005
"""Candidates of one strategy and layout whose expected figures differ less than this share are alike."""

RANKED = 4 * JUDGED
"""Points of each search that may be judged: some of them are alike."""

JUDGED_OF_EACH = 3
"""Points of each strategy among them, if it has as many that meet the bound by the formulas."""

ROUNDS = 3
"""Rounds of search and judgement: each later one has a bound corrected by the simulation."""

UNUSED_SHARE = 0.05
"""Share of a bound that a strategy may leave unused in simulation before it is searched with a looser one."""

FLOOR_SHARE = 0.9
"""Layouts that are slower than this share of the best one so far are not searched further."""

NEAR_SHARE = 0.01
"""Latencies in simulation that differ less than this share are nearly equal, at an arrival rate."""

TOLERANCE = Tolerance(throughput=0.02, latency=0.05)
"""Distances of expected values from monotone ones (ExeGPT, Table 5: 97 % of points are monotone within 5 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayout:
    """A layout with the cost of its stages and its memory."""

    layout: Layout
    costs: Sequence[ShapeCost]  # one for each stage
    capacity: GroupCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """Everything that a plan depends on. Planning is a pure function of it."""

    workload: Workload
    goal: PlanGoal
    layouts: Sequence[PlacedLayout]
    strategies: Sequence[Strategy]
    host_us: float = 0.0
    prefetch: int = 1
    is_encoder_decoder: bool = False
    wider: Callable[[int], Sequence[PlacedLayout]] | None = None  # the layouts that use exactly so many devices

    def scenario(self, placed: PlacedLayout) -> Scenario:
        return Scenario(
            workload=self.workload,
            costs=placed.costs,
            capacity=placed.capacity,
            host_us=self.host_us,
            prefetch=self.prefetch,
            is_encoder_decoder=self.is_encoder_decoder,
            percent=self.goal.percentile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that formulas have found: a point of one strategy on one layout."""

    strategy: Strategy
    placed: PlacedLayout
    scenario: Scenario
    point: Point
    expected: Estimate
    running: BatchBounds | None = None  # that a scheduler already runs with; None: those of the point
    is_loose: bool = False  # a looser bound would bring next to nothing: chosen for its latency (least_latency.py)

    @property
    def identity(self) -> tuple[Layout, str, Point]:
        return self.placed.layout, self.strategy.name, self.point

    @property
    def kind(self) -> tuple[Layout, str, int, int]:
        """Return what candidates that are alike have in common."""
        expected = self.expected
        latency = 0 if isinf(expected.latency_s) else round(log(max(expected.latency_s, 1e-9)) / ALIKE)
        return self.placed.layout, self.strategy.name, round(log(max(expected.throughput, 1e-9)) / ALIKE), latency

    @property
    def bounds(self) -> BatchBounds:
        """Return the bounds of batches that a scheduler runs with."""
        if self.running is not None:
            return self.running
        return self.strategy.bounds(self.scenario, self.point, self.expected)

    def describe(self) -> str:
        """Return the schedule in a few words: `rra: encode_batch 12, decode_steps 9; 2 stages x 2 ranks`."""
        controls = self.strategy.controls(self.point)
        words = ", ".join(f"{name} {value}" for name, value in controls.items())
        layout = self.placed.layout
        stages = "1 stage" if layout.stages == 1 else f"{layout.stages} stages"
        ranks = "" if layout.ranks == 1 else f" x {layout.ranks} ranks"
        return f"{self.strategy.name}: {words}; {stages}{ranks}"


class ScheduleFigures(ScheduleLatencies, Protocol):
    """The figures of a schedule in simulation: latencies at the wanted percentile, and requests per second."""

    @property
    def throughput(self) -> float: ...


Judge = Callable[[Candidate], ScheduleFigures | None]
"""Simulates a schedule exactly; None if it has no steady state that could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate and its figures in simulation."""

    candidate: Candidate
    judgement: ScheduleFigures
    pressure: float  # its largest ratio of a latency to its bound
    is_confirmed: bool = True  # by the longer simulation, if there is one

    @property
    def is_met(self) -> bool:
        return self.pressure <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of planning."""

    chosen: Judged  # the schedule to run; if none meets the goal, the one that comes closest
    judged: Sequence[Judged]  # all that were simulated, in the order of their judgement
    best: Sequence[Candidate]  # by the formulas: the best point of each strategy and layout, the best one first
    evaluated: int  # points that formulas have estimated
    points: int  # of all spaces together
    front: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # strategy -> (latency s, requests/s)

    @property
    def is_met(self) -> bool:
        return self.chosen.is_met


NO_STEADY_STATE = (
    "schedules were found, but a simulation of them comes to no steady state: too many requests would be in flight. "
    "Lower the largest batch size"
)
"""The reason for no plan where requests fit."""


@dataclass(slots=True)
class _SearchResult:
    """The result of one round of searches."""

    candidates: list[Candidate] = field(default_factory=list)  # those that meet the bound, the best one first
    best: dict[tuple[Layout, str], Candidate] = field(default_factory=dict)  # by layout and strategy
    closest: Candidate | None = None  # the one with the least pressure
    meeting: int = 0  # points that meet the bound
    points: int = 0


class NothingFits(Exception):
    """No layout can hold the requests of the workload, or no schedule can be simulated."""


def make_plan(
    problem: PlanProblem,
    judge: Judge,
    report: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    *,
    confirm: Judge | None = None,
) -> Outcome:
    """Find the schedule with the most throughput that meets the goal in simulation.

    Args:
        judge: the exact simulation.
        report: called with a line of progress now and then.
        confirm: a longer simulation of the best schedules; None: that of `judge` is enough.
    Raises: NothingFits with the reason.
    """
    planner, judgements = _Planner(problem), _Judgements(problem.goal, judge, confirm, report)
    bounds = dict.fromkeys((strategy.name for strategy in problem.strategies), 1.0)
    found = first = planner.search_all(bounds)
    for number in range(ROUNDS):
        report(f"search {number + 1}: {planner.evaluated:,} of {found.points:,} points, {found.meeting} in bound")
        new = judgements.judge(_picks(found.candidates))
        corrected = {name: bound * _correction(problem.goal, name, new) for name, bound in bounds.items()}
        if corrected == bounds:
            break
        bounds, found = corrected, planner.search_all(corrected)
    if not judgements.has_met and first.closest is not None:
        judgements.judge([first.closest])
    if not judgements.judged:
        raise NothingFits(planner.complaint() if first.closest is None else NO_STEADY_STATE)
    return Outcome(
        chosen=judgements.chosen(),
        judged=judgements.judged,
        best=sorted(first.best.values(), key=lambda each: -each.expected.capacity),
        evaluated=planner.evaluated,
        points=first.points,
        front={name: pareto(points) for name, points in planner.seen.items()},
    )


@dataclass(slots=True)
class _Judgements:
    """The schedules that were simulated. A schedule is simulated once, and those that may be the plan for longer."""

    goal: PlanGoal
    by: Judge
    confirm: Judge | None
    report: Callable[[str], None]
    judged: list[Judged] = field(default_factory=list)

    @property
    def has_met(self) -> bool:
        """Return true if a schedule meets the goal for sure."""
        return any(each.is_met and each.is_confirmed for each in self.judged)

    def judge(self, candidates: Iterable[Candidate]) -> list[Judged]:
        """Simulate those that were not simulated before, and confirm the best one. Returns: their figures."""
        known = {each.candidate.identity for each in self.judged}
        new = []
        for candidate in candidates:
            if candidate.identity not in known:
                found = self._simulate(candidate, self.by, is_confirmed=self.confirm is None)
                new += [] if found is None else [found]
        first = len(self.judged)
        self.judged += new
        self._confirm_best(new)
        return self.judged[first:]

    def chosen(self) -> Judged:
        """Return the best one of those that are confirmed; if none of them meets the goal, the closest one."""
        if not self.has_met:
            self._confirm(_choose(self.judged, self.goal.rate))
        sure = [each for each in self.judged if each.is_confirmed]
        return _choose(sure or self.judged, self.goal.rate)

    def _confirm_best(self, judged: Iterable[Judged]) -> None:
        """Confirm one schedule after the other, the best one first, until one of them meets the goal."""
        left = [each for each in judged if each.is_met]
        while left:
            best = _choose(left, self.goal.rate)
            if self._confirm(best).is_met:
                return
            left.remove(best)

    def _confirm(self, judged: Judged) -> Judged:
        """Return the figures of the longer simulation. Without a steady state in it, the old ones count."""
        if judged.is_confirmed or self.confirm is None:
            return judged
        found = self._simulate(judged.candidate, self.confirm, is_confirmed=True) or replace(judged, is_confirmed=True)
        self.judged[self.judged.index(judged)] = found
        return found

    def _simulate(self, candidate: Candidate, judge: Judge, *, is_confirmed: bool) -> Judged | None:
        figures = judge(candidate)
        if figures is None:
            self.report(f"  {candidate.describe()}: no steady state to measure")
            return None
        again = "confirmed, " if is_confirmed and self.confirm is not None else ""
        words = f"{figures.throughput:.3g} requests/s, {figures.latency_s:.3g} s"
        self.report(f"  {candidate.describe()}: {again}{words}")
        return Judged(
            candidate=candidate,
            judgement=figures,
            pressure=self.goal.pressure(figures),
            is_confirmed=is_confirmed,
        )


def _picks(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the ten best ones, and of those that are alike only the best, if there are enough others.

    At least some are of each strategy: the formulas of two strategies err differently.
    """
    different: dict[tuple[Layout, str, int, int], Candidate] = {}
    for each in candidates:
        different.setdefault(each.kind, each)
    chosen = list(different.values())
    picked = [*chosen[:JUDGED], *[each for each in candidates if different[each.kind] is not each]][:JUDGED]
    for name in dict.fromkeys(each.strategy.name for each in chosen):
        best = [each for each in chosen if each.strategy.name == name][:JUDGED_OF_EACH]
        picked += [each for each in best if each not in picked]
    return picked


def _choose(judged: Iterable[Judged], rate: float | None) -> Judged:
    """Return the best one of those that meet the goal; if there is none, the closest one."""
    meeting = sorted((each for each in judged if each.is_met), key=lambda each: each.candidate.bounds.max_batch_size)
    if not meeting:
        return min(judged, key=lambda each: each.pressure)
    if rate is None:
        return preferred(meeting, lambda each: each.judgement.throughput, lambda each: each.judgement.latency_s)
    # All of them serve just that rate. Of nearly equal latencies, the one that could serve the most has most to spare.
    least = min(each.judgement.latency_s for each in meeting)
    near = [each for each in meeting if each.judgement.latency_s * (1 - NEAR_SHARE) <= least]
    return max(near, key=lambda each: each.candidate.expected.capacity)


def _correction(goal: PlanGoal, name: str, judged: Sequence[Judged]) -> float:
    """Return the factor of the bound for the next search of a strategy.

    It is the ratio of expected to simulated pressure, if that matters. This is so if all schedules of the round break
    the goal, or if all leave much of it unused that would bring throughput. Otherwise it is 1.
    """
    own = [each for each in judged if each.candidate.strategy.name == name]
    ratios = [goal.pressure(each.candidate.expected) / each.pressure for each in own if 0 < each.pressure < inf]
    ratio = median(ratios) if ratios else 0.9
    if own and not any(each.is_met for each in own):
        return min(ratio, 0.98)
    if not own or goal.rate is not None or max(own, key=lambda each: each.judgement.throughput).candidate.is_loose:
        return 1.0
    if ratios and max(each.pressure for each in own) < 1 - UNUSED_SHARE:
        return max(ratio, 1.0)
    return 1.0


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both: less latency, more throughput. Rising in both."""
    front: list[tuple[float, float]] = []
    for latency, throughput in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or throughput > front[-1][1]:
            front.append((latency, throughput))
    return front


def most_slots(scenario: Scenario) -> int:
    """Return the most KV slots of a request."""
    workload, start = scenario.workload, int(scenario.is_encoder_decoder)
    prompt = workload.prompts.high
    longest = reserved_slots(workload.longest + start, prompt * start, scenario.capacity.block_tokens)
    return max(longest, *(slots for _, slots in scenario.pair_slots))


def spaces_of(strategy: Strategy, scenario: Scenario) -> Sequence[SearchBlock]:
    """Return what to search; nothing if the longest request of the workload does not fit."""
    if most_slots(scenario) > scenario.capacity.slots:
        return ()
    return strategy.spaces(scenario, scenario.places)


def performance_of(goal: PlanGoal, expected: Estimate) -> Performance:
    """Return the figures that a search compares; its latency is the pressure on the goal.

    At an arrival rate all schedules that keep up serve the same. There the one with the least latency counts as the one
    with the most throughput.
    """
    throughput = expected.capacity if goal.rate is None else 1 / max(expected.latency_s, 1e-9)
    return Performance(goal.pressure(expected) if expected.fits else inf, throughput)


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """The points of one strategy on one layout that are searched together."""

    strategy: Strategy
    number: int  # of the layout
    block: SearchBlock


class _Planner:
    """The searches of one problem. Points are estimated once, whatever the bound."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._scenarios = [problem.scenario(placed) for placed in problem.layouts]
        self._estimates: list[dict[tuple[str, Point], Estimate]] = [{} for _ in problem.layouts]
        self.seen: dict[str, list[tuple[float, float]]] = {strategy.name: [] for strategy in problem.strategies}
        self.evaluated = 0

    def search_all(self, bounds: Mapping[str, float]) -> _SearchResult:
        """Search each strategy on each layout. Args: bounds: of each strategy's pressure; 1 is the goal itself."""
        result = _SearchResult()
        most = dict.fromkeys(bounds, 0.0)
        rankings: list[tuple[_Space, list[Candidate]]] = []
        for space in self._spaces():
            name = space.strategy.name
            if ranking := self._search(space, bounds[name], most[name] * FLOOR_SHARE, result):
                rankings.append((space, ranking))
                most[name] = max(most[name], ranking[0].expected.capacity)
        leading = _leading([ranking[0] for _, ranking in rankings])
        for space, ranking in rankings:
            if ranking[0].identity in leading:
                found = self._least_latency(space, ranking[0], bounds[space.strategy.name], max(most.values()))
                result.candidates += ranking if found is None else _no_slower(found, ranking)
        result.candidates.sort(key=_order)
        for each in result.candidates:
            result.best.setdefault((each.placed.layout, each.strategy.name), each)
        return result

    def complaint(self) -> str:
        """Return the reason why no layout can run the workload."""
        most = max((placed.capacity.slots for placed in self._problem.layouts), default=0)
        if not self._problem.layouts:
            return "no layout is possible on these devices"
        needed = max(map(most_slots, self._scenarios))
        return f"a request of the workload needs up to {needed} KV slots, and no layout has more than {most}"

    def _spaces(self) -> Iterator[_Space]:
        for number, scenario in enumerate(self._scenarios):
            for strategy in self._problem.strategies:
                for block in spaces_of(strategy, scenario):
                    yield _Space(strategy, number, block)

    def _search(self, space: _Space, bound: float, floor: float, result: _SearchResult) -> list[Candidate]:
        """Search one space. Returns: points that meet the bound, the best ones first."""
        goal = self._problem.goal

        def perform(point: Point) -> Performance:
            return performance_of(goal, self._estimate(space, point))

        if goal.rate is None:
            found = sounded_search(
                space.block, perform, latency_bound=bound, tolerance=TOLERANCE, throughput_floor=floor
            )
        else:
            found = grid_search(space.block, perform, latency_bound=bound)
        ranking = found.ranking(bound)
        result.points += space.block.points
        result.meeting += len(ranking)
        for point in found.evaluated:
            expected = self._estimate(space, point)
            if expected.fits and (result.closest is None or self._is_closer(expected, result.closest.expected)):
                result.closest = self._candidate(space, point)
        return [self._candidate(space, point) for point in ranking[:RANKED]]

    def _least_latency(self, space: _Space, best: Candidate, bound: float, most: float) -> Candidate | None:
        """Return the candidate with the least latency that lacks at most STEP_SHARE of the throughput.

        Args:
            best: of this space.
            most: the most throughput of all spaces.
        Returns: None if the bound is tight.
        """
        goal = self._problem.goal
        if goal.rate is not None:
            return None  # the grid has found the least latency already
        own, near = best.expected.capacity, (1 - STEP_SHARE) * most
        wanted = near if own >= near else (1 - STEP_SHARE) * own

        def perform(point: Point) -> Performance:
            expected = self._estimate(space, point)
            is_met = performance_of(goal, expected).latency <= bound
            return Performance(expected.latency_s if is_met else inf, expected.capacity)

        found = least_latency(space.block.lower, best.point, perform, throughput=wanted)
        return None if found is None else replace(self._candidate(space, found), is_loose=True)

    def _estimate(self, space: _Space, point: Point) -> Estimate:
        known, key = self._estimates[space.number], (space.strategy.name, point)
        expected = known.get(key)
        if expected is None:
            expected = space.strategy.estimate(self._scenarios[space.number], point, self._problem.goal.rate)
            known[key] = expected
            self.evaluated += 1
            if expected.fits and isfinite(expected.latency_s):
                self.seen[space.strategy.name].append((expected.latency_s, expected.capacity))
        return expected

    def _candidate(self, space: _Space, point: Point) -> Candidate:
        return Candidate(
            strategy=space.strategy,
            placed=self._problem.layouts[space.number],
            scenario=self._scenarios[space.number],
            point=point,
            expected=self._estimate(space, point),
        )

    def _is_closer(self, one: Estimate, other: Estimate) -> bool:
        """Return true if a schedule is closer to the goal; of two that are endless, the one that serves more is."""
        pressure = self._problem.goal.pressure
        return (pressure(one), -one.capacity) < (pressure(other), -other.capacity)


def _order(candidate: Candidate) -> tuple[float, float, float]:
    """Return the key of the order of candidates: most throughput, least latency, most capacity to spare."""
    expected = candidate.expected
    return -expected.throughput, expected.latency_s, -expected.capacity


def _leading(heads: Iterable[Candidate]) -> set[tuple[Layout, str, Point]]:
    """Return those of the best points of all spaces whose space may have points to judge, or the best of a layout."""
    ordered = sorted(heads, key=_order)
    of_layouts: dict[tuple[Layout, str], Candidate] = {}
    for each in ordered:
        of_layouts.setdefault((each.placed.layout, each.strategy.name), each)
    return {each.identity for each in (*_picks(ordered), *of_layouts.values())}


def _no_slower(found: Candidate, ranking: Iterable[Candidate]) -> list[Candidate]:
    """Return a candidate, then those that have less latency than it.

    The others, the best point among them, have the largest batches: their simulation would take most of the time. So
    only the formulas say how much throughput the candidate gives up against them.
    """
    return [found, *[each for each in ranking if each.expected.latency_s < found.expected.latency_s]]
