"""Following the plan of `orca up`: what is read, checked, changed, written and said. Pool and checks are stubs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orca.cli.small_model import small_model_folder
from orca.cli.up.planned import given_options, plan_options
from orca.cli.up.settings import UpSettings, parse_settings
from orca.cli.up.slo.checking import CheckFailed, CheckOrder
from orca.cli.up.slo.following import POLL_S, FollowedSystem, Follower, Hands
from orca.cli.up.slo.start import PlanOrder, PoolAccess, read_order
from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.model import load_model_info
from orca.core.process.settings import with_texts
from orca.planner.follow.check import PlanCheck
from orca.planner.follow.follow import CHECK_EVERY_MS
from orca.planner.follow.state import read_state
from orca.planner.profile.measuring.model_key import profile_key
from orca.planner.search.plan import Plan, PlannedBounds, PlannedDevice, read_plan
from orca.pool.latency_bins import AnswerLatency
from orca.pool.latency_bins import bin_of as latency_bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import PERIOD_MS, bin_of
from orca.pool.records import LengthCounts, PeriodLengths
from support.planner.plans import check, figures, lengths, plan
from support.planner.profiles import profile_for

FLAGS = ("--slo-latency-ms", "8000", "--threads", "1")
MODEL = load_model_info(small_model_folder())
KEY = profile_key(MODEL, device="cpu", threads=1, ranks=(1,), devices=1, release="0.1.0")
MISSES = figures(6.0, 9.0)


def of_model(chosen: Plan, *, stages: int = 1, policy: str = "iteration") -> Plan:
    """Return a plan for the small model."""
    bounds = chosen.schedule.bounds
    if policy == "rra":
        bounds = PlannedBounds(max_batch_size=9, encode_batch=3, decode_steps=7)
    schedule = replace(chosen.schedule, layers=(MODEL.num_layers // stages,) * stages, policy=policy, bounds=bounds)
    return replace(chosen, schedule=schedule, device=PlannedDevice(key=KEY))


RUNS = of_model(plan(8))
OTHER = of_model(plan(5))
DEEPER = of_model(plan(5), stages=2)
ROUNDS = of_model(plan(8), policy="rra")


@dataclass
class System:
    """A system that is followed, with a clock that tests set."""

    folder: Path
    flags: tuple[str, ...] = ()
    plan: Plan | None = RUNS
    awake_ms: int = PERIOD_MS
    answers: int = 300
    checks: list[PlanCheck | Exception] = field(default_factory=list)  # answers of the next checks
    pool_error: Exception | None = None
    check_minutes: float = 0  # that each check takes
    ordered: list[CheckOrder] = field(default_factory=list)
    restarted: list[UpSettings] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        words = [*FLAGS, *self.flags]
        self.order: PlanOrder = read_order(parse_settings(words), given_options(words), MODEL, 0)
        settings = self.with_layout(self.order.settings)
        if self.plan is not None:
            settings = self.with_layout(with_texts(self.order.settings, plan_options(self.plan)))
        self.follower = Follower(
            FollowedSystem(
                order=self.order,
                profile=profile_for(self.order.key),
                plan=self.plan,
                settings=settings,
                pool=PoolAccess(url="unix://x", login={}),
                folder=self.folder,
                argv=words,
            ),
            Hands(
                with_layout=self.with_layout,
                restart_schedulers=self.restart,
                report=self.said.append,
                check=self.check,
                read=self.read,
            ),
        )

    @staticmethod
    def with_layout(settings: UpSettings) -> UpSettings:
        prefetch = 1 if settings.prefetch is None else settings.prefetch
        return replace(settings, max_batch_tokens=settings.max_batch_tokens or None, prefetch=prefetch)

    async def restart(self, settings: UpSettings) -> None:
        self.restarted.append(settings)

    async def check(self, order: CheckOrder) -> PlanCheck:
        self.ordered.append(order)
        self.awake_ms += int(self.check_minutes * 60_000)
        found = self.checks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def read(self, _url: str, _revision: str, _environment: object) -> tuple[LengthCounts, LatencyCounts]:
        if self.pool_error is not None:
            raise self.pool_error
        cells = {(bin_of(8), bin_of(4)): self.answers}
        newest = self.awake_ms // PERIOD_MS - 1
        bins = {latency: {latency_bin_of(7.65e6): self.answers} for latency in AnswerLatency}
        periods = (PeriodLatencies(period=newest, first_ms=newest * PERIOD_MS, bins=bins),) if self.answers else ()
        return (
            LengthCounts(periods=(PeriodLengths(age_ms=0, cells=cells, cut=0),)),
            LatencyCounts(awake_ms=self.awake_ms, periods=periods),
        )

    def look(self, *, minutes: float = 0) -> None:
        self.awake_ms += int(minutes * 60_000)
        asyncio.run(self.follower.step())

    def after(self, *checks: PlanCheck | Exception, minutes: float = 10) -> None:
        """Begin if that was not done, let time pass, and look, with the answers of the checks that are due then."""
        if self.follower.state is None:
            self.look()
        self.checks += checks
        self.look(minutes=minutes)
        assert not self.checks, "every check was made"

    @property
    def bounds(self) -> str:
        return (self.folder / "bounds-iteration.json").read_text()


@pytest.fixture
def system(tmp_path: Path) -> Callable[..., System]:
    def begin(*flags: str, **fields: object) -> System:
        return System(tmp_path, flags, **fields)  # type: ignore[arg-type]

    return begin


def test_nothing_is_checked_before_ten_minutes_of_awake_time(system: Callable[..., System]) -> None:
    run = system()
    run.look()
    run.look(minutes=9.9)
    assert (run.ordered, run.said) == ([], [])
    assert read_state(run.folder / "slo.json").plan == RUNS
    assert POLL_S * 1000 < CHECK_EVERY_MS


def test_a_check_says_what_was_predicted_and_measured(system: Callable[..., System]) -> None:
    run = system()
    run.look()
    run.look(minutes=1)
    run.after(check(figures(6.1, 7.4), RUNS), minutes=24)
    [line] = run.said
    assert line.startswith("slo: iteration, batch 8, 1 stage; predicted 99 % in 7.4 s at 6.1 requests/s, measured 7.")
    assert line.endswith("; planned from 1,000 answers")
    [order] = run.ordered
    assert (order.plan, order.is_searching, order.workload.answers) == (RUNS, True, 300)
    state = read_state(run.folder / "slo.json")
    assert state.error == pytest.approx(7.65 / 7.4 - 1, abs=0.02)


def test_other_bounds_are_put_in_force_without_a_restart(system: Callable[..., System]) -> None:
    run = system()
    run.after(check(MISSES, OTHER))
    assert '"max_batch_size":5' in run.bounds
    assert run.restarted == []
    assert read_plan(run.folder / "plan.json") == OTHER
    assert run.said[0] == (
        "slo: another plan is in force: the plan would miss the goal on the lengths of now: 99 % within 9 s"
    )
    run.after(check(figures(), OTHER))
    assert run.ordered[-1].plan == OTHER


def test_another_strategy_restarts_the_schedulers(system: Callable[..., System]) -> None:
    run = system()
    run.after(check(MISSES, ROUNDS))
    [settings] = run.restarted
    assert (settings.policy, settings.encode_batch, settings.decode_steps) == ("rra", 3, 7)
    assert '"encode_batch":3' in (run.folder / "bounds-rra.json").read_text()
    run.after(check(MISSES, OTHER))
    assert [each.policy for each in run.restarted] == ["rra", "iteration"]
    assert run.restarted[-1].encode_batch is None


def test_another_layout_is_recommended_with_a_command_and_the_best_of_this_one_runs(
    system: Callable[..., System],
) -> None:
    run = system()
    closest = of_model(plan(2, latency_s=8.2))
    run.after(check(MISSES, DEEPER), check(MISSES, closest))
    free, own = run.ordered
    assert free.limits.shape.stages is None
    assert (own.limits.shape.stages, own.limits.shape.layers) == (1, (MODEL.num_layers,))
    assert '"max_batch_size":2' in run.bounds
    state = read_state(run.folder / "slo.json")
    assert (state.plan, state.recommended, state.is_met, state.is_infeasible) == (closest, DEEPER, False, False)
    file = run.folder / "recommended-plan.json"
    assert read_plan(file) == DEEPER
    assert run.said[-1].endswith(f"to run it: orca up --plan {file}")
    assert run.said[0] == (
        "slo: another plan is in force: no schedule of the running layout meets the goal, and the closest one serves"
    )


def test_another_layout_from_too_few_answers_is_recommended_without_another_search(
    system: Callable[..., System],
) -> None:
    run = system(answers=150)
    run.after(check(MISSES, DEEPER, workload=lengths(150)))
    assert len(run.ordered) == 1
    assert read_state(run.folder / "slo.json").recommended == DEEPER


def test_without_a_plan_for_the_running_layout_the_best_one_of_all_is_recommended(
    system: Callable[..., System],
) -> None:
    run = system(plan=None)
    run.checks = [check(None, DEEPER), check(None, None, complaint="nothing fits")]
    run.look()
    state = read_state(run.folder / "slo.json")
    assert (state.plan, state.recommended) == (None, DEEPER)


def test_a_plan_is_in_force_from_the_end_of_a_long_check_on(system: Callable[..., System]) -> None:
    """Answers that end during the check are of the plan before."""
    run = system(check_minutes=14)
    run.after(check(MISSES, OTHER))
    state = read_state(run.folder / "slo.json")
    assert (state.plan, state.since_ms, state.checked_ms) == (OTHER, run.awake_ms, run.awake_ms)
    run.look(minutes=9)
    assert len(run.ordered) == 1


def test_the_measured_throughput_is_that_of_one_group(system: Callable[..., System]) -> None:
    run = system("--replicas", "2")
    run.look()
    run.look(minutes=1)
    run.after(check(figures(), RUNS), minutes=29)
    state = read_state(run.folder / "slo.json")
    assert state.measured is not None
    assert state.measured.throughput == pytest.approx(300 / 600 / 2)
    assert run.ordered[0].limits.groups == 2


def test_answers_count_from_when_those_of_another_plan_are_over(system: Callable[..., System]) -> None:
    run = system()
    run.look()
    run.look(minutes=0.1)
    assert read_state(run.folder / "slo.json").measured is None, "not before the time of the bound"
    run.look(minutes=0.9)
    assert read_state(run.folder / "slo.json").measured is None, "these answers may be of another plan"
    run.after(check(figures(), RUNS))
    measured = read_state(run.folder / "slo.json").measured
    assert measured is not None
    assert measured.answers == 300


def test_files_that_cannot_be_written_are_reported_once_and_stop_nothing(system: Callable[..., System]) -> None:
    run = system()
    (run.folder / "slo.json").mkdir()
    (run.folder / "plan.json").mkdir()
    run.look()
    run.look(minutes=1)
    assert [line.partition(" cannot")[0] for line in run.said] == [f"slo: {run.folder / 'slo.json'}"]
    run.after(check(MISSES, OTHER))
    assert '"max_batch_size":5' in run.bounds
    assert len([line for line in run.said if "cannot be written" in line]) == 2
    run.after(check(figures(), OTHER))
    assert run.ordered[-1].plan == OTHER


def test_bounds_that_cannot_be_written_leave_the_plan_in_force(system: Callable[..., System]) -> None:
    run = system()
    (run.folder / "bounds-iteration.json").mkdir()
    run.after(check(MISSES, OTHER))
    assert run.said[-1].endswith("; the next check is in ten minutes")
    assert run.follower.state is not None
    assert run.follower.state.plan == RUNS
    run.look(minutes=9)
    assert len(run.ordered) == 1


def test_another_layout_that_brings_more_is_recommended_once(system: Callable[..., System]) -> None:
    run = system()
    faster = of_model(plan(5, throughput=60.0), stages=2)
    for _ in range(5):
        run.after(check(figures(), faster))
    assert len([line for line in run.said if "recommended" in line]) == 1
    assert read_plan(run.folder / "recommended-plan.json") == faster
    assert not (run.folder / "bounds-iteration.json").exists()


def test_recommend_changes_nothing(system: Callable[..., System]) -> None:
    run = system("--replan", "recommend")
    run.after(check(MISSES, OTHER))
    assert not (run.folder / "bounds-iteration.json").exists()
    assert "slo: WARNING: the plan would miss the goal" in run.said[0]
    assert "slo: recommended: iteration, batch 5" in run.said[-1]


def test_off_searches_nothing(system: Callable[..., System]) -> None:
    run = system("--replan", "off")
    run.after(check(MISSES, None))
    assert not run.ordered[0].is_searching
    assert "slo: WARNING: the plan would miss the goal" in run.said[0]


def test_a_bound_that_nothing_meets_is_said_at_each_check(system: Callable[..., System]) -> None:
    closest = of_model(plan(1, latency_s=8.9))
    run = system(plan=closest)
    run.after(check(figures(6.0, 8.9), closest))
    assert run.said[0].startswith("slo: WARNING: no schedule meets the goal (99 % within 8 s)")


def test_lengths_that_have_changed_are_named(system: Callable[..., System]) -> None:
    run = system()
    run.after(check(figures(), RUNS, workload=lengths(500, output_mean=75.0)))
    assert run.said[0].endswith("; lengths since then: prompt mean +0 %, output mean +50 %, output p99 +0 %")


def test_without_enough_answers_the_stated_lengths_are_checked(system: Callable[..., System]) -> None:
    run = system("--slo-workload", "8/4", answers=199)
    run.after(check(figures(), RUNS))
    assert run.ordered[0].workload.answers == 0
    run.answers = 200
    run.after(check(figures(), RUNS))
    assert run.ordered[1].workload.answers == 200


def test_the_first_plan_comes_with_the_first_answers(system: Callable[..., System]) -> None:
    run = system(plan=None, answers=0)
    run.look()
    assert (run.ordered, run.said) == ([], [])
    run.answers = 300
    run.after(check(None, OTHER))
    assert read_state(run.folder / "slo.json").plan == OTHER
    assert run.said[0] == "slo: a plan is in force: it is the first plan"


def test_a_check_that_fails_is_reported_and_the_plan_stays(system: Callable[..., System]) -> None:
    run = system()
    run.after(CheckFailed("the plan could not be checked: out of memory"))
    assert run.said == ["slo: the plan could not be checked: out of memory; the next check is in ten minutes"]
    run.look(minutes=9)
    assert len(run.ordered) == 1
    run.after(check(MISSES, OTHER), minutes=1)
    assert '"max_batch_size":5' in run.bounds


def test_a_pool_that_is_away_is_reported_once_until_it_is_back(system: Callable[..., System]) -> None:
    run = system()
    run.pool_error = PoolUnavailable("connection refused")
    run.look()
    run.look()
    assert run.said == ["slo: the pool does not tell the latencies of answers: connection refused"]
    run.pool_error = None
    run.after(check(figures(), RUNS))
    run.pool_error = PoolUnavailable("connection refused")
    run.look()
    assert len([line for line in run.said if "connection refused" in line]) == 2
