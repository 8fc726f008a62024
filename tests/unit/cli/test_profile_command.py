"""The mistakes that `orca profile` refuses before it loads anything."""

from pathlib import Path

import pytest

from orca.cli.main import main
from orca.cli.profile import ProfileSettings, parse_settings


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "p.json"], "setting model: required (--model or ORCA_PROFILE_MODEL)"),
        (["--model", "m"], "setting out: required (--out or ORCA_PROFILE_OUT)"),
        (["--model", "m", "--out", "p", "--devices", "0"], "setting --devices: 0 is not 1 or more"),
        (["--model", "m", "--out", "p", "--devices", "two"], "setting --devices: 'two' is not a whole number"),
        (["--model", "m", "--out", "p", "--threads", "-1"], "setting --threads: -1 is not 0 or more"),
        (["--model", "m", "--out", "p", "--minutes", "0"], "setting --minutes: 0.0 is not 0.001 or more"),
        (["--model", "m", "--out", "p", "--minutes", "nan"], "setting --minutes: nan is not 0.001 or more"),
        (["--model", "m", "--out", "p", "--ranks", "1,0"], "setting --ranks: ('1', '0') is not a list of numbers"),
        (["--model", "m", "--out", "p", "--ranks", "1,x"], "setting --ranks: ('1', 'x') is not a list of numbers"),
        (["--model", "m", "--out", "p", "--device", "tpu"], "setting --device: 'tpu' is not one of cpu, cuda"),
        (["--model", "m", "--out", "p", "--dtype", "int4"], "setting --dtype: 'int4' is not one of float32"),
        (
            ["--model", "m", "--out", "p", "--device", "cuda", "--quantization", "int8"],
            "setting --quantization: 'int8' is not for the device cuda",
        ),
        (["--model", "m", "--out", "/no/such/folder/p"], "--out /no/such/folder/p: there is no folder /no/such/folder"),
        (["--model", "m", "--out", "."], "--out . is a folder: give a file"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"orca profile: {said}")
    assert err.count("\n") == 1


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "no" / "such" / "model"
    assert main(["profile", "--model", str(missing), "--out", str(tmp_path / "p")]) == 2
    assert f"--model {missing} is neither a folder nor" in capsys.readouterr().err


def test_degrees_and_threads_follow_from_the_devices() -> None:
    def settings(*flags: str) -> ProfileSettings:
        return parse_settings(["--model", "m", "--out", "p", *flags], {})

    assert settings().degrees(8) == (1,)
    assert settings("--devices", "4").degrees(8) == (1, 2, 4)
    assert settings("--devices", "6").degrees(8) == (1, 2, 4)
    assert settings("--devices", "4").degrees(3) == (1, 2)
    assert settings("--devices", "4", "--ranks", "4,1,4").degrees(2) == (1, 4)
    assert settings("--threads", "3", "--devices", "2").threads_per_rank == 3
    assert settings("--devices", "1000").threads_per_rank == 1
