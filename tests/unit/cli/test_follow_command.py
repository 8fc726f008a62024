"""`orca follow`: its options, the mistakes that it refuses by name, and the states that it leaves out."""

import dataclasses
from pathlib import Path

import pytest

from orca.cli.follow import parse_settings
from orca.cli.main import main
from orca.core.domain.errors import SettingError
from orca.planner.follow.follow import begin
from orca.planner.follow.state import Replan, state_to_json
from orca.planner.profile.profile import to_json as profile_to_json
from orca.planner.search.plan import PlannedDevice, to_json
from support.planner.plans import BOUND_MS, plan
from support.planner.profiles import key, profile

RUNS = dataclasses.replace(
    plan(8),
    device=PlannedDevice(key=key()),
    schedule=dataclasses.replace(plan(8).schedule, layers=(3, 3)),
)
POOL = "redis://127.0.0.1:1/0"
BASE = ["--profile", "profile.json", "--plan", "plan.json", "--latency-ms", f"{BOUND_MS:g}", "--pool", POOL]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a profile and a plan in force, and work in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_bytes(profile_to_json(profile()))
    (tmp_path / "plan.json").write_bytes(to_json(RUNS))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_options_are_those_of_the_check() -> None:
    room = ["--max-batch-size", "3", "--least-slots", "2048", "--strategies", "rra", "--layers", "4,2"]
    more = ["--replan", "recommend", "--groups", "2", "--since-ms", "7", "--workload", "8/4", "--seed", "5"]
    order = parse_settings([*BASE, *room, *more], {}).order()
    assert (order.plan, order.state, order.replan, order.since_ms) == (RUNS, None, Replan.RECOMMEND, 7)
    assert (order.groups, order.seed, order.goal) == (2, 5, RUNS.goal.goal())
    assert order.stated is not None
    assert (order.stated.prompts.mean, order.stated.outputs.mean) == (8, 4)
    limits = order.limits
    assert (limits.max_batch_size, limits.memory.least_slots, limits.strategies) == (3, 2048, ("rra",))
    assert (limits.shape.layers, limits.devices, limits.groups) == ((4, 2), 2, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--latency-ms", "0"], "setting --latency-ms: 0 is not above 0"),
        (["--latency-ms", "5000"], "the plan is for another goal: its latency_ms is 8000, not 5000"),
        (["--ttft-ms", "5"], "the plan is for another goal: its ttft_ms is unset, not 5"),
        (["--percentile", "100"], "setting --percentile:"),
        (["--replan", "always"], "setting --replan: 'always' is not one of auto, recommend, off"),
        (["--groups", "0"], "setting --groups: 0 is not 1 or more"),
        (["--since-ms", "-1"], "setting --since-ms: -1 is not 0 or more"),
        (["--workload", "8"], "setting workload: lengths are PROMPT/OUTPUT"),
        (["--workload", "8:300/4"], "the model allows 256"),
        (["--layers", "3,2"], "--layers"),
        (["--max-batch-size", "0"], "setting --max-batch-size:"),
        (["--memory-gib", "nan"], "setting --memory-gib:"),
        (["--lengths", "a.csv"], "--lengths"),
        (["--plan", "missing.json"], "plan missing.json cannot be read"),
        (["--plan", "profile.json"], "plan profile.json: "),
        (["--plan", "other.json"], "the plan is for another model: its hidden_size is 64, not 32"),
        (["--profile", "missing.json"], "profile missing.json cannot be read"),
        (["--result-key", "a b"], "setting --result-key: 'a b' is not a word"),
        (["--out", "profile.json"], "setting out: profile.json is no folder"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(
    folder: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = dataclasses.replace(RUNS, device=PlannedDevice(key=dataclasses.replace(key(), hidden_size=64)))
    (folder / "other.json").write_bytes(to_json(other))
    assert main(["follow", *BASE, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("--plan", "setting plan: required (--plan or ORCA_FOLLOW_PLAN)"),
        ("--profile", "setting profile: required"),
        ("--pool", "setting --pool: missing"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_missing_option_is_named(missing: str, said: str) -> None:
    place = BASE.index(missing)
    with pytest.raises(SettingError) as caught:
        parse_settings(BASE[:place] + BASE[place + 2 :], {})
    assert said in str(caught.value)


def test_a_plan_from_another_machine_is_checked_on_this_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = dataclasses.replace(RUNS, device=PlannedDevice(key=dataclasses.replace(key(), processor="of yesterday")))
    (folder / "plan.json").write_bytes(to_json(other))
    assert parse_settings(BASE, {}).order().plan == other
    assert "made for another machine: its processor is 'of yesterday', not 'a processor'" in capsys.readouterr().err


def test_the_state_of_the_check_before_is_read(folder: Path) -> None:
    state = begin(RUNS, 5)
    (folder / "state.json").write_bytes(state_to_json(state))
    assert parse_settings([*BASE, "--state", "state.json"], {}).order().state == state


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "the file must be an object"),
        (state_to_json(begin(RUNS, 5)).decode().replace('"version": 1', '"version": 9', 1), "version is 9"),
        (state_to_json(begin(RUNS, 5)).decode().replace('"checked_ms"', '"seen_ms"'), "seen_ms is unknown"),
        (None, "cannot be read"),
    ],
    ids=["no-json", "no-object", "version", "field", "no-file"],
)
def test_a_state_that_cannot_be_read_is_left_out(
    folder: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator may be of a newer release than the Job of ten minutes ago."""
    if text is not None:
        (folder / "state.json").write_text(text)
    assert parse_settings([*BASE, "--state", "state.json"], {}).order().state is None
    shown = capsys.readouterr().err
    assert said in shown
    assert "; following begins with this check" in shown
