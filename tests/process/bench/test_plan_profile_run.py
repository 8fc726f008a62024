"""`orca bench plan profile` on real processes."""

import json
from pathlib import Path

import pytest

from orca.bench.main import main as bench
from orca.bench.parts.tiny_model import write_tiny_model
from orca.core.domain.errors import SettingError


def test_a_given_profile_needs_its_model_and_one_number_of_ranks() -> None:
    with pytest.raises(SettingError, match="--profile needs --model and one number of --ranks"):
        bench(["plan", "profile", "--profile", "p.json"])
    with pytest.raises(SettingError, match="--shapes nothing is not one of llama-63m"):
        bench(["plan", "profile", "--shapes", "nothing"])


@pytest.mark.slow
def test_real_steps_of_each_kind_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file, results = write_tiny_model(tmp_path / "tiny"), tmp_path / "steps.json", tmp_path / "plan.jsonl"
    flags = ["--model", str(model), "--ranks", "1,2", "--steps", "6", "--rounds", "2", "--minutes", "0.02"]
    assert bench(["plan", "profile", *flags, "--json", str(file), "--figures", str(results)]) == 0
    steps = json.loads(file.read_text())
    assert {(step["ranks"], step["kind"]) for step in steps} == {
        (ranks, kind) for ranks in (1, 2) for kind in ("decode", "prefill", "mixed")
    }
    assert all(step["measured_us"] > 0 and step["predicted_us"] > 0 for step in steps)
    of_steps, of_layout = 3 * 4, 3
    assert len(results.read_text().splitlines()) == 2 * (of_steps + of_layout)
    assert "error p50" in capsys.readouterr().out
