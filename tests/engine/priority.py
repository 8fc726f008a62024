"""How a test that measures time keeps the machine's other work out of its figures."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def ahead_of_others(pids: Sequence[int]) -> Iterator[None]:
    """Run the threads of some processes before all others, as on a machine of their own; ordinary again afterwards.

    Threads that they start meanwhile do the same. Where the machine does not permit it, nothing changes.
    """
    with contextlib.suppress(PermissionError):
        _set_policy(pids, os.SCHED_RR, priority=1)
    try:
        yield
    finally:
        _set_policy(pids, os.SCHED_OTHER, priority=0)


def _set_policy(pids: Sequence[int], policy: int, *, priority: int) -> None:
    for pid in pids:
        for thread in _threads_of(pid):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, os.sched_param(priority))


def _threads_of(pid: int) -> list[int]:
    """No thread when the process has ended."""
    try:
        return [int(entry.name) for entry in (Path("/proc") / str(pid) / "task").iterdir()]
    except FileNotFoundError:
        return []


class Sleeper:
    """A thread that sleeps again and again while the context is open, to tell how late the machine wakes it."""

    def __init__(self, sleep_ms: float) -> None:
        self._sleep_s = sleep_ms / 1000
        self._late_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sleeper")

    @property
    def late_ms(self) -> float:
        """By how much it woke too late, on average."""
        return 1000 * sum(self._late_s) / max(1, len(self._late_s))

    def __enter__(self) -> "Sleeper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            started = time.monotonic()
            time.sleep(self._sleep_s)
            self._late_s.append(time.monotonic() - started - self._sleep_s)
