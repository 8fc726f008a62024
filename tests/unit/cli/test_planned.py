"""`orca up --plan FILE`: the plan's schedule becomes the options, and what contradicts it is refused by name."""

from pathlib import Path

import pytest

from orca.cli.main import main
from orca.cli.up.settings import parse_settings
from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import to_json
from orca.planner.search.plan import read_plan
from support.planner.profiles import profile


def a_plan(folder: Path, *flags: str) -> Path:
    """Return the file of a plan for a model of six layers."""
    (folder / "profile.json").write_bytes(to_json(profile()))
    out = folder / "plan.json"
    words = ["--profile", str(folder / "profile.json"), "--workload", "16/8", "--out", str(out)]
    assert main(["plan", *words, "--latency-ms", "10000", *flags]) == 0
    return out


def test_an_rra_plan_becomes_options(tmp_path: Path) -> None:
    file = a_plan(tmp_path, "--strategies", "rra", "--layers", "4,2")
    settings, bounds = parse_settings(["--plan", str(file), "--port", "0"]), read_plan(file).schedule.bounds
    assert (settings.policy, settings.stages, settings.layers, settings.tensor) == ("rra", 2, "4,2", 1)
    assert (settings.threads, settings.dtype, settings.device) == (1, "float32", "cpu")
    assert (settings.encode_batch, settings.decode_steps) == (bounds.encode_batch, bounds.decode_steps)
    assert (settings.decode_batch, settings.encode_tokens) == (bounds.decode_batch, bounds.encode_tokens)
    assert settings.max_batch_size == bounds.max_batch_size
    assert settings.port == 0


def test_an_iteration_plan_says_whether_prompts_run_whole(tmp_path: Path) -> None:
    file = a_plan(tmp_path, "--strategies", "iteration", "--stages", "1", "--tensor", "2")
    settings, bounds = parse_settings([f"--plan={file}"]), read_plan(file).schedule.bounds
    assert (settings.policy, settings.stages, settings.tensor) == ("iteration", 1, 2)
    assert settings.max_batch_tokens == (bounds.max_batch_tokens or 0)


def test_an_order_of_claims_may_be_given_beside_a_plan(tmp_path: Path) -> None:
    file = a_plan(tmp_path, "--strategies", "rra")
    settings = parse_settings(["--plan", str(file), "--order", "deadline", "--utility", "inverse_length"])
    assert (settings.policy, settings.order, settings.utility) == ("rra", "deadline", "inverse_length")


@pytest.mark.parametrize(
    "flag", ["--stages=1", "--policy=iteration", "--max-batch-size=4", "--threads=2", "--dtype=float32"]
)
def test_an_option_that_the_plan_decides_is_refused(tmp_path: Path, flag: str) -> None:
    file = a_plan(tmp_path)
    with pytest.raises(SettingError, match=f"setting {flag.partition('=')[0]}: the plan .* decides it"):
        parse_settings(["--plan", str(file), flag])


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--plan", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert main(["up", "--plan", str(tmp_path / "other.json")]) == 2
    assert "version is missing" in capsys.readouterr().err
    assert main(["up", "--plan"]) == 2


def test_a_plan_for_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = a_plan(tmp_path, "--layers", "6")
    assert main(["up", "--plan", str(file), "--data", str(tmp_path / "data"), "--port", "0"]) == 2
    assert "the plan is for another model: its stacks are 6 layers of 4 heads, not" in capsys.readouterr().err
