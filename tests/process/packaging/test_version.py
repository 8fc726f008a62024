"""`orca --version` names the commit: of a checkout, of a wheel, and of neither."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from orca.cli.main import main
from orca.cli.version import version_text

ROOT = Path(__file__).parents[3]
VERSION = version("orca-serving")


def wheel_of(folder: Path, **environment: str) -> zipfile.ZipFile:
    """A wheel that is built from this checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
    )
    [path] = folder.glob("orca_serving-*.whl")
    return zipfile.ZipFile(path)


def commit_of(folder: Path) -> str:
    """The commit of a new repository with one file."""
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    (folder / "file").write_text("a")
    for words in (["init", "-q"], ["add", "file"], [*named, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    said = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True
    )
    return said.stdout.strip()


def test_the_command_prints_the_version_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"orca {VERSION}")


def test_a_checkout_reports_its_commit_and_whether_files_differ(tmp_path: Path) -> None:
    commit = commit_of(tmp_path)
    assert version_text(tmp_path, tmp_path) == f"orca {VERSION} (commit {commit})"
    (tmp_path / "file").write_text("b")
    assert version_text(tmp_path, tmp_path) == f"orca {VERSION} (commit {commit}-dirty)"


def test_a_folder_that_is_no_checkout_has_a_version_only(tmp_path: Path) -> None:
    assert version_text(tmp_path, tmp_path) == f"orca {VERSION}"


def test_the_version_file_of_a_build_overrides_the_checkout(tmp_path: Path) -> None:
    commit_of(tmp_path)
    (tmp_path / "commit.txt").write_text("0123456789ab\n")
    assert version_text(tmp_path, tmp_path) == f"orca {VERSION} (commit 0123456789ab)"


def test_a_wheel_holds_the_commit_that_its_builder_names(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, ORCA_COMMIT="feedc0ffee12")
    assert wheel.read("orca/cli/commit.txt") == b"feedc0ffee12\n"
