"""`orca bench plan real`: its settings, the kept runs, the comparison of measured runs, and its table."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from orca.bench.main import main as bench
from orca.bench.plan.real.case import RealCase
from orca.bench.plan.real.compare import BASELINE, DEFAULT, GRID, PLAN, BoundRuns, RealRuns, compare_case
from orca.bench.plan.real.kept import KeptRuns, RunKey
from orca.bench.plan.real.run import RealFigures, read_figures, requests_of
from orca.bench.plan.real.setting import RealSetting
from orca.bench.plan.real.survey import (
    baseline_batches,
    batch_sizes,
    bounds_of,
    default_iteration,
    default_sizes,
    grid_settings,
    ladder,
    request_level,
)
from orca.bench.plan.real.table import figures, lines, to_json
from orca.bench.plan.real_command import estimate
from orca.cli.small_model import small_model_folder
from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import to_json as profile_to_json
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import (
    VERSION,
    Plan,
    PlannedBounds,
    PlannedDevice,
    PlannedFigures,
    PlannedGoal,
    PlannedSchedule,
    PlannedWorkload,
)
from support.planner.profiles import profile

PREDICTED = PlannedFigures(throughput=11.0, latency_s=3.5, ttft_s=1.0, tpot_s=0.1)


def run_figures(throughput: float, latency_s: float, *, idle: float = 0.1) -> RealFigures:
    return RealFigures(requests=100, throughput=throughput, latency_s=latency_s, step_ms=20.0, step_rows=8.0, idle=idle)


def schedule(case: RealCase) -> PlannedSchedule:
    return PlannedSchedule(
        policy="rra",
        layers=(4, 2),
        ranks=1,
        prefetch=1,
        slots=case.slots,
        bounds=PlannedBounds(
            max_batch_size=20,
            encode_batch=8,
            decode_steps=4,
            decode_batch=24,
            encode_tokens=400,
            threshold_percent=20,
        ),
        expected=PREDICTED,
        simulated=PREDICTED,
    )


class PlannedCase(RealCase):
    """A case whose plan is always the same one."""

    def plan(self, latency_s: float, report: Callable[[str], None]) -> Plan:  # noqa: ARG002
        return Plan(
            version=VERSION,
            release="0",
            device=PlannedDevice(key=self.profile.key),
            goal=PlannedGoal.of(PlanGoal(latency_ms=1000 * latency_s)),
            workload=PlannedWorkload.of(self.workload),
            schedule=schedule(self),
            is_met=True,
            fewest_devices=None,
            alternatives=(),
            evaluated=1,
            points=1,
        )


def case_of(task: str = "S", *, has_encoder: bool = False, most: int = 64) -> RealCase:
    return PlannedCase(
        model=Path("models/tiny"),
        profile=profile(has_encoder=has_encoder),
        task=task,
        stages=2,
        ranks=1,
        most=most,
    )


def test_settings_are_equal_if_their_options_are() -> None:
    case = case_of()
    one = case.planned(case.plan(1.0, print))
    other = RealSetting.of(dict(one.flags), "the same under another name", 1)
    assert one == other
    assert len({one, other, request_level(case, 4)}) == 2
    words = one.words()
    chosen = dict(zip(words[::2], words[1::2], strict=True))
    assert chosen["--policy"] == "rra"
    assert chosen["--encode-batch"] == "8"
    assert chosen["--layers"] == "4,2"
    assert chosen["--max-model-len"] == str(case.workload.longest)
    assert one.in_flight == 32


def test_all_settings_have_the_same_memory() -> None:
    """The baseline reserves the largest length for each of its 64 requests."""
    for case, length in ((case_of(), 160), (case_of(has_encoder=True), 176)):
        settings = [request_level(case, 64), default_iteration(case, 32), *grid_settings(case, 2)]
        assert {dict(setting.flags)["slots"] for setting in settings} == {str(64 * length)}
        assert {dict(setting.flags)["stages"] for setting in settings} == {"2"}


def test_the_baseline_divides_its_batch_over_the_stages() -> None:
    case = case_of()
    flags = dict(request_level(case, 20).flags)
    assert (flags["max_batch_size"], flags["microbatch_size"]) == ("20", "10")
    assert flags["without_habits"] == "starts_at_shortest"
    assert baseline_batches(case) == [4, 8, 20, 48, 64]
    assert case.places > 64, "requests of mean length are shorter"
    assert default_sizes(case) == [case.places // 2 >> power for power in (4, 3, 2, 1, 0)]
    assert "max_batch_tokens" not in dict(default_iteration(case, 8).flags), "the default is not an option"
    assert default_iteration(case, 8).text == "iteration, batch 8, 256 tokens a step"


def test_the_grid_has_as_many_settings_of_each_strategy() -> None:
    grid = grid_settings(case_of("C1"), 3)
    assert [setting.strategy for setting in grid] == ["iteration"] * 3 + ["rra"] * 6
    assert len(set(grid)) == 9
    assert {dict(setting.flags)["layers"] for setting in grid} == {"3,3"}
    for setting in grid[:3]:
        flags = dict(setting.flags)
        assert int(flags["max_batch_tokens"]) - int(flags["max_batch_size"]) == 32, "half of 64 tokens"
    # Sources run whole, so there are no chunks.
    assert [setting.strategy for setting in grid_settings(case_of(has_encoder=True), 2)] == ["rra"] * 4
    assert ladder(32, 3) == [32, 16, 8]
    assert ladder(5, 1) == [5]


def test_bounds_are_the_lowest_shares_of_the_latencies_of_all_batch_sizes() -> None:
    measured = {4: 1.0, 8: 2.0, 20: 5.0, 48: 12.0, 64: 16.0}
    assert batch_sizes(64) == list(range(4, 65, 4))
    assert bounds_of(measured, 64) == [2.0, 5.0, 12.0, math.inf]
    # Latencies of sizes that were not measured lie on a line, and the bounds are of sorted ones.
    assert bounds_of({4: 1.0, 64: 16.0}, 64) == pytest.approx([2.0, 5.0, 12.0, math.inf])
    assert bounds_of({4: 16.0, 64: 1.0}, 64) == pytest.approx([2.0, 5.0, 12.0, math.inf])
    assert bounds_of({4: 3.0}, 4) == [3.0, 3.0, 3.0, math.inf]


def test_a_run_is_long_enough_for_what_the_group_holds() -> None:
    case = case_of()
    assert requests_of(default_iteration(case, 8), 200) == 200 + 3 * 16
    assert requests_of(request_level(case, 48), 200) == 6 * 48, "whole batches of the baseline"


def test_figures_are_of_the_steady_state(tmp_path: Path) -> None:
    """Ten answers of four tokens at a time; each stage computes half of each second."""
    scheduler, stages = [], [[], []]  # type: ignore[var-annotated]
    for step in range(48):
        group = step // 4
        phase = "initiation" if step % 4 == 0 else "increment"
        rows = [[f"r{group}-{number}", phase, step % 4, 1] for number in range(10)]
        times = {"submitted_ns": step * 10**9, "returned_ns": (step + 1) * 10**9}
        scheduler.append({"rows": rows, **times})
        for stage in (0, 1):
            begin_ns = step * 10**9 + stage * 5 * 10**8
            stages[stage].append({"handles": list(range(10)), "start_ns": begin_ns, "end_ns": begin_ns + 5 * 10**8})
    for name, content in (("scheduler-0", scheduler), ("worker-0.0", stages[0]), ("worker-0.1", stages[1])):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, content)))
    found = read_figures(tmp_path)
    assert found.throughput == pytest.approx(2.5)
    assert found.latency_s == pytest.approx(4.0)
    assert found.step_ms == pytest.approx(500.0)
    assert found.step_rows == 10
    assert found.idle == pytest.approx(0.5)


def test_kept_runs_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ran = tmp_path / "runs.jsonl", []

    def run(case: RealCase, setting: RealSetting, *, requests: int, seed: int, folder: Path) -> RealFigures:  # noqa: ARG001
        ran.append((setting.text, seed))
        return run_figures(10.0 + seed, 1.0)

    monkeypatch.setattr("orca.bench.plan.real.compare.run_setting", run)
    case = case_of()
    first = RealRuns(KeptRuns(file), tmp_path, 100, print)
    assert [first(case, request_level(case, 4), seed).throughput for seed in (0, 1, 0)] == [10.0, 11.0, 10.0]
    assert len(ran) == first.measured == 2
    # A bench that was killed while it wrote leaves a part of a line.
    file.write_bytes(file.read_bytes() + b'{"key": {"mod')
    second = RealRuns(KeptRuns(file), tmp_path, 100, print)
    assert len(second.kept) == 2
    assert second(case, request_level(case, 4), 1).throughput == 11.0
    assert second(case, request_level(case, 8), 0).throughput == 10.0
    assert ran[2:] == [("request_level, batch 8", 0)]
    assert len(KeptRuns(file)) == 3


def test_a_line_that_is_no_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    key = RunKey(model="m", task="S", options=("--stages", "2"), requests=10, seed=0)
    line = {"key": dataclasses.asdict(key), "figures": dataclasses.asdict(run_figures(1.0, 1.0))}
    file.write_bytes(orjson.dumps(line) + b"\n")
    assert KeptRuns(file).find(key) == run_figures(1.0, 1.0)
    file.write_bytes(orjson.dumps(line) + b'\n{"key": 1}\n')
    with pytest.raises(SettingError, match=r"runs.jsonl, line 2: figures is missing"):
        KeptRuns(file)


class FakeMachine:
    """Every strategy has a throughput and a latency in proportion to the requests that the group holds."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def __call__(self, case: RealCase, setting: RealSetting, seed: int) -> RealFigures:
        assert case.task == "S"
        self.ran.append((setting.text, seed))
        speed = {"rra": 4.0, "iteration": 3.0, "request_level": 1.0}[setting.strategy]
        return run_figures(speed * (1 + setting.in_flight / 100) * (1 + seed / 10), setting.in_flight / speed / 4)


def compared() -> tuple[list[BoundRuns], FakeMachine]:
    machine = FakeMachine()
    return compare_case(case_of(), machine, grid=2, rounds=2, report=print), machine


def test_plans_and_what_they_are_compared_with_take_turns() -> None:
    results, machine = compared()
    assert [result.bound for result in results] == ["10 %", "30 %", "70 %", "none"]
    # The baseline of 8, 20 and 48 requests takes a quarter of a second for each of them.
    assert [result.bound_s for result in results] == [2.0, 5.0, 12.0, math.inf]
    first, second = ([text for text, seed in machine.ran if seed == number] for number in (1, 2))
    assert first == second[::-1]
    assert len(first) == len(set(first)), "a setting runs once in each round"
    assert [text for text, seed in machine.ran if seed == 0][:2] == ["request_level, batch 4", "request_level, batch 8"]


def test_each_system_has_its_best_setting_within_the_bound() -> None:
    results, _ = compared()
    tight, loose = results[0], results[-1]
    assert tight.settings[BASELINE].text == "request_level, batch 8"
    assert tight.settings[DEFAULT].text == "iteration, batch 8, 256 tokens a step"
    assert loose.settings[DEFAULT].text == "iteration, batch 64, 256 tokens a step"
    assert loose.settings[GRID].strategy == "rra"
    # 32 requests at a time: 4 x 1.32 against 1 x 1.08 in each round.
    assert tight.ratios(BASELINE) == pytest.approx([4 * 1.32 / 1.08] * 2)
    assert tight.met == [True, True]
    assert tight.winner == "rra"
    assert tight.reason.startswith("1.")
    assert "x iteration: a step has 8.0 requests in 20 ms, not 8.0 in 20 ms, and a stage is idle 10%" in tight.reason


def test_a_bound_that_a_system_cannot_meet_has_no_ratio() -> None:
    case = case_of()
    result = BoundRuns(
        model="m",
        task="S",
        bound="10 %",
        bound_s=1.0,
        plan="rra",
        predicted=PREDICTED,
        is_promised=False,
        settings={PLAN: case.planned(case.plan(1.0, print))},
        runs={PLAN: [run_figures(5.0, 1.5), run_figures(6.0, 0.5)]},
    )
    assert result.ratios(GRID) == []
    assert result.met == [False, True]
    assert (result.winner, result.reason) == ("none", "no strategy meets the bound")
    table = "\n".join(lines([result]))
    assert "1 of 2" in table
    assert "Runs that meet their bound 50.0 %" in table
    assert "over" not in table


def test_the_table_the_figures_and_the_json_have_every_bound() -> None:
    results, _ = compared()
    table = lines(results)
    assert table[0].split()[:3] == ["model", "task", "bound"]
    assert [line.split()[2] for line in table[1:4]] == ["10", "30", "70"]
    assert "RRA, B_E 8, N_D 4, 2 stages" in table[1]
    assert "2 of 2" in table[1]
    assert "Mean throughput over request_level" in table[-4]
    found = figures(results)
    assert len({(each.what, tuple(each.settings.items())) for each in found}) == len(found)
    by_what = {what: [each for each in found if each.what == what] for what in {each.what for each in found}}
    assert len(by_what["Latency bound"]) == 3, "infinity is no figure"
    assert len(by_what["Throughput under a bound"]) == 4 * 5
    assert len(by_what["Most throughput"]) == 4
    assert all(each.runs == 2 for each in by_what["Throughput of the plan over others"])
    [met] = by_what["Runs that meet their bound"]
    assert met.value == 100
    written = orjson.loads(orjson.dumps(to_json(results)))
    assert [each["bound_s"] for each in written] == [2.0, 5.0, 12.0, None]
    assert len(written[0]["runs"][PLAN]) == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--tasks", "S,Q"], "--tasks Q is not one of S, T, G, C1, C2"),
        (["--most", "6"], "--most 6 is not a multiple of 4 from 8 on"),
        (["--most", "4"], "--most 4 is not a multiple of 4 from 8 on"),
        (["--rounds", "0"], "0 is not above 0"),
        (["--margin-percent", "100"], "--margin-percent 100 is not below 100"),
    ],
)
def test_bad_options_are_refused_by_name(words: list[str], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        bench(["plan", "real", *words])


def test_a_folder_to_keep_runs_in_must_be_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingError, match=r"--keep .*file: File exists"):
        bench(["plan", "real", "--keep", str(file), "--model", str(tmp_path)])


def test_a_kept_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    model = small_model_folder()
    (tmp_path / f"profile-{model.name}.json").write_bytes(profile_to_json(profile()))
    with pytest.raises(SettingError, match=r"--keep: .*another measurement.*the profile has another key: its"):
        bench(["plan", "real", "--keep", str(tmp_path), "--model", str(model)])


def test_the_run_time_is_estimated() -> None:
    options = argparse.Namespace(tasks=("S", "T"), grid=2, rounds=2, minutes=3.0)
    # Four sizes of the baseline, five of the default, six of the grid, and half of 2 x 4 x 4 in the rounds.
    text = estimate(1, options, kept=10)
    assert text.startswith("about 27 minutes: 1 profiles of up to 3 minutes, and about 52 runs of 28 s")
