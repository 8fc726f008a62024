"""The cgroups that this process is in: folders where the kernel keeps their limits and counts as files."""

from pathlib import Path, PurePosixPath


def memory_groups(root: Path = Path("/")) -> list[Path]:
    return _groups(root, "memory")


def cpu_groups(root: Path = Path("/")) -> list[Path]:
    return _groups(root, "cpu")


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of the process's own group and of those around it, from the inside out, of both versions.

    Not each of them need exist. In a container the own group may stand where the root of all is mounted, while the
    process is told its path on the host; and a version that the machine does not use has no folder at all.
    """
    groups = []
    # By the controllers that a line of /proc/self/cgroup names: version 2 names none.
    for name, mount in (("", "sys/fs/cgroup"), (controller, f"sys/fs/cgroup/{controller}")):
        own = _own_group(root, name)
        groups += [root / mount / group for group in (own, *own.parents)]
    return groups


def _own_group(root: Path, controller: str) -> PurePosixPath:
    """Path of the process's group below the mount; `.` where nobody tells, or where it is not below the mount."""
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
