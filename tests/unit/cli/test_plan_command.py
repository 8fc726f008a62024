"""`orca plan`: a plan from a profile, and the mistakes that it refuses by name."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from orca.cli.main import main
from orca.planner.profile.profile import to_json
from orca.planner.search.plan import read_plan
from support.planner.profiles import profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a profile, and work in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_bytes(to_json(profile()))
    return tmp_path


BASE = ["--profile", "profile.json", "--workload", "8:40/2:20"]


def test_a_plan_is_written_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--latency-ms", "3000", "--pictures", "pictures", "--out", "p.json"]
    assert main(["plan", *BASE, *flags]) == 0
    plan = read_plan(folder / "p.json")
    assert plan.is_met
    assert plan.schedule.stages * plan.schedule.ranks <= 2
    assert sum(plan.schedule.layers) == 6
    shown = capsys.readouterr()
    assert plan.describe() in shown.out
    assert "search 1" in shown.err
    for name in ("pareto.svg", "timeline.svg"):
        ElementTree.parse(folder / "pictures" / name)


def test_a_bound_that_nothing_meets_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BASE, "--latency-ms", "1", "--strategies", "iteration", "--stages", "1"]) == 1
    assert not read_plan(folder / "plan.json").is_met
    said = capsys.readouterr().err
    assert "orca plan: no schedule meets the goal (99 % within 0.001 s). Best achievable: 99 % within" in said
    assert "no larger number of devices up to 32 would. The plan is the schedule that comes closest" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--latency-ms", "0"], "setting --latency-ms: 0 is not above 0"),
        (["--percentile", "100"], "setting --percentile:"),
        (["--kind", "mean"], "setting --kind: 'mean' is not one of sequence, requests"),
        (["--kind", "requests"], "setting --rate:"),
        (["--strategies", "rra,waa"], "setting --strategies:"),
        (["--devices", "3"], "setting devices: 3 ranks would run at the same time"),
        (["--layers", "3,2"], "--layers"),
        (["--layers", "0,6"], "--layers"),
        (["--layers", "3,3", "--stages", "3"], "--layers"),
        (["--tensor", "3"], "no layout is possible with 2 devices, profiled ranks 1, 2, 6 layers, tensor 3"),
        (["--slots", "16"], "a request of the workload needs up to 64 KV slots, and no layout has more than 16"),
        (["--memory-gib", "0.00001"], "no layout is possible"),
        (["--least-slots", "9000000"], "; a group needs 9000000 KV slots, and the memory has room for 27"),
        (["--max-model-len", "30"], "the model allows 30"),
        (["--task", "S"], "task and workload are given"),
        (["--counted", "true", "--pool", "redis://a"], "workload and counted are given"),
        (["--result-key", "a"], "setting --result-key: needs a pool: give --pool"),
        (["--result-key", "a b", "--pool", "redis://a"], "setting --result-key: 'a b' is not a word"),
        (["--memory-share", "0"], "setting --memory-share:"),
        (["--max-batch-size", "0"], "setting --max-batch-size:"),
        (["--workload", "8"], "lengths are PROMPT/OUTPUT"),
        (["--out", "no/such/plan.json"], "setting out:"),
        (["--profile", "missing.json"], "profile missing.json cannot be read"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(
    folder: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *BASE, *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lengths-scale", "2"], "setting --lengths-scale: 2.0 is not for a stated workload"),
        (["--memory-gib", "1e300"], "setting --memory-gib: 1e+300 is not a number above 0"),
        (["--memory-gib", "nan"], "setting --memory-gib: nan is not a number above 0"),
        (["--out", "."], "setting out: . is a folder: give a file"),
        (["--pictures", "profile.json"], "setting pictures: profile.json is no folder"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_would_fail_after_the_search_is_refused_before(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *BASE, *flags]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "search 1" not in shown


@pytest.mark.parametrize("slots", [[], ["--slots", "4096"]])
def test_a_plan_has_room_for_the_least_slots(folder: Path, slots: list[str]) -> None:
    """A stage of all six layers has room for 1.4 million slots, one of three layers for twice as many."""
    flags = ["--latency-ms", "3000", "--strategies", "iteration", *slots]
    assert main(["plan", *BASE, *flags, "--least-slots", "2000000"]) == 0
    assert read_plan(folder / "plan.json").schedule.stages == 2
    assert main(["plan", *BASE, *flags, "--least-slots", "1500000", "--stages", "1"]) == 0, "a tenth may be missing"
    assert main(["plan", *BASE, *flags, "--least-slots", "1600000", "--stages", "1"]) == 2


@pytest.mark.usefixtures("folder")
def test_a_scale_that_leaves_no_lengths_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", "profile.json", "--task", "S", "--lengths-scale", "0.01"]) == 2
    assert "orca plan: setting lengths_scale: " in capsys.readouterr().err


def test_few_answers_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lengths.csv").write_text("prompt,output\n16,8\n24,12\n")
    flags = ["--profile", "profile.json", "--lengths", "lengths.csv", "--latency-ms", "9000", "--slots", "512"]
    assert main(["plan", *flags]) == 0
    assert "these are fewer than 200 answers" in capsys.readouterr().err
    schedule = read_plan(folder / "plan.json").schedule
    assert (schedule.slots, schedule.prefetch) == (512, 1)
    assert schedule.flags()["slots"] == "512"
