"""Real runs of `orca bench plan real` and of `orca bench exegpt table7 --real`."""

from pathlib import Path

import pytest

from orca.bench.exegpt.real_variance import real_table7_rows
from orca.bench.peers.model import LlamaShape, make_model
from orca.bench.plan.real.case import RealCase
from orca.bench.plan.real.run import requests_of, run_setting
from orca.bench.plan.real.survey import grid_settings, request_level
from orca.planner.simulate.steady_state import REQUESTS_MIN
from support.planner.profiles import profile

TINY = LlamaShape(layers=6, hidden=48, heads=4, kv_heads=2, intermediate=80, vocab=300, positions=256)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_settings_run_and_are_measured_by_their_logs(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    make_model(model, TINY)
    case = RealCase(model=model, profile=profile(), task="S", stages=2, ranks=1, most=8)
    *_, rra = grid_settings(case, 1)
    batches = request_level(case, 4)
    # The second run is too short at first, whatever the machine: it is repeated with more requests.
    for setting, requests in ((batches, requests_of(batches, 60)), (rra, REQUESTS_MIN)):
        found = run_setting(case, setting, requests=requests, seed=0, folder=tmp_path)
        assert found.requests >= REQUESTS_MIN
        assert found.throughput > 0
        assert found.latency_s > 0
        assert 0 < found.step_ms < 1000
        assert 0 < found.step_rows <= 8
        assert 0 < found.idle < 1
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"], "logs are removed"


def test_stage_times_are_those_of_both_real_stages(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", TINY)
    rows = real_table7_rows(tmp_path / "tiny", print, requests=300, rounds=1)
    keys = {(row.settings["stage"], row.settings["dynamic_adjustment"]) for row in rows}
    assert keys == {(0, "on"), (0, "off"), (1, "on"), (1, "off")}
    assert len(rows) == 4 * 4 * 3
    assert all(row.ours > 0 for row in rows if row.what == "Real stage time")
    assert all(row.settings["timeline"] == "real" for row in rows)
