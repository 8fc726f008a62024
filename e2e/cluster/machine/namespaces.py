"""The namespaces of the nodes and what joins them.

Each is held by a process that only sleeps, in the cluster's cgroup. Namespaces have no names on the machine: with their
last process they go, and with them every device, packet rule and mount of the cluster.
"""

import os
import subprocess
import time
from pathlib import Path

from cluster.machine.cgroups import enter_cgroup, make_cgroup, members
from cluster.machine.commands import run
from cluster.machine.errors import ClusterError
from cluster.machine.layout import BRIDGE, OWN_FOLDERS, SERVICE_RANGE, Layout, Node

_HOLDER = "namespaces"
_HELD_WITHIN_S = 10.0

KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
"""What a kubelet makes of a machine when it starts. It finds files that say so already, and changes nothing."""


def make_namespaces(node: Node) -> None:
    """Hold a network and a mount namespace for the node, with loopback and folders of its own."""
    _hold(node)
    _own_folders(node)
    _inside(node, "ip", "link", "set", "lo", "up")
    _inside(node, "sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")


def join_nodes(layout: Layout) -> None:
    """Links between the nodes, and routes to each other's pods. Services are sent where rules take them up."""
    first, *others = layout.nodes
    _inside(first, "ip", "link", "add", BRIDGE, "type", "bridge")
    _inside(first, "ip", "addr", "add", f"{first.address}/24", "dev", BRIDGE)
    _inside(first, "ip", "link", "set", BRIDGE, "up")
    for node in others:
        link = ("ip", "link", "add", node.name, "type", "veth", "peer", "name", node.device)
        _inside(first, *link, "netns", str(holder(node)))
        _inside(first, "ip", "link", "set", node.name, "master", BRIDGE, "up")
        _inside(node, "ip", "addr", "add", f"{node.address}/24", "dev", node.device)
        _inside(node, "ip", "link", "set", node.device, "up")
    for node in layout.nodes:
        # A packet to a Service needs a route to come as far as the rules; where they are missing it finds nobody.
        _inside(node, "ip", "route", "add", SERVICE_RANGE, "dev", node.device)
        for other in layout.nodes:
            if other != node:
                _inside(node, "ip", "route", "add", other.pod_range, "via", other.address)


def cut_off(layout: Layout, node: Node) -> None:
    """Nothing reaches the node and nothing leaves it; what runs there runs on. Not for the first one."""
    _inside(layout.first_node, "ip", "link", "set", node.name, "down")


def join_again(layout: Layout, node: Node) -> None:
    _inside(layout.first_node, "ip", "link", "set", node.name, "up")


def entering(node: Node, *, mounts: bool = True) -> tuple[str, ...]:
    """The words before a command that run it in the node's namespaces.

    Args:
        mounts: whether it sees the node's folders; otherwise the machine's own.
    Raises: ClusterError when the node has none.
    """
    process = holder(node)
    words = ("nsenter", f"--net=/proc/{process}/ns/net")
    return (*words, f"--mount=/proc/{process}/ns/mnt", "--") if mounts else (*words, "--")


def holder(node: Node) -> int:
    """The process that holds the node's namespaces. Raises: ClusterError when there is none."""
    found = members(f"{node.name}/{_HOLDER}")
    if not found:
        raise ClusterError(f"{node.name} does not run: `python -m cluster up` starts the cluster")
    return min(found)


def _hold(node: Node) -> None:
    cgroup = f"{node.name}/{_HOLDER}"
    make_cgroup(cgroup)
    process = subprocess.Popen(
        # Mounts made inside are shared between the node's processes, as between those of a machine.
        ["unshare", "--net", "--mount", "--propagation", "private", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: enter_cgroup(cgroup),
    )
    end = time.monotonic() + _HELD_WITHIN_S
    while _namespace(process.pid) == _namespace(os.getpid()) or _name(process.pid) != "sleep":
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise ClusterError(f"{node.name}: unshare made no namespaces")
        time.sleep(0.01)


def _own_folders(node: Node) -> None:
    _inside(node, "mount", "--make-rshared", "/")
    for name, seen_at in OWN_FOLDERS.items():
        folder = node.folder / name
        folder.mkdir(parents=True)
        _inside(node, "mount", "--bind", folder, seen_at)
    for name, value in KERNEL_SETTINGS.items():
        file = node.folder / "kernel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        _inside(node, "mount", "--bind", file, f"/proc/sys/{name}")


def _inside(node: Node, *words: str | Path) -> str:
    return run(*entering(node), *words)


def _namespace(process: int) -> str:
    return str(Path(f"/proc/{process}/ns/net").readlink())


def _name(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()
