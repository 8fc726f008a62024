"""A profile that another process measures: its progress, its result, and its reasons to fail."""

import shlex
import sys
from pathlib import Path

import pytest

from orca.cli.up.slo.measuring import MeasuringFailed, measure_apart
from orca.planner.profile.profile import to_json
from support.planner.profiles import key, profile


def program(folder: Path, body: str) -> tuple[str, str]:
    """Return the command of a program that stands in for `orca profile`. It has its options in `options`."""
    file = folder / "program.py"
    head = "import sys, os, pathlib\noptions = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    file.write_text(head + body)
    return sys.executable, str(file)


def test_another_process_measures_and_its_progress_is_reported(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_bytes(to_json(profile()))
    command = program(
        tmp_path,
        f"""
print("orca profile: round 1", file=sys.stderr)
print("a warning of a library", file=sys.stderr)
print("the table")
pathlib.Path({str(tmp_path / "options")!r}).write_text(" ".join(sys.argv[1:]))
pathlib.Path(options["--out"]).write_bytes(pathlib.Path({str(tmp_path / "measured.json")!r}).read_bytes())
""",
    )
    said: list[str] = []
    assert measure_apart(tmp_path / "model", key(), said.append, command=command) == profile()
    assert said == ["round 1"]
    words = shlex.split((tmp_path / "options").read_text())
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options.pop("--out").endswith("profile.json")
    assert options == {
        "--model": str(tmp_path / "model"),
        "--devices": "2",
        "--ranks": "1,2",
        "--threads": "1",
        "--minutes": "5.0",
        "--dtype": "float32",
        "--device": "cpu",
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('print("orca profile: no memory", file=sys.stderr); sys.exit(1)', "could not be measured: no memory$"),
        ("os.kill(os.getpid(), 9)", "could not be measured: the process ended with signal 9$"),
        ("sys.exit(3)", "could not be measured: the process ended with exit code 3$"),
        ("pass", "could not be measured: profile .* cannot be read"),
    ],
)
def test_a_failed_measurement_gives_its_reason(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(MeasuringFailed, match=said):
        measure_apart(tmp_path, key(), lambda _: None, command=program(tmp_path, body))


def test_a_measurement_of_something_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_bytes(to_json(profile(ranks=(1,))))
    measured = str(tmp_path / "measured.json")
    copy = f'pathlib.Path(options["--out"]).write_bytes(pathlib.Path({measured!r}).read_bytes())'
    command = program(tmp_path, copy)
    with pytest.raises(MeasuringFailed, match="its ranks are 1, not 1, 2"):
        measure_apart(tmp_path, key(), lambda _: None, command=command)
