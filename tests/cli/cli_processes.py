"""What tests of the supervisor ask about processes."""

import time
from collections.abc import Callable, Iterable

import psutil
import pytest


def wait_until(is_true: Callable[[], object], limit_s: float, story: Callable[[], str] = lambda: "") -> None:
    """Ask until the answer is yes; fail the test with the story of what came instead when the limit is over."""
    end = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > end:
            pytest.fail(f"did not come within {limit_s:g} s\n{story()}")
        time.sleep(0.05)


def is_running(process: psutil.Process) -> bool:
    """False for a zombie too: an orphan stays one where the machine's first process collects nobody (containers)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: Iterable[psutil.Process], limit_s: float = 60.0) -> None:
    def left() -> list[psutil.Process]:
        return [process for process in processes if is_running(process)]

    wait_until(lambda: not left(), limit_s, lambda: f"still there: {left()}")
