"""The Makefile and the install script: what a newcomer meets first."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files of a checkout that the install script needs, without an environment."""
    shutil.copytree(ROOT / ".lock", tmp_path / ".lock")
    return tmp_path


def install(checkout: Path, python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(python)}
    command = [str(checkout / ".lock" / "install"), *(arguments or ("local",))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def python_that(folder: Path, body: str) -> Path:
    script = folder / "python-of-test"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return script


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^  make (\S+)", shown, re.MULTILINE) == phony.split()


def test_end_to_end_tests_on_a_named_cluster_start_and_end_none() -> None:
    assert "cluster up" in commands_of_e2e("")
    assert "cluster" not in commands_of_e2e("somebodys")


def commands_of_e2e(context: str) -> str:
    environment = {**os.environ, "ORCA_E2E_CONTEXT": context}
    told = ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.installed-dev", "e2e"]
    return subprocess.run(told, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("arguments", "wanted"), [("", "local"), ("--model smollm2 --port 8001", "smollm2")])
def test_make_run_installs_what_the_model_needs(arguments: str, wanted: str) -> None:
    told = ["make", "--no-print-directory", "--dry-run", f"--what-if=.lock/{wanted}.txt", "run", f"ARGS={arguments}"]
    shown = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [f".lock/install {wanted}", f"exec .venv/bin/orca up {arguments}"]


def test_without_a_fitting_python_the_message_names_what_to_install(checkout: Path) -> None:
    refused = install(checkout, python_that(checkout, "exit 1"))
    assert refused.returncode == 1
    assert "orca: no Python 3.11 or 3.12 found" in refused.stderr
    assert "sudo apt install python3.11 python3.11-venv" in refused.stderr


def test_a_python_without_venv_names_the_missing_debian_package(checkout: Path) -> None:
    body = 'case "$2" in *ensurepip*) exit 1;; *print*) echo 3.12;; esac'
    refused = install(checkout, python_that(checkout, body))
    assert refused.returncode == 1
    assert "sudo apt install python3.12-venv" in refused.stderr


def test_an_environment_of_another_python_is_not_changed(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python_that(checkout, 'if [ "$1" = -V ]; then echo Python 3.9.2; else exit 1; fi').rename(
        checkout / ".venv/bin/python"
    )
    refused = install(checkout, "python3")
    assert refused.returncode == 1
    assert ".venv holds Python 3.9.2, Orca needs 3.11 or 3.12: remove .venv" in refused.stderr


def test_an_unknown_set_of_packages_is_refused(checkout: Path) -> None:
    refused = install(checkout, "python3", "everything")
    assert (refused.returncode, refused.stderr) == (1, "orca: usage: .lock/install local|smollm2|dev|quick\n")


def everything_on(terminal: int) -> bytes:
    """Return the text written to a terminal whose other end is closed. The kernel may deliver it in parts."""
    shown = b""
    with contextlib.suppress(OSError):  # how such a terminal says that there is no more
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    return shown


def test_the_list_of_packages_is_left_out_and_everything_else_shown() -> None:
    said = [
        b"Resolved\r\n \x1b[32m+\x1b[39m ",
        b"torch==2\r\n ",
        b"- old==1\r\n",
        b"\r\x1b[2K bar 1/2",
        b"\r 2/2\r\n",
        b"  end",
    ]
    command = [sys.executable, "-c", f"import os, time\nfor part in {said!r}: os.write(2, part); time.sleep(0.05)"]
    ours, theirs = pty.openpty()
    run = subprocess.run([sys.executable, ROOT / ".lock/without_list.py", *command, "3"], stderr=theirs, check=True)
    os.close(theirs)
    shown = everything_on(ours)
    assert run.returncode == 0
    assert (
        shown.replace(b"\r\r\n", b"\r\n").replace(b"\r\r\n", b"\r\n") == b"Resolved\r\n\r\x1b[2K bar 1/2\r 2/2\r\n  end"
    )


def test_a_failing_install_fails_despite_the_output_filter() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, ROOT / ".lock/without_list.py", sys.executable, "-c", "raise SystemExit(3)"]
    assert subprocess.run(command, stderr=theirs, check=False).returncode == 3
    os.close(theirs)
    os.close(ours)
