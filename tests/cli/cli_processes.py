"""What tests of the supervisor ask about processes."""

import time
from collections.abc import Callable, Iterable

import psutil


def wait_until(is_true: Callable[[], object], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.05)


def is_running(process: psutil.Process) -> bool:
    """False for a zombie too: an orphan stays one where the machine's first process collects nobody (containers)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: Iterable[psutil.Process], limit_s: float = 10.0) -> None:
    wait_until(lambda: not any(map(is_running, processes)), limit_s)
