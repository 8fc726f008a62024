"""The items of `orca bench exegpt`: their arithmetic and their structure, and the two tables that are deterministic."""

import math
from pathlib import Path

import orjson
import pytest

from orca.bench.exegpt.calibration import best_of, calibrations, stage_encode_s, table6_rows
from orca.bench.exegpt.drift import changed_workload, lengths_with
from orca.bench.exegpt.faster_transformer import FasterTransformer, expected_largest
from orca.bench.exegpt.gains import BoundResult, summary_rows
from orca.bench.exegpt.monotony import not_monotone
from orca.bench.exegpt.rows import PaperRow, figures, lines
from orca.bench.exegpt.schedules import Schedules, ThinnedSpace
from orca.bench.exegpt.setups import FIGURES, OPT_13B, T5_11B, calibrated, workload_of
from orca.bench.exegpt.table3 import table3_rows
from orca.bench.exegpt.variance import ranges_of
from orca.bench.main import main
from orca.bench.plan.search_check import (
    check_functions,
    check_scenario,
    function_lines,
    scenario_lines,
    scenarios,
)
from orca.core.domain.errors import SettingError
from orca.planner.search.branch_and_bound import Performance, SearchBlock
from orca.planner.workload.tasks import Moments
from orca.scheduler.policy.request_level import Habits


def test_the_outputs_of_every_task_have_the_percentile_of_table_3() -> None:
    rows = table3_rows()
    assert [row.settings["task"] for row in rows] == ["S", "T", "G", "C1", "C2"]
    assert all(row.is_met for row in rows)


def test_one_row_of_table_6_predicts_the_other() -> None:
    found = calibrations()
    best = best_of(found)
    assert best.layout == "1 x 4"
    judged = [row for row in table6_rows(found) if row.goal is not None]
    assert {row.settings["formula"] for row in judged} == {"orca", "paper"}
    assert all(row.settings["row"] == 4 and row.is_met for row in judged)
    assert stage_encode_s(best) == pytest.approx(1.68, rel=1e-3)
    # The package stores what this calibration finds.
    for name in ("arithmetic", "memory", "links"):
        assert getattr(calibrated(), name) == pytest.approx(getattr(best.efficiencies, name), abs=1e-3)


def test_a_verdict_needs_a_goal() -> None:
    row = PaperRow(what="Gain", unit="x", settings={"task": "S"}, ours=3.0, paper=3.2, goal=(2.0, 4.0))
    assert (row.is_met, row.verdict) == (True, "met (2 to 4)")
    missed = PaperRow(what="Gain", unit="x", ours=5.0, goal=(2.0, 4.0))
    assert (missed.is_met, missed.verdict) == (False, "MISSED (2 to 4)")
    assert PaperRow(what="Gain", unit="x", ours=5.0).is_met is None
    assert "3.2" in lines([row, missed])[1]
    # The paper's value is a figure of its own, under the same name.
    assert [(each.value, each.settings["source"]) for each in figures([row, missed])] == [
        (3, "Orca"),
        (3.2, "paper"),
        (5, "Orca"),
    ]


def test_layouts_use_all_devices_and_divide_the_layers() -> None:
    assert OPT_13B.degrees() == [1, 2, 4]
    large = FIGURES["8"].setups[3]
    # 120 layers cannot be divided over 48 stages.
    assert large.degrees() == [2, 4, 8]
    for setup in (OPT_13B, large):
        for ranks in setup.degrees():
            placed = setup.placed(ranks, workload_of("S"))
            assert placed.layout.devices == setup.devices
            assert len(placed.costs) == placed.layout.stages


def test_the_baseline_computes_its_batch_until_the_longest_answer_ends() -> None:
    baseline = FasterTransformer(OPT_13B, workload_of("S"))
    # One request has an answer of mean length, and large batches one of nearly the maximum length.
    assert baseline.iterations(1) == pytest.approx(baseline.workload.outputs.mean)
    assert 63 < baseline.iterations(100) < baseline.iterations(300) <= 80
    bounds = baseline.bounds()
    assert bounds == sorted(bounds)
    assert bounds[-1] == math.inf
    best = [baseline.best(bound) for bound in bounds]
    assert all(point is not None and point.latency_s <= bound for point, bound in zip(best, bounds, strict=True))
    assert best[0] is not None
    assert best[0].batch % 4 == 0
    assert baseline.best(0.0) is None


@pytest.mark.parametrize(("setup", "batch"), [(OPT_13B, 16), (T5_11B, 16)], ids=str)
def test_the_formulas_of_the_baseline_agree_with_its_policy(setup: object, batch: int) -> None:
    baseline = FasterTransformer(setup, workload_of("S"))  # type: ignore[arg-type]
    assert baseline.simulated(batch, requests=96) == pytest.approx(baseline.point(batch).throughput, rel=0.08)


def test_prompts_that_run_one_by_one_make_the_baseline_slower() -> None:
    """The habit `starts_at_shortest`, whose formulas agree with the policy as well."""
    all_habits = FasterTransformer(OPT_13B, workload_of("S"), habits=Habits())
    baseline = FasterTransformer(OPT_13B, workload_of("S"))
    assert all_habits.is_serial
    assert all_habits.iterations(16) > baseline.iterations(16) + 256
    assert 1 <= all_habits.shortest(64) < all_habits.shortest(4) < 256
    assert all_habits.simulated(16, requests=48) == pytest.approx(all_habits.point(16).throughput, rel=0.08)
    # Sources of an encoder-decoder model always run whole.
    assert not FasterTransformer(T5_11B, workload_of("S"), habits=Habits()).is_serial


def test_the_largest_of_some_lengths_is_expected_by_hand() -> None:
    # Of two dice with two sides: 1 with a quarter, otherwise 2.
    assert expected_largest([(1, 0.5), (2, 0.5)], 2) == pytest.approx(1.75)


def test_points_of_a_thinned_space_are_points_of_the_space() -> None:
    space = SearchBlock((1, -319), (700, -1))
    thinned = ThinnedSpace.of(space, 16)
    assert all(values == sorted(set(values)) for values in thinned.values)
    assert thinned.point(thinned.block.lower) == (1, -319)
    assert thinned.point(thinned.block.upper) == (700, -1)
    assert max(map(len, thinned.values)) <= 17
    assert ThinnedSpace.of(space, None).block.points == space.points


def test_the_best_schedule_meets_its_bound_and_fits() -> None:
    schedules = Schedules(OPT_13B, workload_of("S"), degrees=[4], values=8)
    baseline = FasterTransformer(OPT_13B, workload_of("S"))
    for bound in baseline.bounds():
        found = schedules.best("RRA", bound)
        assert found is not None
        assert found.expected.fits
        assert found.expected.latency_s <= bound
    assert schedules.best("RRA", 0.001) is None
    before = schedules.evaluated
    schedules.best("RRA", math.inf)
    assert schedules.evaluated == before, "a point is estimated once"


def test_gains_are_of_bounds_that_both_systems_meet() -> None:
    large = FIGURES["8"].setups[1]
    results = [
        BoundResult(
            large, "G", "10 %", 5.0, {"FT": 1.0, "RRA": 4.0, "RRA, formulas of the paper": 4.0, "iteration": 6.0}
        ),
        BoundResult(
            large, "G", "none", math.inf, {"FT": 2.0, "RRA": 4.0, "RRA, formulas of the paper": 6.0, "iteration": 2.0}
        ),
        BoundResult(
            large, "C1", "10 %", 5.0, {"FT": None, "RRA": 4.0, "RRA, formulas of the paper": None, "iteration": 3.0}
        ),
    ]
    rows = {(row.what, row.settings["system"]): row for row in summary_rows("8", "maximum length", results)}
    assert rows["Mean gain over FT", "RRA"].ours == pytest.approx(3.0)
    assert rows["Mean gain over FT", "RRA"].goal == pytest.approx((2.24, 4.16))
    assert rows["Mean gain over FT without a bound", "RRA"].ours == pytest.approx(2.0)
    assert rows["Largest gain over FT", "iteration"].ours == pytest.approx(6.0)
    assert rows["Bounds that FT does not meet", "RRA"].ours == 1
    assert rows["Rank of the gain at 175B, G, tightest bound", "RRA"].is_met


def test_points_below_those_before_them_are_not_monotone() -> None:
    line = [Performance(1.0, 10.0), Performance(2.0, 9.6), Performance(1.5, 12.0), Performance(1.9, 11.0)]
    # Latency falls by 0.5 and 0.1 below the most before, throughput by 4 % and 8.3 %.
    assert not_monotone([line], latency=0.2, throughput=0.05) == (25.0, 25.0)
    assert not_monotone([line], latency=0.05, throughput=0.02) == (50.0, 50.0)
    assert not_monotone([line], latency=0.6, throughput=0.1) == (0.0, 0.0)


def test_ranges_are_those_of_whole_cycles_in_the_middle() -> None:
    steps = [(True, 9.0), (False, 9.0)] * 4
    steps += [(True, 2.0), (False, 1.0), (False, 0.5)] * 8
    steps += [(True, 9.0), (False, 9.0)] * 4
    found = ranges_of(steps)
    assert found["encode"].mean_s == 2.0
    assert found["encode"].percent == 0.0
    assert found["decode, first of a phase"].mean_s == 1.0
    assert found["decode, mean of a phase"].mean_s == 0.75
    # Half of them 1 s, half of them 0.5 s: a quarter second around the mean of 0.75 s.
    assert found["decode, all"].percent == pytest.approx(100 / 3)
    assert found["decode, all"].deviation_percent == pytest.approx(100 / 3)


def test_changed_lengths_have_the_changed_moment_only() -> None:
    for quantity, mean, deviation in (("mean", 89.6, 68.0), ("standard deviation", 128.0, 88.4)):
        factor = 0.7 if quantity == "mean" else 1.3
        outputs = changed_workload(quantity, factor).outputs
        assert outputs.mean == pytest.approx(mean, rel=1e-4)
        assert outputs.deviation == pytest.approx(deviation, rel=1e-4)
        assert outputs.high == 320
    with pytest.raises(ValueError, match="no lengths from 1 to 10"):
        lengths_with(Moments(5.0, 40.0, 10))


def test_the_search_is_checked_in_every_scenario_once() -> None:
    found = scenarios()
    assert len(found) == len(set(found)) == 23
    bound_s = FasterTransformer(T5_11B, workload_of("S")).bounds()[0]
    result = check_scenario(T5_11B, "S", "10 %", bound_s, grid=4)
    assert result.share <= 0.05
    assert result.found >= result.exhaustive * 0.98
    assert result.shortfall <= 0.02
    functions = check_functions(16)
    assert all(each.shortfall <= each.tolerance + 1e-12 and not each.breaks_bound for each in functions)
    assert any("8 within the tolerance of 0.0%" in line for line in function_lines(functions))
    assert "1 of 1" in scenario_lines([result])[-1]


def test_an_item_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "table3.json"
    assert main(["exegpt", "table3", "--json", str(written)]) == 0
    assert "met (62 to 64)" in capsys.readouterr().out
    rows = orjson.loads(written.read_bytes())
    assert [row["settings"]["task"] for row in rows] == ["S", "T", "G", "C1", "C2"]
    assert all(row["is_met"] for row in rows)


@pytest.mark.parametrize(
    "words", [["table9"], ["4", "--pictures", "no/such/folder"], ["table3", "--", "--stages", "2"]]
)
def test_a_bad_item_or_folder_is_refused(words: list[str]) -> None:
    with pytest.raises(SettingError):
        main(["exegpt", *words])
