"""The limits of the machine as this process sees them: its cgroups, its processors, its libraries' threads.

A cgroup is a folder in which the kernel keeps the limits and counts of a group of processes as files.
"""

import os
from pathlib import Path, PurePosixPath


def memory_cgroups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's memory cgroups, from the inside out; some may not exist."""
    return _cgroups(root, "memory")


def cpu_cgroups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's CPU cgroups, from the inside out; some may not exist."""
    return _cgroups(root, "cpu")


def available_processors(root: Path = Path("/")) -> int:
    """Return how many processors this process may keep busy.

    They are those of its CPU affinity, or as many whole ones as a cgroup around it may use: a container with a limit.
    """
    count = len(os.sched_getaffinity(0))
    for group in cpu_cgroups(root):
        for quota_us, period_us in (_version_2_quota(group), _version_1_quota(group)):
            if quota_us > 0 and period_us > 0:
                count = min(count, quota_us // period_us)
    return max(count, 1)


def thread_variables(threads: int) -> dict[str, str]:
    """Return environment variables for a process that computes; libraries read them when they are loaded.

    With GOMP_SPINCOUNT, PyTorch's threads sleep soon after it has no work for them. By default they spin for some
    milliseconds while the threads of our kernels compute (team.py), which costs a third of the engine's speed.
    """
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"}


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Return the folders of the process's own cgroup and of those around it, of both versions.

    Some may not exist. In a container the own cgroup may be mounted as the root, while the process is given its path on
    the host. And a version that the machine does not use has no folder at all.
    """
    groups = []
    # A line of /proc/self/cgroup names its controllers; version 2 names none.
    for name, mount in (("", "sys/fs/cgroup"), (controller, f"sys/fs/cgroup/{controller}")):
        own = _own_cgroup(root, name)
        groups += [root / mount / group for group in (own, *own.parents)]
    return groups


def _own_cgroup(root: Path, controller: str) -> PurePosixPath:
    """Return the path of the process's cgroup below the mount; `.` if it is unknown or outside the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return PurePosixPath()
    for line in lines:
        # "<number>:<controllers>:<path>"; a path from outside the process's own view begins with "/..".
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and ".." not in path.split("/"):
            return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()


def _version_2_quota(group: Path) -> tuple[int, int]:
    """Return processor time per period, both in microseconds; zeros if there is no limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return 0, 0  # no such cgroup version here, or "max"


def _version_1_quota(group: Path) -> tuple[int, int]:
    """Return the same for cgroup version 1, where a quota of -1 means no limit."""
    try:
        return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return 0, 0
