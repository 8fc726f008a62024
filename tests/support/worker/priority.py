"""Tests that measure time keep the machine's other work out of their figures."""

import contextlib
import os
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


def waited_s(pids: Sequence[int]) -> float:
    """Return how long the threads of some processes were ready without a processor so far, in total.

    0 where the kernel does not tell (/proc/<pid>/task/<tid>/schedstat: nanoseconds run, nanoseconds waited, turns).
    """
    waited_ns = 0
    for pid in pids:
        for thread in _threads_of(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                waited_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1])
    return waited_ns / 1e9


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
