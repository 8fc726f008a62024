"""Starts and ends the cluster: `up` and `down`."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.images.loading import import_archive
from cluster.images.scratch import service_images, toolbox_image
from cluster.images.store import link_store_into
from cluster.kubernetes.certificates import make_certificates
from cluster.kubernetes.components import StartedComponent, container_runtime, control_plane, node_components, start
from cluster.kubernetes.configuration import CONTAINERD_SOCKET, write_configuration
from cluster.kubernetes.kubectl import Kubectl, OwnKubectl
from cluster.kubernetes.services import DEPLOYMENTS, manifests
from cluster.machine import cgroups
from cluster.machine.cache import check_space
from cluster.machine.debian import COMMANDS, install, missing_packages
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout, Node, check_state, write_marker
from cluster.machine.namespaces import connect_nodes, enter_command, make_namespaces
from cluster.programs.gateway_api import definitions
from cluster.programs.go_programs import CLUSTER_PROGRAMS, build_programs

Report = Callable[[str], None]

_SPACE_GB = 2.0
_API_WITHIN_S = 90.0
_RUNTIME_WITHIN_S = 60.0
_NODE_WITHIN_S = 90.0
_SERVICES_WITHIN_S = 120.0
_GONE_WITHIN_S = 30.0


def up(layout: Layout, report: Report) -> None:
    """Start a cluster and wait until its nodes are ready and its services available.

    Missing packages and programs are installed or built first. After a failure, only the logs stay.

    Raises: ClusterError if the machine is not suitable, another kubelet runs, or a component fails; the message then
        has the end of the component's log.
    """
    check_machine(layout)
    install(missing_packages(COMMANDS), report)
    build_programs(CLUSTER_PROGRAMS, report)
    gateway_api = definitions(report)
    check_space(layout.state, wanted_gb=_SPACE_GB, purpose="a cluster")
    try:
        _start_all(layout, gateway_api, _StepReporter(report))
    except BaseException:
        _kill_processes()
        _remove_state(layout, keep_logs=True)
        raise


def down(layout: Layout, *, keep_logs: bool = False) -> None:
    """End the cluster and remove everything that is left of it, also after a failed `up`.

    Its namespaces end with their last process, and with them its devices, packet rules and mounts.
    """
    _kill_processes()
    _remove_state(layout, keep_logs=keep_logs)


def check_machine(layout: Layout) -> None:
    """Check that a cluster can be started here now. Raises: ClusterError with the reason if not."""
    if os.geteuid() != 0:
        raise ClusterError("a cluster needs root: it makes namespaces and cgroups")
    cgroups.check_cgroup_version()
    if cgroups.members():
        raise ClusterError("a cluster runs here already: `python -m cluster down` ends it")
    if (other := _other_kubelet()) is not None:
        raise ClusterError(f"another kubelet runs here, process {other}: a cluster would disturb it")
    check_state(layout)


def _start_all(layout: Layout, gateway_api: Path, done: "_StepReporter") -> None:
    cgroups.remove_cgroups()
    shutil.rmtree(layout.state, ignore_errors=True)
    for folder in (layout.state, layout.logs):
        folder.mkdir(parents=True)
    write_marker(layout)
    make_certificates(layout)
    write_configuration(layout)
    for node in layout.nodes:
        make_namespaces(node)
    connect_nodes(layout)
    done("namespaces, certificates and configuration are there")

    kubectl = OwnKubectl(layout)
    enter = enter_command(layout.first_node)
    started = {component.name: start(component, layout, enter) for component in control_plane(layout)}
    for node in layout.nodes:
        link_store_into(node)
    runtimes = {node: start(container_runtime(layout, node), layout, enter_command(node)) for node in layout.nodes}
    for node in layout.nodes:
        _import_service_images(node, runtimes[node])
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


def _start_node(layout: Layout, node: Node) -> StartedComponent:
    kubelet, proxy = node_components(layout, node)
    start(proxy, layout, enter_command(node))
    return start(kubelet, layout, enter_command(node))


def _import_service_images(node: Node, runtime: StartedComponent) -> None:
    """Wait for the container runtime, and import the images of the cluster's own pods."""
    socket = node.folder / "run" / Path(CONTAINERD_SOCKET).relative_to("/run")
    runtime.wait_until(socket.exists, "its socket is there", within_s=_RUNTIME_WITHIN_S)
    images = [toolbox_image(), *(service_images() if node.number == 0 else [])]
    for image in images:
        import_archive(node, image.write_archive())


def _is_node_ready(kubectl: Kubectl, node: Node) -> bool:
    try:
        conditions = kubectl.get("node", node.name)["status"].get("conditions", [])
    except ClusterError:
        return False
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _wait_for_services(kubectl: Kubectl) -> None:
    """Wait until all services are available. Raises: ClusterError with the pods and their warnings."""
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
    """Return the process id of any kubelet. A zombie does not count: it has no command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text() == "kubelet\n" and (folder / "cmdline").read_bytes():
                return int(folder.name)
    return None


def _kill_processes() -> None:
    """Kill all processes until none is left: a process that is just being started is killed in the next round."""
    end = time.monotonic() + _GONE_WITHIN_S
    while left := cgroups.members():
        if time.monotonic() > end:
            raise ClusterError(f"processes {sorted(left)} of the cluster do not end")
        cgroups.kill_members()
        time.sleep(0.05)


def _remove_state(layout: Layout, *, keep_logs: bool) -> None:
    """Remove cgroups and state. No mount in the machine's own namespace is below the state folder."""
    cgroups.remove_cgroups()
    if not layout.marker.exists():
        return
    kept = set()
    if keep_logs:
        kept = {layout.marker, layout.logs}
        store_pod_logs(layout)
    for path in set(layout.state.iterdir()) - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not keep_logs:
        layout.state.rmdir()


def store_pod_logs(layout: Layout) -> None:
    """Copy the logs of the remaining pods, such as the Ingress proxy, into the folder of the components' logs."""
    kept = layout.logs / "pods"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for log in layout.state.glob("node-*/var-log/pods/*/*/*.log*"):
        pod, container = log.parts[-3].rpartition("_")[0], log.parts[-2]  # <namespace>_<name>_<uid>, <container>
        shutil.copy(log, kept / f"{pod}.{container}.{log.name}")


class _StepReporter:
    """Reports each step with the seconds since the start."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._begun = time.monotonic()

    def __call__(self, step: str) -> None:
        self._report(f"{time.monotonic() - self._begun:5.1f} s  {step}")
