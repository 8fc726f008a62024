"""The programs that run as long as the cluster: returns their command lines, starts and watches them."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.machine.cgroups import enter_cgroup, make_cgroup, members
from cluster.machine.errors import ClusterError
from cluster.machine.layout import API_PORT, POD_RANGE, SERVICE_RANGE, Layout, Node
from cluster.programs.go_programs import ETCD, KUBERNETES

_TAIL_CHARACTERS = 2000
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Component:
    """A process of a node. It runs if its cgroup, `<node>/<name>`, has a process."""

    node: Node
    name: str
    command: tuple[str, ...]

    @property
    def cgroup(self) -> str:
        return f"{self.node.name}/{self.name}"

    def log(self, layout: Layout) -> Path:
        return layout.logs / f"{self.node.name}.{self.name}.log"


def control_plane(layout: Layout) -> list[Component]:
    """Return the control plane in the order of starting, all on the first node."""
    commands = {
        "etcd": _etcd(layout),
        "kube-apiserver": _api_server(layout),
        "kube-controller-manager": _controller_manager(layout),
        "kube-scheduler": _scheduler(layout),
    }
    return [Component(layout.first_node, name, tuple(words)) for name, words in commands.items()]


def container_runtime(layout: Layout, node: Node) -> Component:
    settings = layout.configuration / f"{node.name}.containerd.toml"
    return Component(node, "containerd", ("containerd", "--config", str(settings)))


def node_components(layout: Layout, node: Node) -> list[Component]:
    """Return the components that make a node of a machine with a container runtime."""
    files = layout.configuration
    kubelet = [
        _kubernetes("kubelet"),
        f"--config={files / f'{node.name}.kubelet'}",
        f"--kubeconfig={files / f'{node.name}.kubeconfig'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]
    proxy = [_kubernetes("kube-proxy"), f"--config={files / f'{node.name}.kube-proxy'}"]
    return [Component(node, "kubelet", tuple(kubelet)), Component(node, "kube-proxy", tuple(proxy))]


def _etcd(layout: Layout) -> list[str]:
    return [
        str(ETCD.path),
        f"--data-dir={layout.state / 'etcd'}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        # Its data is needed only as long as the cluster runs; after a power loss both are gone.
        "--unsafe-no-fsync",
    ]


def _api_server(layout: Layout) -> list[str]:
    certificates, files = layout.certificates, layout.configuration
    return [
        _kubernetes("kube-apiserver"),
        f"--advertise-address={layout.first_node.address}",
        f"--secure-port={API_PORT}",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--client-ca-file={certificates / 'ca.crt'}",
        f"--tls-cert-file={certificates / 'apiserver.crt'}",
        f"--tls-private-key-file={certificates / 'apiserver.key'}",
        f"--kubelet-client-certificate={certificates / 'admin.crt'}",
        f"--kubelet-client-key={certificates / 'admin.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={certificates / 'service-accounts.key'}",
        f"--service-account-signing-key-file={certificates / 'service-accounts.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--admission-control-config-file={files / 'admission'}",
        f"--audit-policy-file={files / 'audit-policy'}",
        f"--audit-log-path={layout.audit_log}",
        "--allow-privileged=true",
    ]


def _controller_manager(layout: Layout) -> list[str]:
    certificates = layout.certificates
    return [
        _kubernetes("kube-controller-manager"),
        f"--kubeconfig={layout.configuration / 'kube-controller-manager.kubeconfig'}",
        f"--cluster-cidr={POD_RANGE}",
        f"--root-ca-file={certificates / 'ca.crt'}",
        f"--service-account-private-key-file={certificates / 'service-accounts.key'}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        # A lost node is detected after 20 s instead of 50, so that tests need not wait as long as a data centre.
        "--node-monitor-grace-period=20s",
        "--node-monitor-period=2s",
    ]


def _scheduler(layout: Layout) -> list[str]:
    settings = layout.configuration / "kube-scheduler.kubeconfig"
    return [_kubernetes("kube-scheduler"), f"--kubeconfig={settings}", "--leader-elect=false"]


def _kubernetes(name: str) -> str:
    return str(KUBERNETES.folder / name)


@dataclass(frozen=True, slots=True)
class StartedComponent:
    """A component that this process has started; it may have ended since."""

    component: Component
    process: "subprocess.Popen[bytes]"
    log: Path

    def failure(self, reason: str) -> ClusterError:
        """Return an error with the end of the component's log."""
        tail = self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip()
        return ClusterError(f"{self.component.cgroup} {reason}; the end of {self.log}:\n{tail}")

    def wait_until(self, is_so: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Wait for a condition. Raises: ClusterError with the end of its log, if it ends before or takes too long."""
        end = time.monotonic() + within_s
        while not is_so():
            if self.process.poll() is not None:
                raise self.failure(f"ended with status {self.process.returncode}, before {what}")
            if time.monotonic() > end:
                raise self.failure(f"runs, but after {within_s:.0f} s this is not true: {what}")
            time.sleep(_PAUSE_S)


def start(component: Component, layout: Layout, enter: tuple[str, ...]) -> StartedComponent:
    """Start a component in its node's namespaces and its own cgroup; it keeps running after this process.

    Args:
        enter: the arguments before a command that run it in the node's namespaces.
    """
    make_cgroup(component.cgroup)
    path = component.log(layout)
    with path.open("ab") as log:
        process = subprocess.Popen(
            [*enter, *component.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(),
            start_new_session=True,
            preexec_fn=lambda: enter_cgroup(component.cgroup),
        )
    return StartedComponent(component, process, path)


def is_running(component: Component) -> bool:
    return bool(members(component.cgroup))


def _environment() -> dict[str, str]:
    """Return an environment without the caller's settings, such as a proxy that would answer for its addresses."""
    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {"PATH": f"{path}:/usr/sbin:/sbin", "HOME": "/root"}
