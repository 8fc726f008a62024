"""The namespaces of the nodes and the links between them.

A process that only sleeps, in the cluster's cgroup, keeps each namespace alive. Namespaces have no names on the
machine: they end with their last process, and with them every device, packet rule and mount of the cluster.
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
"""Kernel settings that a kubelet makes at its start. Here it finds files with these values, and changes nothing."""


def make_namespaces(node: Node) -> None:
    """Make a network and a mount namespace for the node, with its own loopback device and folders."""
    _hold_namespaces(node)
    _mount_own_folders(node)
    _run_inside(node, "ip", "link", "set", "lo", "up")
    _run_inside(node, "sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")


def connect_nodes(layout: Layout) -> None:
    """Make links between the nodes, routes to each other's pods, and a route for Services."""
    first, *others = layout.nodes
    _run_inside(first, "ip", "link", "add", BRIDGE, "type", "bridge")
    _run_inside(first, "ip", "addr", "add", f"{first.address}/24", "dev", BRIDGE)
    _run_inside(first, "ip", "link", "set", BRIDGE, "up")
    for node in others:
        link = ("ip", "link", "add", node.name, "type", "veth", "peer", "name", node.device)
        _run_inside(first, *link, "netns", str(namespace_process(node)))
        _run_inside(first, "ip", "link", "set", node.name, "master", BRIDGE, "up")
        _run_inside(node, "ip", "addr", "add", f"{node.address}/24", "dev", node.device)
        _run_inside(node, "ip", "link", "set", node.device, "up")
    for node in layout.nodes:
        # A packet to a Service reaches the packet rules only if there is a route; without rules it is lost.
        _run_inside(node, "ip", "route", "add", SERVICE_RANGE, "dev", node.device)
        for other in layout.nodes:
            if other != node:
                _run_inside(node, "ip", "route", "add", other.pod_range, "via", other.address)


def disconnect_node(layout: Layout, node: Node) -> None:
    """Cut a node's link: its processes keep running, but no packet enters or leaves it. Not for the first node."""
    _run_inside(layout.first_node, "ip", "link", "set", node.name, "down")


def reconnect_node(layout: Layout, node: Node) -> None:
    _run_inside(layout.first_node, "ip", "link", "set", node.name, "up")


def enter_command(node: Node, *, mounts: bool = True) -> tuple[str, ...]:
    """Return the arguments before a command that run it in the node's namespaces.

    Args:
        mounts: True: with the node's folders; False: with the machine's own.
    Raises: ClusterError if the node does not run.
    """
    process = namespace_process(node)
    words = ("nsenter", f"--net=/proc/{process}/ns/net")
    return (*words, f"--mount=/proc/{process}/ns/mnt", "--") if mounts else (*words, "--")


def namespace_process(node: Node) -> int:
    """Return the process that keeps the node's namespaces alive. Raises: ClusterError if there is none."""
    found = members(f"{node.name}/{_HOLDER}")
    if not found:
        raise ClusterError(f"{node.name} does not run: `python -m cluster up` starts the cluster")
    return min(found)


def _hold_namespaces(node: Node) -> None:
    cgroup = f"{node.name}/{_HOLDER}"
    make_cgroup(cgroup)
    process = subprocess.Popen(
        # The node's processes share mounts that are made inside, like the processes of a machine.
        ["unshare", "--net", "--mount", "--propagation", "private", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: enter_cgroup(cgroup),
    )
    end = time.monotonic() + _HELD_WITHIN_S
    while _namespace(process.pid) == _namespace(os.getpid()) or _process_name(process.pid) != "sleep":
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise ClusterError(f"{node.name}: unshare made no namespaces")
        time.sleep(0.01)


def _mount_own_folders(node: Node) -> None:
    _run_inside(node, "mount", "--make-rshared", "/")
    for name, seen_at in OWN_FOLDERS.items():
        folder = node.folder / name
        folder.mkdir(parents=True)
        _run_inside(node, "mount", "--bind", folder, seen_at)
    for name, value in KERNEL_SETTINGS.items():
        file = node.folder / "kernel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        _run_inside(node, "mount", "--bind", file, f"/proc/sys/{name}")


def _run_inside(node: Node, *words: str | Path) -> str:
    return run(*enter_command(node), *words)


def _namespace(process: int) -> str:
    return str(Path(f"/proc/{process}/ns/net").readlink())


def _process_name(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()
