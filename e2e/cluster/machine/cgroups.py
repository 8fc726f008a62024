"""The cgroups with all processes of the cluster, including those of pods, so that `down` finds each after a crash.

/sys/fs/cgroup/<controller>/orca-cluster/node-0/kubelet, containerd, etcd, ...    one for each component
                                        /node-0/kubepods/...                      pods, made by the kubelet
"""

import contextlib
import os
import signal
from pathlib import Path

from cluster.machine.errors import ClusterError
from cluster.machine.layout import CLUSTER_NAME

_HIERARCHIES = Path("/sys/fs/cgroup")
_MEMBERS = "pids"
"""The hierarchy whose process lists are read; every process has the same path in all hierarchies."""


def check_cgroup_version() -> None:
    """Check that the machine has cgroups of version 1. Raises: ClusterError if not."""
    if not (_HIERARCHIES / _MEMBERS / "cgroup.procs").exists():
        raise ClusterError(
            f"{_HIERARCHIES} has no cgroups of version 1, which this cluster needs; boot with"
            " systemd.unified_cgroup_hierarchy=0, or give ORCA_E2E_CONTEXT a cluster of yours"
        )


def make_cgroup(name: str) -> None:
    """Make a cgroup such as `node-0/etcd` and its parents, in every hierarchy."""
    for hierarchy in _hierarchies():
        folder = hierarchy
        for part in (CLUSTER_NAME, *name.split("/")):
            folder = folder / part
            if not folder.exists():
                folder.mkdir()
                _inherit_processors(folder)


def enter_cgroup(name: str) -> None:
    """Move this process into a cgroup; its children start in it."""
    for hierarchy in _hierarchies():
        (hierarchy / CLUSTER_NAME / name / "cgroup.procs").write_text(str(os.getpid()))


def members(name: str = "") -> set[int]:
    """Return the process ids in a cgroup of the cluster and its children; by default in the whole cluster."""
    found: set[int] = set()
    for folder, _, _ in os.walk(_HIERARCHIES / _MEMBERS / CLUSTER_NAME / name):
        # A cgroup may be removed during the walk.
        with contextlib.suppress(OSError):
            found |= {int(line) for line in (Path(folder) / "cgroup.procs").read_text().split()}
    return found


def kill_members(name: str = "") -> None:
    """Kill all processes of a cgroup; those that have ended already do not matter."""
    for process in members(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def remove_cgroups() -> None:
    """Remove empty cgroups; one with a process stays for the next call.

    The kubelet also makes some in systemd's hierarchy of version 2.
    """
    for top in _HIERARCHIES.glob(f"*/{CLUSTER_NAME}"):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _hierarchies() -> list[Path]:
    """Return the hierarchies of version 1, by their first name (`cpu,cpuacct` may have a link `cpu`), and systemd's."""
    return [path for path in sorted(_HIERARCHIES.iterdir()) if not path.is_symlink() and (path / "tasks").exists()]


def _inherit_processors(folder: Path) -> None:
    """Copy processors and memory from the parent, because a new cpuset accepts no process without them."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (folder / name).exists():
            (folder / name).write_text((folder.parent / name).read_text())
