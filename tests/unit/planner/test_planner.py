"""Planning: goals, layouts, strategies, and the choice among judged schedules."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import pytest

from orca.core.domain.errors import BadValue, SettingError
from orca.core.domain.step import Step
from orca.core.even_parts import even_parts
from orca.planner.profile.step_shape import StepShape
from orca.planner.search.branch_and_bound import Performance, SearchBlock, search
from orca.planner.search.goal import PlanGoal
from orca.planner.search.grid import grid_values
from orca.planner.search.judge import STRATUM, SimulationJudge
from orca.planner.search.layouts import balanced, layouts
from orca.planner.search.least_latency import SPARED_SHARE, STEP_SHARE
from orca.planner.search.plan import Plan, PlannedDevice, from_json, lines, to_json
from orca.planner.search.planner import (
    JUDGED,
    TOLERANCE,
    Candidate,
    NothingFits,
    Outcome,
    PlacedLayout,
    PlanProblem,
    make_plan,
    pareto,
    performance_of,
    spaces_of,
)
from orca.planner.search.strategies import STRATEGIES, WHOLE, BatchLimit
from orca.planner.search.timeline_of import timeline_of
from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.layout import GroupCapacity, Layout
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import Trace, TraceSpec, generate
from orca.planner.workload.workload import Workload
from support.planner.linear_shapes import LinearShapes, linear_shapes
from support.planner.profiles import key

SHORT = Workload.of_lengths(Range(8, 40), Range(2, 20))


@dataclass(frozen=True)
class Figures:
    """The figures of a schedule, stated by a test."""

    throughput: float = 1.0
    latency_s: float = 1.0
    ttft_s: float = 0.1
    tpot_s: float = 0.05
    details: Mapping[str, float] = field(default_factory=dict)


def placed(stages: int = 2, *, slots: int = 4096, step_us: int = 2_000, token_us: int = 50) -> PlacedLayout:
    cost = linear_shapes(step_us=step_us // stages, token_us=token_us // stages)
    return PlacedLayout(
        layout=Layout(even_parts(8, stages)),
        costs=[cost] * stages,
        capacity=GroupCapacity(slots=slots, max_model_len=256),
    )


def problem(goal: PlanGoal, *, workload: Workload = SHORT, layout: PlacedLayout | None = None) -> PlanProblem:
    return PlanProblem(
        workload=workload, goal=goal, layouts=[layout or placed()], strategies=list(STRATEGIES.values()), prefetch=1
    )


def every_point(space: SearchBlock) -> list[tuple[int, ...]]:
    return list(product(*(range(low, high + 1) for low, high in zip(space.lower, space.upper, strict=True))))


def as_expected(candidate: Candidate) -> Figures:
    """Judge a schedule as its formulas do."""
    expected = candidate.expected
    return Figures(expected.throughput, expected.latency_s, expected.ttft_s, expected.tpot_s)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"latency_ms": 0.0}, "latency_ms"),
        ({"latency_ms": -1.0}, "latency_ms"),
        ({"latency_ms": math.nan}, "latency_ms"),
        ({"latency_ms": 1.0, "percentile": 49}, "percentile"),
        ({"latency_ms": 1.0, "percentile": 100}, "percentile"),
        ({"latency_ms": 1.0, "kind": "mean"}, "kind"),
        ({"latency_ms": 1.0, "kind": "requests"}, "rate"),
        ({"latency_ms": 1.0, "rate": 2.0}, "rate"),
        ({"latency_ms": 1.0, "kind": "requests", "rate": 0.0}, "rate"),
        ({"latency_ms": 1.0, "ttft_ms": 0.0}, "ttft_ms"),
        ({"latency_ms": 1.0, "tpot_ms": -2.0}, "tpot_ms"),
        ({"latency_ms": 1.0, "margin_percent": 100.0}, "margin_percent"),
    ],
)
def test_a_goal_that_makes_no_sense_is_refused_by_name(values: dict[str, object], name: str) -> None:
    with pytest.raises(BadValue) as caught:
        PlanGoal(**values)  # type: ignore[arg-type]
    assert caught.value.name == name


def test_every_bound_counts() -> None:
    figures = Figures(latency_s=4.0, ttft_s=0.5, tpot_s=0.1)
    assert PlanGoal(latency_ms=8_000).pressure(figures) == pytest.approx(0.5)
    assert PlanGoal(latency_ms=8_000, margin_percent=20).pressure(figures) == pytest.approx(0.625)
    assert PlanGoal(latency_ms=8_000, ttft_ms=250).pressure(figures) == pytest.approx(2.0)
    assert PlanGoal(latency_ms=math.inf, tpot_ms=200).pressure(figures) == pytest.approx(0.5)
    assert PlanGoal(latency_ms=math.inf).pressure(figures) == 0.0
    assert PlanGoal(latency_ms=math.inf).pressure(Figures(latency_s=math.inf)) == math.inf


def test_layouts_use_up_to_all_devices() -> None:
    found = {(layout.stages, layout.ranks) for layout in layouts(10, 4, (1, 2, 4))}
    assert found == {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)}
    assert [layout.layers for layout in layouts(10, 4, (1,))][3] == (3, 3, 2, 2)
    # A model of two layers has at most two stages.
    assert max(layout.stages for layout in layouts(2, 8, (1,))) == 2


def test_layers_move_away_from_the_slowest_stage() -> None:
    """The last stage has an output head that costs as much as two layers."""

    def costs_of(layout: Layout) -> list[LinearShapes]:
        head = [0] * (layout.stages - 1) + [2_000]
        return [linear_shapes(step_us=1_000 * layers + more) for layers, more in zip(layout.layers, head, strict=True)]

    assert balanced(Layout((6, 6)), costs_of, [(1.0, StepShape(increments=1))]).layers == (7, 5)
    # 14 layers' worth of work on three stages: the slowest has at least 5.
    three = balanced(Layout((4, 4, 4)), costs_of, [(1.0, StepShape(increments=1))]).layers
    assert sum(three) == 12
    assert max(three[0], three[1], three[2] + 2) == 5
    assert balanced(Layout((1, 1)), costs_of, [(1.0, StepShape(increments=1))]).layers == (1, 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_larger_variables_mean_more_throughput_and_more_latency(name: str) -> None:
    strategy, scenario = STRATEGIES[name], problem(PlanGoal(latency_ms=1_000)).scenario(placed())
    for space in strategy.spaces(scenario, 40):
        lower, upper = (strategy.estimate(scenario, point, None) for point in (space.lower, space.upper))
        assert upper.throughput > lower.throughput
        assert upper.latency_s > lower.latency_s


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_limit_of_batches_holds_at_every_point(name: str) -> None:
    scenario, limited = problem(PlanGoal(latency_ms=1_000)).scenario(placed()), BatchLimit(STRATEGIES[name], 4)
    found = [point for space in limited.spaces(scenario, 40) for point in every_point(space)]
    sizes = []
    for point in found:
        expected = limited.estimate(scenario, point, None)
        size = limited.bounds(scenario, point, expected).max_batch_size
        assert expected.fits == (size <= 4 and STRATEGIES[name].estimate(scenario, point, None).fits)
        sizes += [size] if expected.fits else []
    assert max(sizes) == 4


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_keeps_to_a_limit_of_batches(name: str) -> None:
    goal = PlanGoal(latency_ms=1e9)
    wide, narrow = (
        make_plan(dataclasses.replace(problem(goal), strategies=[each]), as_expected, lambda _: None)
        for each in (STRATEGIES[name], BatchLimit(STRATEGIES[name], 4))
    )
    assert wide.chosen.candidate.bounds.max_batch_size > 4
    assert narrow.chosen.candidate.bounds.max_batch_size <= 4


def test_controls_are_those_of_the_scheduler() -> None:
    scenario = problem(PlanGoal(latency_ms=1_000)).scenario(placed())
    rra = STRATEGIES["rra"]
    bounds = rra.bounds(scenario, (3, -5), rra.estimate(scenario, (3, -5), None))
    assert rra.controls((3, -5)) == {"encode_batch": 3, "decode_steps": 5}
    assert bounds.cycle is not None
    assert (bounds.cycle.encode_batch, bounds.cycle.decode_steps) == (3, 5)
    assert bounds.cycle.encode_tokens == 3 * 24
    assert bounds.cycle.broken_rule(stages=2, max_batch_size=bounds.max_batch_size) is None
    iteration = STRATEGIES["iteration"]
    spaces = iteration.spaces(scenario, 40)
    # Prompts have up to 40 tokens: whole, or in chunks of 16, 24 or 32.
    assert [iteration.controls(space.upper) for space in spaces] == [
        {"max_batch_size": 20},
        {"max_batch_size": 20, "max_batch_tokens": 36},
        {"max_batch_size": 20, "max_batch_tokens": 44},
        {"max_batch_size": 20, "max_batch_tokens": 52},
    ]


def test_the_schedule_with_the_most_throughput_within_the_bound_is_chosen() -> None:
    goal = PlanGoal(latency_ms=150.0)
    outcome = make_plan(problem(goal), as_expected)
    assert outcome.is_met
    assert outcome.chosen.judgement.latency_s <= 0.15
    best = max(each.judgement.throughput for each in outcome.judged if each.is_met)
    assert outcome.chosen.judgement.throughput == best
    # A looser bound never gives less, but for what it gives up for latency.
    looser = make_plan(problem(PlanGoal(latency_ms=400.0)), as_expected).chosen.judgement.throughput
    assert looser >= (1 - SPARED_SHARE) * best
    assert outcome.evaluated < 0.2 * outcome.points
    assert {candidate.strategy.name for candidate in outcome.best} == {"iteration", "rra"}


def searched(wanted: PlanProblem, name: str, bound: float = 1.0) -> float:
    """Return the most throughput that branch and bound finds for one strategy, whatever its latency."""
    scenario, strategy = wanted.scenario(wanted.layouts[0]), STRATEGIES[name]

    def perform(point: tuple[int, ...]) -> Performance:
        return performance_of(wanted.goal, strategy.estimate(scenario, point, None))

    found = [
        search(space, perform, latency_bound=bound, tolerance=TOLERANCE) for space in spaces_of(strategy, scenario)
    ]
    return max(each.evaluated[each.best].throughput for each in found if each.best is not None)


AT_A_RATE = PlanGoal(latency_ms=400.0, kind="requests", rate=20.0)

SATURATED = placed(slots=1 << 17, step_us=200, token_us=50)
"""A layout that has nearly all of its throughput with a part of the batches that its slots have room for."""


@pytest.mark.parametrize("latency_ms", [math.inf, 1e9])
@pytest.mark.parametrize("name", STRATEGIES)
def test_under_a_loose_bound_the_last_percent_of_throughput_is_given_up_for_latency(
    name: str, latency_ms: float
) -> None:
    wanted = problem(PlanGoal(latency_ms=latency_ms), layout=SATURATED)
    wanted = dataclasses.replace(wanted, strategies=[STRATEGIES[name]])
    outcome = make_plan(wanted, as_expected)
    chosen = outcome.chosen.candidate
    space, *_ = spaces_of(STRATEGIES[name], wanted.scenario(SATURATED))
    corner = STRATEGIES[name].estimate(chosen.scenario, space.upper, None)
    largest = STRATEGIES[name].bounds(chosen.scenario, space.upper, corner).max_batch_size
    assert chosen.is_loose
    assert chosen.expected.throughput >= (1 - SPARED_SHARE) * searched(wanted, name)
    # Each of both steps gives up its half.
    fastest = max(each.judgement.throughput for each in outcome.judged)
    assert fastest >= (1 - STEP_SHARE) * searched(wanted, name)
    assert outcome.chosen.judgement.throughput >= (1 - STEP_SHARE) * fastest
    assert chosen.expected.latency_s < 0.5 * corner.latency_s
    assert chosen.bounds.max_batch_size < 0.5 * largest
    # All that is simulated and listed is as lean.
    assert all(each.candidate.expected.latency_s < 0.9 * corner.latency_s for each in outcome.judged)
    assert all(each.expected.latency_s < 0.9 * corner.latency_s for each in outcome.best)


@dataclass(frozen=True)
class Crowded:
    """The cost of a stage whose rows cost more the more of them there are, as beyond a processor's cache."""

    linear: LinearShapes
    row_us: float

    def stage_us(self, step: Step) -> int:
        return self.linear.stage_us(step)

    def shape_us(self, shape: StepShape) -> float:
        return self.linear.shape_us(shape) + self.row_us * shape.tokens**2


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_batch_below_the_largest_is_the_plan_where_it_is_faster(name: str) -> None:
    whole, strategy = placed(slots=1 << 17), STRATEGIES[name]
    crowded = replace(whole, costs=[Crowded(linear_shapes(step_us=1_000, token_us=25), 0.5)] * 2)
    scenario = problem(PlanGoal(latency_ms=math.inf), layout=crowded).scenario(crowded)
    some = [
        strategy.estimate(scenario, (size, *space.upper[1:]), None)
        for space in spaces_of(strategy, scenario)
        for size in (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 1024)
    ]
    for latency_ms in (200.0, 400.0, 10_000.0, math.inf):
        wanted = replace(problem(PlanGoal(latency_ms=latency_ms), layout=crowded), strategies=[strategy])
        found = make_plan(wanted, as_expected).chosen.candidate.expected.throughput
        most = max(each.capacity for each in some if 1000 * each.latency_s <= latency_ms)
        assert found >= (1 - SPARED_SHARE - TOLERANCE.throughput) * most


@pytest.mark.parametrize("latency_ms", [60.0, 150.0])
def test_under_a_tight_bound_the_plan_has_all_throughput(latency_ms: float) -> None:
    wanted = problem(PlanGoal(latency_ms=latency_ms))
    outcome = make_plan(wanted, as_expected)
    assert not any(each.candidate.is_loose for each in outcome.judged)
    assert outcome.chosen.judgement.throughput == max(searched(wanted, name) for name in STRATEGIES)


def test_the_simulation_confirms_what_a_loose_bound_gives_up() -> None:
    goal, layout = PlanGoal(latency_ms=math.inf), placed(slots=1 << 13, step_us=200, token_us=50)
    strategy, wanted = STRATEGIES["iteration"], problem(goal, layout=layout)
    judge, scenario = SimulationJudge(goal=goal, answers=40), wanted.scenario(layout)
    chosen = make_plan(dataclasses.replace(wanted, strategies=[strategy]), judge).chosen
    [space, *_] = spaces_of(strategy, scenario)
    largest = judge(
        Candidate(
            strategy=strategy,
            placed=layout,
            scenario=scenario,
            point=space.upper,
            expected=strategy.estimate(scenario, space.upper, None),
        )
    )
    assert largest is not None
    assert chosen.judgement.throughput >= 0.98 * largest.throughput
    assert chosen.judgement.latency_s <= 0.9 * largest.latency_s


def test_at_a_rate_the_schedule_with_the_least_latency_is_chosen() -> None:
    """All schedules that keep up serve the same, so the one with the most capacity has no more throughput."""
    goal = PlanGoal(latency_ms=math.inf, kind="requests", rate=20.0)
    outcome, scenario = make_plan(problem(goal), as_expected), problem(goal).scenario(placed())
    least = min(
        STRATEGIES[name].estimate(scenario, point, goal.rate).latency_s
        for name in STRATEGIES
        for space in spaces_of(STRATEGIES[name], scenario)
        for point in every_point(space)
        if sum(point) % 19 == 0
    )
    assert outcome.chosen.judgement.throughput == 20.0
    assert outcome.chosen.judgement.latency_s <= 1.05 * least


def test_the_simulation_decides_and_the_search_is_corrected_by_it() -> None:
    """ScheduleLatencies are twice those of the formulas, so the first round's picks all break the bound."""

    def judge(candidate: Candidate) -> Figures:
        figures = as_expected(candidate)
        return dataclasses.replace(figures, latency_s=2 * figures.latency_s)

    outcome = make_plan(problem(PlanGoal(latency_ms=150.0)), judge)
    assert not outcome.judged[0].is_met
    assert outcome.is_met
    assert outcome.chosen.candidate.expected.latency_s <= 0.075


def test_a_bound_that_nothing_meets_gives_the_closest_schedule_and_says_so() -> None:
    outcome = make_plan(problem(PlanGoal(latency_ms=1.0)), as_expected)
    assert not outcome.is_met
    assert outcome.chosen.pressure == min(each.pressure for each in outcome.judged)
    # A single request at a time is the fastest.
    assert (
        outcome.chosen.judgement.latency_s
        <= as_expected(outcome.best[0] if outcome.best else outcome.chosen.candidate).latency_s
    )


def test_requests_that_fit_nowhere_are_named() -> None:
    with pytest.raises(NothingFits, match=r"needs up to 64 KV slots, and no layout has more than 32"):
        make_plan(problem(PlanGoal(latency_ms=1_000.0), layout=placed(slots=32)), as_expected)


def test_schedules_that_come_to_no_steady_state_are_no_lack_of_room() -> None:
    with pytest.raises(NothingFits, match="a simulation of them comes to no steady state: too many requests"):
        make_plan(problem(PlanGoal(latency_ms=1_000.0)), lambda candidate: None)  # noqa: ARG005


@pytest.mark.parametrize(("goal", "strata"), [(PlanGoal(latency_ms=400.0), {STRATUM}), (AT_A_RATE, {None})])
def test_lengths_are_spread_evenly_unless_requests_queue(
    goal: PlanGoal, strata: set[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue grows where long requests happen to follow each other."""
    asked: list[TraceSpec] = []

    def noted(spec: TraceSpec) -> Trace:
        asked.append(spec)
        return generate(spec)

    monkeypatch.setattr("orca.planner.search.judge.generate", noted)
    assert make_plan(problem(goal), SimulationJudge(goal=goal, answers=40)).is_met
    assert {spec.stratum for spec in asked} == strata


def test_all_lengths_may_be_equal() -> None:
    workload = Workload.of_lengths(Range(16, 16), Range(8, 8))
    assert make_plan(problem(PlanGoal(latency_ms=200.0), workload=workload), as_expected).is_met
    single = Workload.of_lengths(Range(16, 16), Range(1, 1))
    assert make_plan(problem(PlanGoal(latency_ms=200.0), workload=single), as_expected).is_met


def test_the_front_rises_in_both() -> None:
    assert pareto([(2, 5), (1, 3), (3, 4), (2, 6), (4, 6)]) == [(1, 3), (2, 6)]


KEY = replace(key(), stacks=(replace(key().stacks[0], layers=8),))
DEVICE = PlannedDevice(key=KEY)


@cache
def planned() -> tuple[Outcome, Plan]:
    goal = PlanGoal(latency_ms=150.0)
    judge = SimulationJudge(goal=goal, answers=60)
    outcome = make_plan(problem(goal), judge)
    return outcome, Plan.of(outcome, goal, SHORT, device=DEVICE, release="0.1.0")


def test_a_plan_by_simulation_holds_in_simulation_and_in_its_file() -> None:
    outcome, plan = planned()
    assert plan.is_met
    assert plan.schedule.simulated is not None
    assert plan.schedule.simulated.latency_s is not None
    assert plan.schedule.simulated.latency_s <= 0.15
    assert from_json(to_json(plan), "plan.json") == plan
    assert plan.goal.goal() == PlanGoal(latency_ms=150.0)
    flags = plan.schedule.flags()
    assert flags["policy"] == outcome.chosen.candidate.strategy.name
    assert (flags["stages"], flags["layers"], flags["tensor"]) == ("2", "4,4", "1")
    assert "predicted 99 % in" in plan.describe()
    table = lines(plan)
    assert table[1].startswith("* ")
    assert len(table) == 2 + len(plan.alternatives)
    boxes = timeline_of(outcome.chosen.candidate)
    assert {box.stage for box in boxes} == {0, 1}
    assert all(box.start_s < box.end_s for box in boxes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"version": 2', b'"version": 3', "version is 3, this release reads 2"),
        (b'"is_met": true', b'"is_met": 1', "is_met must be true or false, not 1"),
        (b'"percentile": 99', b'"percentile": "99"', "goal.percentile must be a whole number, not '99'"),
        (b'"ranks": 1', b'"rank": 1', "schedule.rank is unknown"),
        (b'"layers": 8', b'"layers": 9', "schedule.layers divide 8 layers, and the model of device.key has 9"),
        (b'"release"', b'"released"', "released is unknown"),
        (b"{", b"", "is no JSON"),
    ],
)
def test_a_wrong_plan_file_is_refused_by_name(old: bytes, new: bytes, said: str) -> None:
    text = to_json(planned()[1])
    assert old in text
    with pytest.raises(SettingError, match=said):
        from_json(text.replace(old, new, 1), "plan.json")


def test_a_plan_for_another_model_is_refused() -> None:
    plan = planned()[1]
    plan.check_model(replace(KEY, processor="another one", threads=2, release="0.2.0"))
    with pytest.raises(SettingError, match="the plan is for another model: its vocab_size is 97, not 98; make another"):
        plan.check_model(replace(KEY, vocab_size=98))


def test_a_plan_knows_its_machine() -> None:
    plan = planned()[1]
    assert plan.other_machine(replace(KEY, vocab_size=98)) is None
    assert plan.other_machine(replace(KEY, processors=8)) == "processors is 2, not 8"


def test_an_arrival_rate_above_the_capacity_has_no_latency() -> None:
    goal = PlanGoal(latency_ms=1_000.0, kind="requests", rate=10_000.0)
    outcome = make_plan(problem(goal), SimulationJudge(goal=goal, answers=40))
    assert not outcome.is_met


def test_an_arrival_rate_is_served_within_the_bound() -> None:
    goal = PlanGoal(latency_ms=400.0, kind="requests", rate=20.0)
    outcome = make_plan(problem(goal), SimulationJudge(goal=goal, answers=60))
    assert outcome.is_met
    assert outcome.chosen.judgement.throughput == pytest.approx(20.0, rel=0.3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_goal_at_a_rate_is_found_wherever_it_lies(name: str) -> None:
    """Small batches cannot serve the rate, and large ones break the bound between tokens."""
    layout = placed(1, step_us=4_000, token_us=60)
    workload = Workload.of_lengths(Range(20, 60), Range(20, 60))
    for goal in (
        PlanGoal(latency_ms=900.0, kind="requests", rate=60.0),
        PlanGoal(latency_ms=2_000.0, tpot_ms=12.0, kind="requests", rate=40.0),
    ):
        wanted = dataclasses.replace(problem(goal, workload=workload, layout=layout), strategies=[STRATEGIES[name]])
        scenario = wanted.scenario(layout)
        [space, *_] = STRATEGIES[name].spaces(scenario, 60)
        points = [point for point in every_point(space) if sum(point) % 3 == 0]
        met = [point for point in points if goal.is_met(STRATEGIES[name].estimate(scenario, point, goal.rate))]
        outcome = make_plan(wanted, as_expected)
        assert outcome.is_met == bool(met)


def test_the_thresholds_are_those_of_a_loaded_group() -> None:
    rra, scenario = STRATEGIES["rra"], problem(PlanGoal(latency_ms=1_000)).scenario(placed())
    point = (4, -4)
    loaded, idle = rra.estimate(scenario, point, None), rra.estimate(scenario, point, 1.0)
    assert idle.decode_batch < loaded.decode_batch
    assert rra.bounds(scenario, point, idle) == rra.bounds(scenario, point, loaded)
    small, large = (rra.bounds(scenario, (size, -4), loaded).cycle for size in (1, 64))
    assert small is not None
    assert large is not None
    assert small.threshold_percent > large.threshold_percent == 12


def test_a_schedule_without_a_steady_state_is_not_chosen() -> None:
    outcome = make_plan(
        problem(PlanGoal(latency_ms=150.0)),
        lambda candidate: None if candidate.strategy.name == "iteration" else as_expected(candidate),
    )
    assert outcome.chosen.candidate.strategy.name == "rra"


def test_a_grid_has_both_ends_and_growing_steps() -> None:
    assert grid_values(1, 10) == [1, 2, 3, 4, 7, 10]
    assert grid_values(-10, -1) == [-10, -7, -4, -3, -2, -1]
    assert grid_values(5, 5) == [5]
    assert grid_values(-1, -1) == [-1]


def test_a_scenario_knows_its_percentile() -> None:
    scenario = problem(PlanGoal(latency_ms=1_000, percentile=50)).scenario(placed())
    assert isinstance(scenario, Scenario)
    assert scenario.length == 11


def test_the_simulation_judges_points_that_differ() -> None:
    outcome = make_plan(problem(PlanGoal(latency_ms=10_000.0)), as_expected)
    first = outcome.judged[:JUDGED]
    assert len({each.candidate.kind for each in first}) == len(first) == JUDGED
    # Of those that are alike it judges the one with the most throughput, and of equal ones the fastest.
    assert first[0].candidate.expected.capacity == max(each.candidate.expected.capacity for each in outcome.judged)


def test_the_plan_is_one_that_a_longer_simulation_confirms() -> None:
    """The short simulation finds latencies a tenth too low, so its best schedules miss the bound."""
    goal, confirmed = PlanGoal(latency_ms=60.0), list[Candidate]()

    def short(candidate: Candidate) -> Figures:
        figures = as_expected(candidate)
        return replace(figures, latency_s=0.9 * figures.latency_s)

    def confirm(candidate: Candidate) -> Figures:
        confirmed.append(candidate)
        return as_expected(candidate)

    hasty = make_plan(problem(goal), short).chosen
    assert hasty.is_met
    assert hasty.candidate.expected.latency_s > 0.06
    outcome = make_plan(problem(goal), short, confirm=confirm)
    assert outcome.is_met
    assert outcome.chosen.judgement == as_expected(outcome.chosen.candidate)
    assert outcome.chosen.candidate in confirmed
    assert len(confirmed) < len(outcome.judged), "only those that may be the plan run for longer"
    assert any(each.is_confirmed and not each.is_met for each in outcome.judged)


def test_a_goal_that_only_short_simulations_meet_is_not_met() -> None:
    def confirm(candidate: Candidate) -> Figures:
        return replace(as_expected(candidate), latency_s=1.0)

    outcome = make_plan(problem(PlanGoal(latency_ms=150.0)), as_expected, confirm=confirm)
    assert not outcome.is_met
    assert outcome.chosen.judgement.latency_s == 1.0


def test_a_schedule_without_a_longer_steady_state_keeps_its_figures() -> None:
    outcome = make_plan(problem(PlanGoal(latency_ms=150.0)), as_expected, confirm=lambda candidate: None)  # noqa: ARG005
    assert outcome.is_met
    assert outcome.chosen.judgement == as_expected(outcome.chosen.candidate)


HEAVY = Workload.of_cells(
    [
        (Range(5, 5), Range(10, 10), 988.5),
        (Range(5, 5), Range(60, 60), 5.5),
        (Range(5, 5), Range(200, 200), 6.0),
    ],
    source="",
)
"""Answers have 60 tokens from the percentile 98.85 on, and 200 from 99.4 on."""


def test_the_percentile_of_a_judgement_is_that_of_the_workload() -> None:
    """The 99th of each hundred requests is anywhere between the percentiles 98 and 99, and of 500 it is near 99."""
    layout, strategy = placed(1, slots=1 << 14, step_us=1_000, token_us=1), STRATEGIES["iteration"]
    goal = PlanGoal(latency_ms=math.inf)
    scenario = problem(goal, workload=HEAVY, layout=layout).scenario(layout)
    candidate = Candidate(
        strategy=strategy,
        placed=layout,
        scenario=scenario,
        point=(8, WHOLE),
        expected=strategy.estimate(scenario, (8, WHOLE), None),
    )
    for seed in range(8):
        found = SimulationJudge.confirming(goal, seed)(candidate)
        assert found is not None
        assert 0.058 <= found.latency_s <= 0.075, f"seed {seed}"
