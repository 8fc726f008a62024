"""The cgroups that hold all processes of the cluster, whoever started them: so `down` finds each, also after a crash.

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
"""The hierarchy whose lists of processes are read; every process is in the same place of all."""


def check_hierarchies() -> None:
    """Raises: ClusterError where the machine has other cgroups than this cluster was made for."""
    if not (_HIERARCHIES / _MEMBERS / "cgroup.procs").exists():
        raise ClusterError(f"{_HIERARCHIES} has no cgroups of version 1, for which this cluster is made")


def make_cgroup(name: str) -> None:
    """`node-0/etcd` and what is above it, in every hierarchy."""
    for hierarchy in _hierarchies():
        folder = hierarchy
        for part in (CLUSTER_NAME, *name.split("/")):
            folder = folder / part
            if not folder.exists():
                folder.mkdir()
                _inherit_processors(folder)


def enter_cgroup(name: str) -> None:
    """Move this process there; its children are born there."""
    for hierarchy in _hierarchies():
        (hierarchy / CLUSTER_NAME / name / "cgroup.procs").write_text(str(os.getpid()))


def members(name: str = "") -> set[int]:
    """Process ids in a cgroup of the cluster and all below it; of the whole cluster when none is named."""
    found: set[int] = set()
    for folder, _, _ in os.walk(_HIERARCHIES / _MEMBERS / CLUSTER_NAME / name):
        # A cgroup may go while it is walked.
        with contextlib.suppress(OSError):
            found |= {int(line) for line in (Path(folder) / "cgroup.procs").read_text().split()}
    return found


def kill_members(name: str = "") -> None:
    """End them at once; those that are gone already are what was wanted."""
    for process in members(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def remove_cgroups() -> None:
    """Remove the empty ones; one with a process stays, and the next call takes it.

    The kubelet has also made some in the hierarchy of version 2 that systemd has beside the others.
    """
    for top in _HIERARCHIES.glob(f"*/{CLUSTER_NAME}"):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _hierarchies() -> list[Path]:
    """Those of version 1, under their first name (`cpu,cpuacct` may also be found as `cpu`), and systemd's."""
    return [path for path in sorted(_HIERARCHIES.iterdir()) if not path.is_symlink() and (path / "tasks").exists()]


def _inherit_processors(folder: Path) -> None:
    """A new cpuset is empty, and takes no process, until it has processors and memory."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (folder / name).exists():
            (folder / name).write_text((folder.parent / name).read_text())
