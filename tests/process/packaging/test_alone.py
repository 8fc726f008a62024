"""Several processes share the tests: those that measure time run alone, and one that dies fails only its test."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
CONFTEST = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(TESTS)!r})

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: as ours")
    if hasattr(config, "workerinput"):
        from support.turns import Turns
        config.pluginmanager.register(Turns(gate=Path(__file__), turn=Path(__file__).with_name("test_it.py")))
"""
# Each says when it began and ended.
TIMED = """
import time
from pathlib import Path
import pytest

def run(name):
    began = time.monotonic()
    time.sleep(0.1)
    Path(name).write_text(f"{began} {time.monotonic()}")

@pytest.mark.parametrize("number", range(12))
def test_with_others(number):
    run(f"shared-{number}")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    run(f"alone-{number}")

@pytest.mark.parametrize("number", range(12, 24))
def test_with_others_after(number):
    run(f"shared-{number}")
"""
DEADLY = """
import os

def test_that_dies():
    os._exit(3)

def test_that_passes():
    pass
"""


def run_tests(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    # This process may itself be one of several, and the other plugins take long to load.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--dist", "worksteal", str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def spans(folder: Path, kind: str) -> list[tuple[float, float]]:
    texts = [path.read_text().split() for path in folder.glob(f"{kind}-*")]
    return [(float(began), float(ended)) for began, ended in texts]


def test_no_other_test_runs_while_a_test_is_alone(tmp_path: Path) -> None:
    ran = run_tests(tmp_path, TIMED)
    assert "27 passed" in ran.stdout, ran.stdout
    alone, shared = spans(tmp_path, "alone"), spans(tmp_path, "shared")
    assert (len(alone), len(shared)) == (3, 24)
    for began, ended in alone:
        assert all(other_ended <= began or ended <= other_began for other_began, other_ended in shared)


def test_a_process_that_dies_fails_its_test_and_the_others_run(tmp_path: Path) -> None:
    ran = run_tests(tmp_path, DEADLY)
    assert "crashed while running" in ran.stdout
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
