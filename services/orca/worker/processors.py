"""How many processors this process may keep busy, and what has to be told to libraries about threads."""

import os
from pathlib import Path

from orca.worker.cgroups import cpu_groups


def available_processors(root: Path = Path("/")) -> int:
    """Those that it may run on, or as many whole ones as a group around it may use: a container with a limit."""
    count = len(os.sched_getaffinity(0))
    for group in cpu_groups(root):
        for quota_us, period_us in (_version_2(group), _version_1(group)):
            if quota_us > 0 and period_us > 0:
                count = min(count, quota_us // period_us)
    return max(count, 1)


def thread_variables(threads: int) -> dict[str, str]:
    """For a process that computes: what libraries read when they are loaded, before any setting could be told to them.

    PyTorch's own threads sleep soon when it has nothing for them. By default they look for work for some milliseconds,
    while those of our kernels compute (team.py): a third of the engine's speed.
    """
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"}


def _version_2(group: Path) -> tuple[int, int]:
    """Processor time per period, both in microseconds; zeros where there is no limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return 0, 0  # no such cgroup version here, or "max"


def _version_1(group: Path) -> tuple[int, int]:
    """The same; its quota of -1 is no limit either."""
    try:
        return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return 0, 0
