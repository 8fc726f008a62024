"""Following a plan: each rule, the record of the state, and what holds in any history."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.errors import SettingError
from orca.planner.follow.check import PlanCheck, check_from_json, check_to_json
from orca.planner.follow.follow import (
    CHANGES_APART_MS,
    CHECK_EVERY_MS,
    CHECKS_IN_A_ROW,
    Observed,
    begin,
    follow,
    is_check_due,
)
from orca.planner.follow.measured import measured_figures
from orca.planner.follow.state import FollowState, Replan, state_from_json, state_to_json
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan, PlannedFigures
from orca.pool.latency_bins import AnswerLatency, bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import PERIOD_MS
from orca.pool.measured import MeasuredFigures
from support.planner.plans import check, figures, lengths, plan

RUNS = plan(8, throughput=6.0)
FASTER = plan(12, throughput=7.0)
BARELY_FASTER = plan(9, throughput=6.5)
MEETS = figures(6.0, 7.0)
MISSES = figures(6.0, 9.0)


def after(state: FollowState, found: PlanCheck, *, minutes: float = 10, replan: Replan = Replan.AUTO) -> FollowState:
    """Return the state after a check, some minutes after the last one."""
    awake_ms = (state.checked_ms or 0) + int(minutes * 60_000)
    return follow(state, Observed(awake_ms=awake_ms, replan=replan, check=found))


def running(chosen: Plan = RUNS) -> FollowState:
    return begin(chosen, 0)


# a check is due


def test_checks_are_ten_minutes_apart() -> None:
    assert is_check_due(FollowState(), 0)
    assert not is_check_due(running(), CHECK_EVERY_MS - 1)
    assert is_check_due(running(), CHECK_EVERY_MS)


def test_a_pool_that_was_emptied_is_checked_at_once() -> None:
    assert is_check_due(begin(RUNS, 5_000_000), 7)


# the first plan


@pytest.mark.parametrize("replan", Replan)
def test_the_first_plan_is_put_in_force_in_any_case(replan: Replan) -> None:
    state = after(FollowState(), check(None, RUNS), replan=replan)
    assert (state.plan, state.since_ms, state.is_met) == (RUNS, CHECK_EVERY_MS, True)


def test_without_a_plan_that_fits_the_state_says_why() -> None:
    state = after(FollowState(), check(None, None, complaint="no layout is large enough"))
    assert state.plan is None
    assert state.describe() == "no plan: no plan can be made: no layout is large enough"


@pytest.mark.parametrize(("answers", "is_made"), [(0, True), (1, False), (199, False), (200, True)])
def test_a_first_plan_needs_stated_lengths_or_200_answers(answers: int, is_made: bool) -> None:
    state = after(FollowState(), check(None, RUNS, workload=lengths(answers)))
    assert (state.plan, state.recommended) == ((RUNS, None) if is_made else (None, RUNS))
    assert is_made or state.reason.startswith(("1 answer was counted, and a plan needs 200", "199 answers were"))


def test_a_first_plan_that_meets_no_bound_serves_and_says_so() -> None:
    state = after(FollowState(), check(None, plan(1, latency_s=9.0)))
    assert state.plan is not None
    assert (state.is_met, state.is_infeasible) == (False, True)
    assert "no schedule meets the goal (99 % within 8 s)" in state.reason
    assert "Best achievable: 99 % within 9 s" in state.reason


# a miss


def test_after_a_miss_another_plan_takes_over_at_once() -> None:
    state = after(running(), check(MISSES, BARELY_FASTER), minutes=10)
    assert (state.plan, state.since_ms, state.is_met) == (BARELY_FASTER, CHECK_EVERY_MS, True)
    assert state.reason == "the plan would miss the goal on the lengths of now: 99 % within 9 s"


def test_a_plan_that_cannot_serve_the_lengths_of_now_is_replaced() -> None:
    state = after(running(), check(None, FASTER, complaint="the plan in force cannot be simulated: it has 64 slots"))
    assert state.plan == FASTER
    assert "it has 64 slots" in state.reason


def test_a_miss_without_any_plan_keeps_the_one_in_force() -> None:
    state = after(running(), check(MISSES, None, complaint="no layout is large enough"))
    assert (state.plan, state.is_met) == (RUNS, False)
    assert "no layout is large enough" in state.reason


def test_if_no_plan_meets_the_goal_the_closest_one_serves() -> None:
    closer = plan(2, latency_s=8.5)
    state = after(running(), check(MISSES, closer))
    assert (state.plan, state.is_met, state.is_infeasible) == (closer, False, True)
    assert "Best achievable: 99 % within 8.5 s" in state.reason


def test_a_plan_that_is_hardly_closer_does_not_take_over() -> None:
    state = after(running(), check(MISSES, plan(2, latency_s=8.9)))
    assert (state.plan, state.is_infeasible) == (RUNS, True)
    assert "no schedule meets the goal" in state.reason


def test_a_goal_that_can_be_met_again_is_met_again() -> None:
    state = after(running(plan(2, latency_s=8.5)), check(figures(6.0, 8.5), RUNS))
    assert (state.plan, state.is_met, state.is_infeasible) == (RUNS, True, False)


def test_a_miss_names_every_latency_that_has_a_bound() -> None:
    """Otherwise it would show latencies that meet the goal."""
    goal = replace(RUNS.goal, ttft_ms=400.0, tpot_ms=100.0)
    missed = replace(check(MEETS, FASTER), is_met=False)
    state = after(running(replace(RUNS, goal=goal)), missed)
    assert state.reason.endswith("of now: 99 % within 7 s, first token within 500 ms, 50 ms between tokens")


# a gain


def gained(state: FollowState, checks: int, *, minutes: float = 10, replan: Replan = Replan.AUTO) -> FollowState:
    for _ in range(checks):
        state = after(state, check(MEETS, FASTER), minutes=minutes, replan=replan)
    return state


def test_a_faster_plan_takes_over_after_three_checks_in_a_row() -> None:
    two = gained(running(), 2)
    assert (two.plan, two.better_checks, two.recommended) == (RUNS, 2, None)
    assert two.reason == "another plan brings 17 % more requests/s, in 2 checks of 3"
    three = gained(running(), 3)
    assert (three.plan, three.better_checks, three.since_ms) == (FASTER, 0, 3 * CHECK_EVERY_MS)


@pytest.mark.parametrize("between", [check(MEETS, BARELY_FASTER), check(MEETS, RUNS), check(MEETS, None)])
def test_a_check_without_a_gain_begins_the_row_again(between: PlanCheck) -> None:
    state = after(gained(running(), 2), between)
    assert state.better_checks == 0
    assert gained(state, 2).plan == RUNS


def test_a_faster_plan_that_misses_the_goal_is_no_gain() -> None:
    assert after(running(), check(MEETS, plan(40, throughput=60.0, latency_s=9.0))).better_checks == 0


def test_exactly_ten_percent_is_a_gain() -> None:
    assert after(running(), check(figures(10.0), plan(9, throughput=11.0))).better_checks == 1
    assert after(running(), check(figures(10.0), plan(9, throughput=10.99))).better_checks == 0


def test_the_same_schedule_with_better_figures_is_no_change() -> None:
    same = plan(8, throughput=60.0)
    assert gained(running(), 0) == running()
    state = running()
    for _ in range(5):
        state = after(state, check(MEETS, same))
    assert (state.plan, state.better_checks) == (RUNS, 0)


def test_changes_for_a_gain_are_half_an_hour_apart() -> None:
    """Checks come more often here, as after a restart of the process that follows."""
    state = gained(running(), 5, minutes=5)
    assert (state.plan, state.better_checks) == (RUNS, 5)
    assert "less than half an hour ago" in state.reason
    assert gained(state, 1, minutes=5).plan == FASTER


def test_a_miss_does_not_wait_for_half_an_hour() -> None:
    state = after(gained(running(), 3), check(MISSES, RUNS), minutes=1)
    assert state.plan == RUNS


# modes


def test_recommended_plans_are_only_recorded() -> None:
    state = gained(running(), 3, replan=Replan.RECOMMEND)
    assert (state.plan, state.recommended, state.since_ms) == (RUNS, FASTER, 0)
    missed = after(running(), check(MISSES, FASTER), replan=Replan.RECOMMEND)
    assert (missed.plan, missed.recommended, missed.is_met) == (RUNS, FASTER, False)


def test_a_recommendation_ends_when_it_is_of_no_use() -> None:
    state = after(gained(running(), 3, replan=Replan.RECOMMEND), check(MEETS, RUNS), replan=Replan.RECOMMEND)
    assert state.recommended is None


def test_off_changes_and_recommends_nothing() -> None:
    assert gained(running(), 4, replan=Replan.OFF).recommended is None
    state = after(running(), check(MISSES, None), replan=Replan.OFF)
    assert (state.plan, state.is_met, state.recommended) == (RUNS, False, None)
    assert "no other one was searched" in state.reason


@pytest.mark.parametrize(
    ("found", "replan"),
    [
        (check(MISSES, None), Replan.OFF),
        (check(MISSES, None, complaint="nothing fits"), Replan.AUTO),
        (check(None, None, complaint="nothing fits"), Replan.AUTO),
    ],
)
def test_without_a_search_it_stays_known_that_no_plan_meets_the_goal(found: PlanCheck, replan: Replan) -> None:
    state = running(plan(2, latency_s=9.0))
    for _ in range(2):
        state = after(state, found, replan=replan)
        assert (state.is_met, state.is_infeasible) == (False, True)
    assert not after(state, check(MEETS, None), replan=replan).is_infeasible, "the plan meets it now"
    assert not after(state, check(MISSES, FASTER), replan=Replan.RECOMMEND).is_infeasible, "another plan would"
    assert not after(running(), found, replan=replan).is_infeasible, "nobody has looked"


def test_a_plan_that_the_caller_cannot_apply_is_recommended() -> None:
    found = Observed(awake_ms=CHECK_EVERY_MS, check=check(MISSES, FASTER), is_applicable=False)
    state = follow(running(), found)
    assert (state.plan, state.recommended) == (RUNS, FASTER)


@pytest.mark.parametrize("answers", [1, 199])
def test_too_few_answers_change_nothing(answers: int) -> None:
    few = lengths(answers)
    missed = after(running(), check(MISSES, FASTER, workload=few))
    assert (missed.plan, missed.recommended) == (RUNS, FASTER)
    assert "a plan needs 200" in missed.reason
    state = running()
    for _ in range(5):
        state = after(state, check(MEETS, FASTER, workload=few))
    assert (state.plan, state.better_checks) == (RUNS, 0)


def test_the_time_of_a_pool_that_was_emptied_begins_again() -> None:
    state = follow(begin(RUNS, 5_000_000), Observed(awake_ms=60_000))
    assert state.since_ms == 60_000


# what is shown


def measured(latency_s: float = 7.65) -> MeasuredFigures:
    return MeasuredFigures(answers=900, throughput=5.9, latency_s=latency_s, ttft_s=0.4, tpot_s=0.05)


def test_measured_figures_stand_beside_predicted_ones() -> None:
    planned = begin(plan(8, throughput=6.1, latency_s=7.4, workload=lengths(12_000)), 0)
    state = follow(planned, Observed(awake_ms=5, measured=measured()))
    assert state.describe() == (
        "iteration, batch 8, 1 stage; predicted 99 % in 7.4 s at 6.1 requests/s, measured 7.65 s at 5.9;"
        " planned from 12,000 answers"
    )
    assert state.error == pytest.approx(7.65 / 7.4 - 1)


def test_predicted_figures_are_those_on_the_lengths_of_now() -> None:
    state = after(running(), check(figures(5.0, 7.9), RUNS, workload=lengths(output_mean=75.0)))
    assert "predicted 99 % in 7.9 s at 5 requests/s; planned from 1,000 answers" in state.describe()
    assert state.drift is not None
    assert state.drift.describe() == "prompt mean +0 %, output mean +50 %, output p99 +0 %"


def test_what_is_missing_has_no_error_and_no_drift() -> None:
    assert (FollowState().error, FollowState().drift, running().error) == (None, None, None)
    assert FollowState().describe() == "no plan"
    assert follow(after(running(), check(None, None)), Observed(awake_ms=1, measured=measured())).error is None


def test_measured_figures_of_a_new_plan_leave_out_answers_of_the_old_one() -> None:
    def period(number: int, seconds: float) -> PeriodLatencies:
        bins = {
            AnswerLatency.SEQUENCE: {bin_of(1e6 * seconds): 60},
            AnswerLatency.REQUEST: {bin_of(2e6 * seconds): 60},
            AnswerLatency.FIRST_TOKEN: {bin_of(1e5 * seconds): 60},
        }
        return PeriodLatencies(period=number, first_ms=number * PERIOD_MS, bins=bins)

    counts = LatencyCounts(awake_ms=4 * PERIOD_MS, periods=(period(3, 4.0), period(2, 9.0)))
    goal = PlanGoal(latency_ms=8000)
    found = measured_figures(counts, goal, since_ms=2 * PERIOD_MS + 1)
    assert found is not None
    assert (found.answers, found.tpot_s) == (60, None)
    assert found.latency_s == pytest.approx(4.0, rel=1 / 64)
    assert found.ttft_s == pytest.approx(0.4, rel=1 / 64)
    queueing = measured_figures(counts, replace(goal, kind="requests", rate=1.0))
    assert queueing is not None
    assert queueing.latency_s == pytest.approx(18.0, rel=1 / 64)
    assert measured_figures(counts, goal, since_ms=4 * PERIOD_MS) is None


def counted(*numbers: int, awake_ms: int, answers: int = 60) -> LatencyCounts:
    """Return as many answers of each latency in each period."""
    bins = {latency: {bin_of(4e6): answers} for latency in AnswerLatency}
    periods = (PeriodLatencies(period=number, first_ms=number * PERIOD_MS, bins=bins) for number in numbers)
    return LatencyCounts(awake_ms=awake_ms, periods=tuple(periods))


def test_answers_that_ran_when_a_plan_came_into_force_are_not_measured() -> None:
    counts, goal = counted(3, 2, awake_ms=4 * PERIOD_MS), PlanGoal(latency_ms=8000)
    for early_ms, answers in ((8000, 120), (7999, 60)):
        found = measured_figures(counts, goal, since_ms=2 * PERIOD_MS - early_ms)
        assert found is not None
        assert found.answers == answers
    endless = measured_figures(counts, PlanGoal(latency_ms=float("inf")), since_ms=PERIOD_MS)
    assert endless is not None
    assert endless.answers == 120


def test_measured_throughput_is_that_of_one_group_as_the_predicted_one() -> None:
    counts, goal = counted(2, awake_ms=3 * PERIOD_MS, answers=1200), PlanGoal(latency_ms=8000)
    one, two = (measured_figures(counts, goal, groups=groups) for groups in (1, 2))
    assert one is not None
    assert two is not None
    assert one.throughput == pytest.approx(2.0)
    assert two == replace(one, throughput=one.throughput / 2)


@pytest.mark.parametrize(
    ("answers", "words"), [(1, "at 5.9 (1 answer)"), (199, "at 5.9 (199 answers)"), (200, "at 5.9")]
)
def test_figures_of_few_answers_name_their_number(answers: int, words: str) -> None:
    assert replace(measured(), answers=answers).describe() == f"measured 7.65 s {words}"


# records


def test_states_and_checks_are_read_as_they_were_written() -> None:
    found = check(MISSES, FASTER)
    state = follow(running(), Observed(awake_ms=700_000, check=found, replan=Replan.RECOMMEND, measured=measured()))
    assert state_from_json(state_to_json(state), "x") == state
    assert state_from_json(state_to_json(FollowState()), "x") == FollowState()
    assert check_from_json(check_to_json(found), "x") == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 9}, "version is 9"),
        ({"since_ms": 5}, "plan and since_ms"),
        ({"better_checks": -1}, "better_checks must not be below 0"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(change: dict[str, int], said: str) -> None:
    text = state_to_json(FollowState())
    for name, value in change.items():
        old = {"version": "1", "since_ms": "null", "better_checks": "0"}[name]
        text = text.replace(f'"{name}": {old}'.encode(), f'"{name}": {value}'.encode())
    with pytest.raises(SettingError, match=said):
        state_from_json(text, "x")


# any history


@dataclass(frozen=True)
class Event:
    """One observation of a history."""

    minutes: int
    replan: Replan
    check: PlanCheck | None
    is_applicable: bool


PLANS = st.builds(
    plan, st.integers(1, 4), throughput=st.floats(1, 10), latency_s=st.sampled_from([5.0, 7.9, 8.1, 20.0])
)
FIGURES = st.none() | st.builds(figures, st.floats(1, 10), st.sampled_from([None, 5.0, 7.9, 8.1, 20.0]))
CHECKS = st.builds(
    lambda current, best, answers: check(current, best, workload=lengths(answers)),
    FIGURES,
    st.none() | PLANS,
    st.sampled_from([0, 5, 199, 200, 5000]),
)
EVENTS = st.builds(
    Event,
    st.integers(1, 25),
    st.sampled_from([Replan.AUTO, *Replan]),
    st.none() | CHECKS,
    st.sampled_from([True] * 3 + [False]),
)


def schedules_differ(one: Plan, other: Plan) -> bool:
    return not one.schedule.runs_as(other.schedule)


@given(st.lists(EVENTS, max_size=40))
def test_in_any_history_the_rules_hold(events: list[Event]) -> None:
    state, awake_ms, changed_ms = FollowState(), 0, 0
    gains = 0
    for event in events:
        awake_ms += event.minutes * 60_000
        before = state
        state = follow(
            before,
            Observed(awake_ms=awake_ms, replan=event.replan, check=event.check, is_applicable=event.is_applicable),
        )
        found = event.check
        if (
            found is not None
            and found.is_trusted
            and found.is_met
            and found.best is not None
            and before.plan is not None
        ):
            assert found.current is not None
            is_gain = schedules_differ(found.best, before.plan) and found.best.is_met
            is_gain = is_gain and found.best.predicted.throughput / found.current.throughput - 1 >= 0.1
            gains = gains + 1 if is_gain else 0
        elif found is not None:
            gains = 0
        if state.plan is not before.plan:
            assert found is not None
            assert state.plan is found.best is not None
            assert event.is_applicable
            assert found.is_trusted
            assert state.since_ms == awake_ms
            if before.plan is not None:
                assert event.replan is Replan.AUTO
                assert schedules_differ(state.plan, before.plan)
                if found.is_met:
                    assert awake_ms - changed_ms >= CHANGES_APART_MS
                    assert gains >= CHECKS_IN_A_ROW
                    assert state.is_met, "a plan that meets the goal is never replaced by one that does not"
                elif not found.best.is_met:
                    goal = state.plan.goal.goal()
                    assert found.current is None or state.plan.predicted.pressure(goal) < found.current.pressure(goal)
            changed_ms, gains = awake_ms, 0
        else:
            assert before.plan is None or state.since_ms == before.since_ms
        if event.replan is Replan.OFF and found is not None and before.plan is not None:
            assert state.recommended is None
        if found is not None and found.best is not None and not found.best.is_met and not found.is_met:
            assert "no schedule meets the goal" in state.reason or not found.is_trusted
        assert state_from_json(state_to_json(state), "x") == state


@given(st.lists(EVENTS, max_size=20))
def test_a_miss_that_a_plan_could_end_never_stays_under_auto(events: list[Event]) -> None:
    state, awake_ms = begin(RUNS, 0), 0
    for event in events:
        awake_ms += event.minutes * 60_000
        state = follow(state, Observed(awake_ms=awake_ms, check=event.check))
        found = event.check
        if found is not None and found.is_trusted and not found.is_met and found.best is not None and found.best.is_met:
            assert state.plan is not None
            assert state.plan.schedule.runs_as(found.best.schedule)


def test_figures_without_an_end_press_without_an_end() -> None:
    assert figures(1.0, None).pressure(PlanGoal(latency_ms=8000)) == float("inf")
    found: PlannedFigures = figures(1.0, 4.0)
    assert found.pressure(PlanGoal(latency_ms=8000)) == 0.5
