"""Releases out of the repository's history, and a real run of two of them side by side."""

import subprocess
import sys
from pathlib import Path

import pytest

from checker.systems.checkouts import ReleaseError, export, last_release

ROOT = Path(__file__).parents[3]

FILES = ("cli/main", "cli/pool", "gateway/service", "scheduler/service", "worker/service")

SCHEMAS = "from types import SimpleNamespace\nSCHEMAS = SimpleNamespace(oldest=3, newest=4)\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit, in which every part is an empty file."""
    orca = tmp_path / "repository" / "services" / "orca"
    for name in (*FILES, "pool/schemas", "../../kernels/orca/kernels/one"):
        file = orca / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SCHEMAS if name == "pool/schemas" else "")
    git(tmp_path / "repository", "init", "-q")
    commit(tmp_path / "repository")
    return tmp_path / "repository"


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "test")


def test_a_release_has_the_files_of_its_revision(repository: Path, tmp_path: Path) -> None:
    (repository / "services" / "orca" / "pool" / "schemas.py").write_text("raise SystemExit('changed since')")
    release = export("HEAD", tmp_path / "before", repository)
    assert release.schemas == (3, 4)
    assert release.environment({"A": "b"})["PYTHONPATH"].startswith(str(tmp_path / "before" / "services"))


def test_a_package_that_a_revision_lacks_is_not_taken_from_the_environment(repository: Path, tmp_path: Path) -> None:
    (repository / "services" / "orca" / "cli" / "pool.py").unlink()
    commit(repository)
    with pytest.raises(ReleaseError, match=r"HEAD lacks a module: Python imported .*pool\.py from another folder"):
        export("HEAD", tmp_path / "before", repository)


def test_a_model_that_a_release_does_not_know_is_reported(repository: Path, tmp_path: Path) -> None:
    model = repository / "services" / "orca" / "core" / "domain" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text('FAMILIES = {"orca_chain": None}')
    commit(repository)
    release = export("HEAD", tmp_path / "before", repository)
    release.check_model("orca_chain")
    with pytest.raises(ReleaseError, match="HEAD does not know models of type orca_seq2seq_chain; choose a revision"):
        release.check_model("orca_seq2seq_chain")


def test_an_unknown_revision_is_reported(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="v0"):
        export("v0", tmp_path / "before", repository)


def test_the_last_release_is_the_newest_tag_or_the_commit_before(repository: Path) -> None:
    git(repository, "commit", "-q", "--allow-empty", "-m", "test")
    first = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD~1"], capture_output=True, text=True).stdout
    assert first.startswith(last_release(repository))
    git(repository, "tag", "v1")
    assert last_release(repository) == "v1"


@pytest.mark.prove
@pytest.mark.timeout(1500)
def test_the_last_release_beside_this_one_loses_nothing(tmp_path: Path) -> None:
    words = ["releases", "--seed", "1", "--kills", "1", "--no-rollback", "--out", str(tmp_path / "run")]
    ran = subprocess.run(
        [sys.executable, "-m", "checker", *words],
        cwd=ROOT / "e2e",
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 hand-overs" in ran.stdout
