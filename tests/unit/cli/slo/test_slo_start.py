"""The plan of `orca up --slo-latency-ms`: from which profile and lengths, what becomes of it, what is said about it.

Measuring and the pool are stubs. The model is the small one, the times are made by hand.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from orca.cli.pool_lengths import lengths_json
from orca.cli.small_model import small_model_folder
from orca.cli.up.display import Display
from orca.cli.up.planned import given_options
from orca.cli.up.settings import UpSettings, parse_settings
from orca.cli.up.slo import start
from orca.cli.up.slo.measuring import MeasuringFailed
from orca.cli.up.slo.profiles import profile_folder
from orca.cli.up.slo.start import Begun, PlanOrder, PoolAccess, plan_start, read_order
from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.core.domain.model import load_model_info
from orca.planner.profile.profile import Profile, ProfileKey, to_json
from orca.planner.search.plan import read_plan
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import bin_of
from orca.pool.records import LengthCounts, PeriodLengths
from support.planner.profiles import profile_for

FEW = ("--tensor", "1", "--slots", "64")
"""Options that leave few layouts and small batches, so that search and simulation are short."""

QUICK = (*FEW, "--stages", "1", "--policy", "iteration")

STATED = ("--slo-workload", "8/4")


def counts(answers: int) -> LengthCounts:
    return LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(8), bin_of(4)): answers}, cut=0),))


@dataclass
class Start:
    """One start of the small model, without its parts."""

    data: Path
    counted: LengthCounts | Exception = field(default_factory=lambda: counts(300))
    failure: str | None = None  # of measuring
    measured: list[ProfileKey] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)  # URL and revision
    shown: io.StringIO = field(default_factory=io.StringIO)

    def order(self, *flags: str) -> PlanOrder:
        words = ["--slo-latency-ms", "60000", *flags]
        model = load_model_info(small_model_folder())
        return read_order(parse_settings(words), given_options(words), model, 0)

    def run(self, *flags: str) -> UpSettings:
        return self.begin(*flags).settings

    def begin(self, *flags: str) -> Begun:
        display = Display(Console(file=self.shown, force_terminal=False))
        return plan_start(self.order(*flags), PoolAccess(url="unix://x", login={}), self.data, display, self.measure)

    def measure(self, model: Path, key: ProfileKey, report: Callable[[str], None]) -> Profile:
        assert model == small_model_folder()
        self.measured.append(key)
        report("round 1")
        if self.failure is not None:
            raise MeasuringFailed(self.failure)
        return profile_for(key)

    async def read_counts(self, url: str, revision: str, _environment: object) -> tuple[LengthCounts, LatencyCounts]:
        self.asked.append((url, revision))
        if isinstance(self.counted, Exception):
            raise self.counted
        return self.counted, LatencyCounts(awake_ms=0, periods=())

    @property
    def plan(self) -> Path:
        return self.data / "plan.json"

    @property
    def said(self) -> str:
        return self.shown.getvalue()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    begun = Start(tmp_path)
    monkeypatch.setattr(start, "read_counts", begun.read_counts)
    return begun


def test_the_plan_becomes_options_and_a_file(begun: Start) -> None:
    settings, plan = begun.run(*QUICK, *STATED), read_plan(begun.plan)
    assert plan.is_met
    assert (settings.policy, settings.stages, settings.tensor) == ("iteration", 1, 1)
    assert settings.layers == ",".join(map(str, plan.schedule.layers))
    assert settings.max_batch_size == plan.schedule.bounds.max_batch_size
    assert settings.max_batch_tokens == (plan.schedule.bounds.max_batch_tokens or 0)
    assert settings.threads == plan.device.key.threads
    assert f"slo: {plan.describe()}" in begun.said
    assert f"slo: the plan and its alternatives are in {begun.plan}" in begun.said
    assert "WARNING" not in begun.said
    assert not begun.asked


def test_an_order_of_claims_is_kept_beside_a_plan(begun: Start) -> None:
    settings = begun.run(*QUICK, *STATED, "--order", "deadline", "--patience-s", "7", "--drop", "never")
    assert read_plan(begun.plan).is_met
    assert (settings.order, settings.patience_s, settings.drop) == ("deadline", 7, "never")


def test_an_order_of_claims_is_kept_where_no_plan_can_be_made(begun: Start) -> None:
    begun.counted = counts(3)
    started = begun.begin(*QUICK, "--order", "deadline", "--eta-percent", "40")
    assert started.plan is None
    assert (started.settings.order, started.settings.eta_percent) == ("deadline", 40)


def test_a_fixed_strategy_and_layout_are_kept(begun: Start) -> None:
    settings = begun.run("--policy", "rra", "--stages", "2", "--layers", "4,2", *FEW, *STATED)
    assert (settings.policy, settings.stages, settings.layers, settings.tensor) == ("rra", 2, "4,2", 1)
    assert settings.encode_batch
    assert settings.decode_steps
    [key] = begun.measured
    assert key.ranks == (1,)


def test_a_second_start_uses_the_profile_of_the_first_one(begun: Start) -> None:
    begun.run(*QUICK, *STATED)
    begun.run(*QUICK, *STATED)
    [key] = begun.measured
    assert f"slo: profile {key.digest} of an earlier start" in begun.said
    begun.run(*QUICK, *STATED, "--threads", "2")
    assert [each.threads for each in begun.measured] == [1, 2]


def test_a_damaged_profile_is_measured_again(begun: Start) -> None:
    begun.run(*QUICK, *STATED)
    [file] = profile_folder().iterdir()
    file.write_text("{")
    begun.run(*QUICK, *STATED)
    assert len(begun.measured) == 2
    assert f"slo: the kept profile {file} is not used" in begun.said
    begun.run(*QUICK, *STATED)
    assert len(begun.measured) == 2


def test_a_named_profile_is_used(begun: Start) -> None:
    named = begun.data / "named.json"
    named.write_bytes(to_json(profile_for(begun.order(*STATED).key)))
    begun.run(*QUICK, *STATED, "--slo-profile", str(named))
    assert not begun.measured


def test_a_named_profile_of_another_model_is_refused(begun: Start) -> None:
    named = begun.data / "named.json"
    named.write_bytes(to_json(profile_for(begun.order(*STATED).key)))
    with pytest.raises(SettingError, match=r"setting --slo-profile: .* its threads is 1, not 2"):
        begun.order(*STATED, "--slo-profile", str(named), "--threads", "2")


def test_a_model_that_cannot_be_measured_is_served_with_the_defaults(begun: Start) -> None:
    left = [begun.data / name for name in ("plan.json", "slo.json", "recommended-plan.json")]
    for file in left:
        file.write_text("of an earlier start")
    begun.failure = "no memory"
    settings = begun.run("--policy", "rra", *STATED)
    assert begun.said.splitlines()[-1] == "slo: no plan for 99 % within 60 s, the defaults serve: no memory"
    assert (settings.policy, settings.stages, settings.max_batch_size) == ("iteration", 1, 16)
    assert not any(file.exists() for file in left)


def test_without_stated_lengths_those_of_the_pool_are_planned_for(begun: Start) -> None:
    begun.run(*QUICK)
    assert begun.asked == [("unix://x", load_model_info(small_model_folder()).revision)]
    assert "planned from 300 answers" in begun.said


def test_with_too_few_answers_the_defaults_serve_until_the_running_system_has_counted_more(begun: Start) -> None:
    begun.counted = counts(199)
    settings = begun.run()
    assert (settings.policy, settings.max_batch_size) == ("iteration", 16)
    *_, line, next_line = begun.said.splitlines()
    assert "the defaults serve: 199 answers were counted in the last four hours, and a plan needs 200" in line
    assert "state the lengths with --slo-workload PROMPT/OUTPUT or --slo-lengths FILE" in line
    assert next_line == "slo: the running system tries again every ten minutes"
    assert len(begun.measured) == 1


def test_without_a_plan_the_profile_lets_the_system_be_followed(begun: Start) -> None:
    """The model is measured before the system serves: nothing is measured beside it."""
    begun.counted = counts(199)
    first = begun.begin(*QUICK)
    assert (first.plan, len(begun.measured)) == (None, 1)
    later = begun.begin(*QUICK)
    assert (later.plan, later.profile, len(begun.measured)) == (None, first.profile, 1)
    assert first.profile is not None
    begun.failure = "no memory"
    begun.counted = counts(300)
    assert begun.begin(*QUICK).plan is not None, "the kept profile is used"


def test_stated_lengths_win_over_counted_ones(begun: Start) -> None:
    begun.run(*QUICK, *STATED)
    assert read_plan(begun.plan).workload.answers == 0


def test_a_pool_that_does_not_answer_leaves_the_defaults(begun: Start) -> None:
    begun.counted = PoolUnavailable("connection refused")
    assert begun.run().max_batch_size == 16
    assert "the pool does not tell the lengths of answers: connection refused" in begun.said


def test_a_bound_that_nothing_meets_runs_the_closest_schedule_and_says_so(begun: Start) -> None:
    settings = begun.run(*QUICK, *STATED, "--slo-latency-ms", "1", "--slo-ttft-ms", "1")
    plan = read_plan(begun.plan)
    assert not plan.is_met
    assert settings.max_batch_size == plan.schedule.bounds.max_batch_size
    figures = plan.schedule.simulated
    assert figures is not None
    assert figures.latency_s is not None
    assert (
        "slo: WARNING: no schedule meets the goal (99 % within 0.001 s, first token within 1 ms)."
        f" Best achievable: 99 % within {figures.latency_s:.3g} s, first token within " in begun.said
    )


def test_stated_lengths_that_no_layout_can_hold_are_refused(begun: Start) -> None:
    with pytest.raises(SettingError, match="no plan can be made: a request of the workload needs up to 64 KV slots"):
        begun.run(*QUICK, "--slo-workload", "30/30", "--slots", "32")


def test_counted_lengths_that_no_layout_can_hold_leave_the_defaults(begun: Start) -> None:
    begun.counted = LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(30), bin_of(30)): 300}, cut=0),))
    begun.run(*QUICK, "--slots", "32")
    assert "the defaults serve: a request of the workload needs up to 64 KV slots" in begun.said


def test_counted_lengths_in_a_file_may_fill_the_context(begun: Start) -> None:
    file = begun.data / "lengths.json"
    filling = LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(30), bin_of(482)): 300}, cut=300),))
    file.write_text(lengths_json("r", filling, 1800))
    workload = begun.order("--slo-lengths", str(file)).workload
    assert workload is not None
    assert workload.longest == 512
