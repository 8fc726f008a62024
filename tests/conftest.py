"""Fixtures of all tests: examples without a deadline, logging that ends with its test, turns of several processes."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from support import cpu_times, selection, turns

# Examples may take as long as a busy machine makes them, and so may their making.
hypothesis.settings.register_profile("orca", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("orca")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu_times)
    if hasattr(config, "workerinput"):  # one of several processes
        config.pluginmanager.register(turns.Turns(gate=Path(__file__), turn=Path(turns.__file__)))


@pytest.hookimpl(tryfirst=True)  # before `-m` takes its choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    selection.mark_the_others(items)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """A program that a test runs in this process sets up logging for itself, and for no test after it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def kept_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder for what programs keep of their own, compiled kernels and layouts among it."""
    from orca.kernels.cpu.team import code

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code.cache_folder.cache_clear()
    yield tmp_path
    code.cache_folder.cache_clear()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto` is three processes on two processors: most tests wait more than they compute."""
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2)
