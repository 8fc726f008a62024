"""The cluster's beginning and end: `up` and `down`."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.images.loading import import_archive
from cluster.images.scratch import service_images, toolbox_image
from cluster.images.store import link_into
from cluster.kubernetes.certificates import make_certificates
from cluster.kubernetes.components import Started, container_runtime, control_plane, node_components, start
from cluster.kubernetes.configuration import CONTAINERD_SOCKET, write_configuration
from cluster.kubernetes.kubectl import Kubectl, OwnKubectl
from cluster.kubernetes.services import DEPLOYMENTS, manifests
from cluster.machine import cgroups
from cluster.machine.cache import check_space
from cluster.machine.debian import COMMANDS, install, missing_packages
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout, Node, check_state, write_mark
from cluster.machine.namespaces import entering, join_nodes, make_namespaces
from cluster.programs.gateway_api import definitions
from cluster.programs.go_programs import OF_THE_CLUSTER, build_programs

Tell = Callable[[str], None]

_SPACE_GB = 2.0
_API_WITHIN_S = 90.0
_RUNTIME_WITHIN_S = 60.0
_NODE_WITHIN_S = 90.0
_SERVICES_WITHIN_S = 120.0
_GONE_WITHIN_S = 30.0


def up(layout: Layout, tell: Tell) -> None:
    """Start a cluster and wait until its nodes are ready and its services available.

    Whatever is missing is installed or built first. When it fails, everything is taken away again but the logs.

    Raises: ClusterError when the machine does not fit, another kubelet runs, or a component fails; it has the end of
        that component's log then.
    """
    check_machine(layout)
    install(missing_packages(COMMANDS), tell)
    build_programs(OF_THE_CLUSTER, tell)
    gateway_api = definitions(tell)
    check_space(layout.state, wanted_gb=_SPACE_GB, purpose="a cluster")
    try:
        _start_all(layout, gateway_api, _Steps(tell))
    except BaseException:
        _end_processes()
        _clear(layout, keep_logs=True)
        raise


def down(layout: Layout, *, keep_logs: bool = False) -> None:
    """End the cluster and remove what is left of it, also of one whose `up` did not end well.

    With its last process go its namespaces, and with these its devices, packet rules and mounts.
    """
    _end_processes()
    _clear(layout, keep_logs=keep_logs)


def check_machine(layout: Layout) -> None:
    """Raises: ClusterError with the reason why no cluster can be started here now."""
    if os.geteuid() != 0:
        raise ClusterError("a cluster needs root: it makes namespaces and cgroups")
    cgroups.check_hierarchies()
    if cgroups.members():
        raise ClusterError("a cluster runs here already: `python -m cluster down` ends it")
    if (other := _other_kubelet()) is not None:
        raise ClusterError(f"another kubelet runs here, process {other}: this cluster keeps away from it")
    check_state(layout)


def _start_all(layout: Layout, gateway_api: Path, done: "_Steps") -> None:
    cgroups.remove_cgroups()
    shutil.rmtree(layout.state, ignore_errors=True)
    for folder in (layout.state, layout.logs):
        folder.mkdir(parents=True)
    write_mark(layout)
    make_certificates(layout)
    write_configuration(layout)
    for node in layout.nodes:
        make_namespaces(node)
    join_nodes(layout)
    done("namespaces, certificates and configuration are there")

    kubectl = OwnKubectl(layout)
    enter = entering(layout.first_node)
    started = {component.name: start(component, layout, enter) for component in control_plane(layout)}
    for node in layout.nodes:
        link_into(node)
    runtimes = {node: start(container_runtime(layout, node), layout, entering(node)) for node in layout.nodes}
    for node in layout.nodes:
        _prepare_runtime(node, runtimes[node])
    done("container runtimes have their images")
    started["kube-apiserver"].wait_until(kubectl.is_ready, "it answers", within_s=_API_WITHIN_S)
    done("the API server answers")

    kubelets = [_start_node(layout, node) for node in layout.nodes]
    kubectl("apply", "--server-side", "--filename", str(gateway_api))
    kubectl.apply(manifests(layout))
    for node, kubelet in zip(layout.nodes, kubelets, strict=True):
        kubelet.wait_until(partial(_is_node_ready, kubectl, node), "its node is ready", within_s=_NODE_WITHIN_S)
    done("nodes are ready")
    _wait_for_services(kubectl)
    done("DNS, Ingress and volumes are served")


def _start_node(layout: Layout, node: Node) -> Started:
    kubelet, proxy = node_components(layout, node)
    start(proxy, layout, entering(node))
    return start(kubelet, layout, entering(node))


def _prepare_runtime(node: Node, runtime: Started) -> None:
    """Wait for it, and give it what pods of the cluster's own run."""
    socket = node.folder / "run" / Path(CONTAINERD_SOCKET).relative_to("/run")
    runtime.wait_until(socket.exists, "its socket is there", within_s=_RUNTIME_WITHIN_S)
    images = [toolbox_image(), *(service_images() if node.number == 0 else [])]
    for image in images:
        import_archive(node, image.written())


def _is_node_ready(kubectl: Kubectl, node: Node) -> bool:
    try:
        conditions = kubectl.get("node", node.name)["status"].get("conditions", [])
    except ClusterError:
        return False
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _wait_for_services(kubectl: Kubectl) -> None:
    """Raises: ClusterError that shows the pods and what was warned of them."""
    end = time.monotonic() + _SERVICES_WITHIN_S
    while not _are_services_available(kubectl):
        if time.monotonic() > end:
            pods = kubectl("get", "pods", "--all-namespaces")
            warnings = kubectl("get", "events", "--all-namespaces", "--field-selector=type=Warning")
            raise ClusterError(f"not all services came up in {_SERVICES_WITHIN_S:.0f} s:\n{pods}\n{warnings[-3000:]}")
        time.sleep(0.2)


def _are_services_available(kubectl: Kubectl) -> bool:
    available = {
        (item["metadata"]["namespace"], item["metadata"]["name"])
        for item in kubectl.get("deployments", "--all-namespaces")["items"]
        if item["status"].get("availableReplicas")
    }
    return available.issuperset(DEPLOYMENTS)


def _other_kubelet() -> int | None:
    """A process of that name; one that has ended, and waits for its parent to notice, has no command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text() == "kubelet\n" and (folder / "cmdline").read_bytes():
                return int(folder.name)
    return None


def _end_processes() -> None:
    """Kill until nothing is left: what was about to start a process has done so by the next round."""
    end = time.monotonic() + _GONE_WITHIN_S
    while left := cgroups.members():
        if time.monotonic() > end:
            raise ClusterError(f"processes {sorted(left)} of the cluster do not end")
        cgroups.kill_members()
        time.sleep(0.05)


def _clear(layout: Layout, *, keep_logs: bool) -> None:
    """Nothing below the state folder is mounted in the machine's own namespace, so this removes only the cluster's."""
    cgroups.remove_cgroups()
    if not layout.mark.exists():
        return
    kept = set()
    if keep_logs:
        kept = {layout.mark, layout.logs}
        keep_pod_logs(layout)
    for path in set(layout.state.iterdir()) - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not keep_logs:
        layout.state.rmdir()


def keep_pod_logs(layout: Layout) -> None:
    """Copy what the pods that are left have written, such as the Ingress proxy, to where the components' logs are."""
    kept = layout.logs / "pods"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for log in layout.state.glob("node-*/var-log/pods/*/*/*.log*"):
        pod, container = log.parts[-3].rpartition("_")[0], log.parts[-2]  # <namespace>_<name>_<uid>, <container>
        shutil.copy(log, kept / f"{pod}.{container}.{log.name}")


class _Steps:
    """Tells each step with the seconds since the beginning."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._begun = time.monotonic()

    def __call__(self, step: str) -> None:
        self._tell(f"{time.monotonic() - self._begun:5.1f} s  {step}")
