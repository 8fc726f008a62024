"""Single checks of a plan in force. Each is a process of its own, so only its files reach the next one."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from orca.core.domain.errors import SettingError
from orca.core.job_files import PLAN_FILE, REPORT_FILE, SHORTFALL_FILE, STATE_FILE, SUMMARY_FILE
from orca.core.plan_report import TEXT_MAX, PlanReport, ReportedFigures, ReportedLengths, read_report
from orca.planner.follow.check import PlanCheck, PlanLimits
from orca.planner.follow.files import check_files, first_files
from orca.planner.follow.single_check import NO_LENGTHS, CheckedPlan, FollowOrder, PoolCounts, check_once
from orca.planner.follow.state import FollowState, Replan, state_from_json
from orca.planner.search.device_layouts import DeviceMemory, Shape
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan, from_json, to_json
from orca.planner.workload.workload import Workload, parse_workload
from orca.pool.latency_bins import AnswerLatency
from orca.pool.latency_bins import bin_of as latency_bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import PERIOD_MS, bin_of
from orca.pool.records import LengthCounts, PeriodLengths
from support.planner.plans import BOUND_MS, check, figures, lengths, plan
from support.planner.profiles import profile

MINUTE_MS = 60_000
RUNS = plan(8, throughput=6.0)
FASTER = plan(12, throughput=7.0)
MEETS = figures(6.0, 7.0)
MISSES = figures(6.0, 9.0)
FIRST = ReportedFigures(throughput=6.0, latency_s=7.0, ttft_s=0.5, tpot_s=0.05)
SAME = check(MEETS, RUNS)
GAIN = check(MEETS, FASTER)


@dataclass
class Checks:
    """A plan in force, and the files that are left between its checks."""

    plan: Plan = RUNS
    awake_ms: int = 10 * PERIOD_MS
    answers: int = 300  # that the pool has counted
    prompt: int = 10  # tokens of each
    minutes: int = 0  # that a check takes
    files: dict[str, str] = field(default_factory=dict)
    searches: list[bool] = field(default_factory=list)  # whether each check searched for a better plan
    workloads: list[Workload] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def read(self) -> PoolCounts:
        bins = {latency: {latency_bin_of(7.65e6): self.answers} for latency in AnswerLatency}
        newest = self.awake_ms // PERIOD_MS - 1
        period = PeriodLatencies(period=newest, first_ms=newest * PERIOD_MS, bins=bins)
        cells = {(bin_of(self.prompt), bin_of(4)): self.answers}
        return PoolCounts(
            lengths=LengthCounts(periods=(PeriodLengths(age_ms=0, cells=cells, cut=0),) if self.answers else ()),
            latencies=LatencyCounts(awake_ms=self.awake_ms, periods=(period,) if self.answers else ()),
        )

    def __call__(self, found: PlanCheck | None, *, max_model_len: int | None = None, **order: Any) -> CheckedPlan:
        """Check ten minutes later. Args: found: by the check; None: there must be none."""

        def made(*arguments: Any, is_searching: bool, **_: Any) -> PlanCheck:
            assert found is not None
            assert arguments[4] == self.plan
            self.searches.append(is_searching)
            self.workloads.append(arguments[1])
            self.awake_ms += self.minutes * MINUTE_MS
            return found if is_searching else replace(found, best=None)

        self.awake_ms += PERIOD_MS
        text = self.files.get(STATE_FILE)
        limits = PlanLimits(devices=1, shape=Shape(), memory=DeviceMemory(slots=256), max_model_len=max_model_len)
        known: dict[str, Any] = {"state": None if text is None else state_from_json(text.encode(), "x")}
        checked = check_once(
            FollowOrder(
                profile=profile(), goal=PlanGoal(latency_ms=BOUND_MS), limits=limits, plan=self.plan, **known | order
            ),
            self.read,
            self.said.append,
            check=made,
        )
        self.files = check_files(checked)
        assert (checked.check is None) == (found is None)
        self.plan = from_json(self.files[PLAN_FILE].encode(), "x")
        return checked

    @property
    def state(self) -> FollowState:
        return state_from_json(self.files[STATE_FILE].encode(), "x")

    @property
    def report(self) -> PlanReport:
        return read_report(self.files[REPORT_FILE])


def test_a_check_leaves_the_plan_its_figures_on_the_lengths_of_now_and_its_state() -> None:
    checks = Checks()
    checked = checks(check(figures(5.0, 7.5), RUNS, workload=lengths(300, output_mean=75.0)))
    assert (checked.is_new, checks.plan, checks.state) == (False, RUNS, checked.state)
    assert checks.files.keys() == {PLAN_FILE, SUMMARY_FILE, REPORT_FILE, STATE_FILE}
    assert checks.files[PLAN_FILE].encode() == to_json(RUNS)
    assert checks.files[SUMMARY_FILE] == RUNS.describe(figures(5.0, 7.5))
    assert checks.report == PlanReport(
        planned_lengths=ReportedLengths(answers=1000, prompt_mean=100.0, output_mean=50.0, output_p99=120),
        lengths=ReportedLengths(answers=300, prompt_mean=100.0, output_mean=75.0, output_p99=120),
        predicted=ReportedFigures(throughput=5.0, latency_s=7.5, ttft_s=0.5, tpot_s=0.05),
        is_met=True,
        is_infeasible=False,
        is_new=False,
        reason="the plan meets the goal on the lengths of now",
        recommended=None,
    )


# changes


def test_a_gain_in_three_checks_in_a_row_changes_the_plan() -> None:
    checks = Checks()
    assert [checks(GAIN).is_new for _ in range(3)] == [False, False, False], "the first one began half an hour"
    assert checks.report.reason.endswith("in 3 checks; the last change was less than half an hour ago")
    assert checks(GAIN).is_new
    assert (checks.plan, checks.state.since_ms) == (FASTER, checks.awake_ms)
    assert checks.report.is_new
    assert checks.report.reason == "another plan brings 17 % more requests/s, in 4 checks"
    assert not checks(check(figures(7.0, 7.0), FASTER)).is_new


def test_a_check_without_the_gain_begins_the_count_again() -> None:
    checks = Checks()
    for found, better in ((GAIN, 1), (GAIN, 2), (SAME, 0), (GAIN, 1)):
        assert not checks(found).is_new
        assert checks.state.better_checks == better


def test_the_time_of_a_rollout_goes_before_that_of_the_decision() -> None:
    checks = Checks()
    begun_ms = checks.awake_ms - 60 * MINUTE_MS
    assert [checks(GAIN, since_ms=begun_ms).is_new for _ in range(3)] == [False, False, True]


def test_a_miss_changes_the_plan_at_once() -> None:
    checks = Checks()
    assert checks(check(MISSES, FASTER)).is_new
    assert (checks.plan, checks.report.is_met) == (FASTER, True)
    assert checks.report.reason == "the plan would miss the goal on the lengths of now: 99 % within 9 s"
    assert SHORTFALL_FILE not in checks.files


def test_recommend_leaves_the_plan_and_names_the_better_one() -> None:
    checks = Checks()
    assert not checks(check(MISSES, FASTER), replan=Replan.RECOMMEND).is_new
    assert (checks.plan, checks.report.is_met) == (RUNS, False)
    assert checks.report.recommended == FASTER.describe()
    assert checks.state.recommended == FASTER
    checks(SAME, replan=Replan.RECOMMEND)
    assert checks.report.recommended is None


def test_off_searches_nothing() -> None:
    checks = Checks()
    checks(check(MISSES, FASTER), replan=Replan.OFF)
    assert (checks.searches, checks.plan, checks.report.recommended) == ([False], RUNS, None)
    assert checks.report.reason.endswith("; no other one was searched")


def test_times_and_measured_figures_are_those_after_the_check() -> None:
    checks = Checks(minutes=15)
    begun_ms = checks.awake_ms
    checks(check(MISSES, FASTER))
    assert checks.state.since_ms == checks.state.checked_ms == begun_ms + 25 * MINUTE_MS


# states


def test_a_state_of_another_plan_is_left_out() -> None:
    checks = Checks()
    checks(GAIN)
    checks(GAIN)
    checks.plan = FASTER
    checks(check(figures(7.0, 7.0), plan(14, throughput=8.0)))
    assert (checks.state.plan, checks.state.better_checks, checks.state.since_ms) == (FASTER, 1, checks.awake_ms)
    assert checks.said == ["the state of the check before is of another plan: following begins with this one"]


def test_a_pool_that_was_emptied_begins_to_count_again() -> None:
    checks = Checks()
    checks(GAIN)
    checks.awake_ms = 0
    for minutes, is_new in ((10, False), (20, False), (30, False), (40, True)):
        assert checks(GAIN, since_ms=10 * PERIOD_MS).is_new == is_new, minutes
    assert checks.state.since_ms == checks.awake_ms


# lengths


def test_a_pool_without_answers_changes_nothing() -> None:
    checks = Checks()
    checks(check(figures(5.0, 7.5), FASTER, workload=lengths(300, output_mean=75.0)), replan=Replan.RECOMMEND)
    before = checks.report, checks.state
    checks.answers = 0
    checks(None)
    report, state = before
    assert checks.report == replace(report, reason=NO_LENGTHS)
    assert checks.state == replace(state, checked_ms=checks.awake_ms, measured=None)


def test_without_any_check_the_lengths_are_the_planned_ones() -> None:
    checks = Checks(answers=0)
    checks(None)
    assert checks.report.lengths == checks.report.planned_lengths
    assert (checks.report.predicted, checks.report.is_met) == (FIRST, True)


@pytest.mark.parametrize(("answers", "source"), [(0, "stated"), (199, "stated"), (200, "the pool")])
def test_stated_lengths_count_until_there_are_200_answers(answers: int, source: str) -> None:
    checks = Checks(answers=answers)
    checks(SAME, stated=replace(parse_workload("8/4"), source="stated"))
    assert [each.source for each in checks.workloads] == [source]


def test_too_few_answers_only_recommend() -> None:
    checks = Checks(answers=10)
    assert not checks(check(MISSES, FASTER, workload=lengths(10))).is_new
    assert checks.report.recommended == FASTER.describe()
    assert checks.report.reason == "10 answers were counted, and a plan needs 200 or stated lengths"


def test_answers_from_before_a_lower_bound_on_lengths_are_no_mistake_of_the_user() -> None:
    checks = Checks(prompt=100)
    checks(None, max_model_len=50)
    assert checks.report.reason.startswith("the counted lengths are not those of now: ")
    assert "50" in checks.report.reason


def test_stated_lengths_that_the_model_does_not_allow_are_refused() -> None:
    with pytest.raises(SettingError, match="the model allows 256"):
        Checks()(None, stated=parse_workload("8:300/4"))


def test_the_throughput_is_that_of_one_group() -> None:
    one, two = Checks(), Checks()
    one(SAME, since_ms=0)
    two(SAME, since_ms=0, groups=2)
    assert one.state.measured is not None
    assert two.state.measured == replace(one.state.measured, throughput=one.state.measured.throughput / 2)


# a goal out of reach


def test_a_goal_that_no_plan_meets_leaves_its_shortfall() -> None:
    checks = Checks()
    hardly_closer = plan(2, latency_s=8.9)
    assert not checks(check(MISSES, hardly_closer)).is_new
    assert checks.files[SHORTFALL_FILE] == hardly_closer.shortfall()
    assert (checks.report.is_met, checks.report.is_infeasible) == (False, True)
    closer = plan(3, latency_s=8.5)
    assert checks(check(MISSES, closer)).is_new
    assert checks.files[SHORTFALL_FILE] == closer.shortfall()
    checks.answers = 0
    checks(None)
    assert checks.files[SHORTFALL_FILE] == closer.shortfall()
    checks.answers = 300
    checks(check(figures(6.0, 7.5), closer))
    assert SHORTFALL_FILE not in checks.files
    assert (checks.report.is_met, checks.report.is_infeasible) == (True, False)


CLOSER = plan(3, latency_s=8.5)
CLOSEST = plan(2, latency_s=8.1)
WITHOUT_FIGURES = "no schedule met the goal (99 % within 8 s) in the last search"


@pytest.mark.parametrize(
    ("in_force", "found", "replan", "said"),
    [
        (RUNS, check(MISSES, CLOSER, workload=lengths(12)), Replan.AUTO, CLOSER.shortfall()),
        (RUNS, check(MISSES, CLOSER), Replan.RECOMMEND, CLOSER.shortfall()),
        (CLOSER, check(figures(6.0, 8.5), CLOSEST), Replan.AUTO, CLOSEST.shortfall()),
        (CLOSER, check(figures(6.0, 8.5), CLOSEST), Replan.OFF, CLOSER.shortfall()),
        (CLOSER, check(None, None, complaint="nothing fits"), Replan.AUTO, CLOSER.shortfall()),
        (CLOSER, None, Replan.AUTO, CLOSER.shortfall()),
    ],
    ids=["few answers", "recommended", "hardly closer", "no search", "nothing fits", "no lengths"],
)
def test_a_shortfall_names_what_is_achievable_and_not_what_serves(
    in_force: Plan, found: PlanCheck | None, replan: Replan, said: str
) -> None:
    checks = Checks(in_force, answers=0 if found is None else 300)
    assert not checks(found, replan=replan).is_new
    assert checks.files[SHORTFALL_FILE] == said
    assert checks.report.is_infeasible


@pytest.mark.parametrize(
    ("found", "more"),
    [
        (None, ". The plan in force: 99 % within 9 s"),
        (check(figures(6.0, 9.5), None, complaint="nothing fits"), ". The plan in force: 99 % within 9.5 s"),
        (check(None, None, complaint="nothing fits"), ""),
    ],
    ids=["no lengths", "nothing fits", "no figures"],
)
def test_a_plan_that_once_met_the_goal_says_nothing_of_its_old_figures(found: PlanCheck | None, more: str) -> None:
    checks = Checks()
    checks(check(MISSES, plan(2, latency_s=8.9)))
    checks.answers = 0 if found is None else 300
    assert not checks(found).is_new
    assert checks.files[SHORTFALL_FILE] == WITHOUT_FIGURES + more


def test_a_plan_that_cannot_serve_the_lengths_has_no_figures() -> None:
    checks = Checks()
    checks(check(None, None, complaint="no\nroom " + "x" * 2000))
    assert (checks.report.predicted, checks.report.is_met) == (None, False)
    assert "of now: no room xxx" in checks.report.reason
    assert (len(checks.report.reason), checks.report.reason[-4:]) == (TEXT_MAX, "x...")
    assert checks.files[SUMMARY_FILE] == RUNS.describe()


# a first plan


@pytest.mark.parametrize("made", [RUNS, plan(1, latency_s=9.0)], ids=["met", "infeasible"])
def test_a_first_plan_has_its_own_figures(made: Plan) -> None:
    files = first_files(made)
    report = read_report(files[REPORT_FILE])
    assert (files[PLAN_FILE].encode(), files[SUMMARY_FILE]) == (to_json(made), made.describe())
    assert files.get(SHORTFALL_FILE) == (None if made.is_met else made.shortfall())
    assert STATE_FILE not in files
    assert report.lengths == report.planned_lengths
    assert report.predicted is not None
    assert report.predicted.latency_s == made.predicted.latency_s
    assert (report.is_met, report.is_infeasible, report.is_new) == (made.is_met, not made.is_met, True)
    assert report.reason == "it is the first plan" if made.is_met else report.reason.startswith(made.shortfall())
