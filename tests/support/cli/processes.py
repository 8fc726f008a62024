"""Questions that tests of the supervisor have about processes."""

from collections.abc import Iterable

import psutil

from support.waiting import wait_until


def is_running(process: psutil.Process) -> bool:
    """False for a zombie too: an orphan stays one where the machine's first process collects nobody (containers)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: Iterable[psutil.Process], limit_s: float = 60.0) -> None:
    """Wait until the processes have ended."""

    def left() -> list[psutil.Process]:
        return [process for process in processes if is_running(process)]

    wait_until(lambda: not left(), limit_s, lambda: f"still there: {left()}")
