"""The items of `orca bench exegpt`: their arithmetic and their structure, and the two tables that are deterministic."""

import math

import pytest

from orca.bench.exegpt.calibration import best_of, calibrations, stage_encode_s, table6_rows
from orca.bench.exegpt.faster_transformer import FasterTransformer
from orca.bench.exegpt.rows import PaperRow, figures, lines
from orca.bench.exegpt.setups import FIGURES, OPT_13B, T5_11B, calibrated, workload_of
from orca.bench.exegpt.table3 import table3_rows


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
