"""Names, addresses and folders of a cluster: pure, and defined only in this module.

    namespace of node-0                              namespace of node-1
      API server, etcd, scheduler, controllers
      kubelet, containerd, kube-proxy                  kubelet, containerd, kube-proxy
      pods 10.244.0.0/24                               pods 10.244.1.0/24
      bridge "nodes" 10.240.0.1 ──────── veth ──────── eth0 10.240.0.2

No other link leads to these namespaces and none has a default route. So no packet leaves the machine, and the addresses
cannot conflict with others.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from cluster.machine.errors import ClusterError

CLUSTER_NAME = "orca-cluster"
NODE_RANGE = "10.240.0.0/24"
POD_RANGE = "10.244.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_ADDRESS = "10.96.0.10"
INGRESS_ADDRESS = "10.96.0.80"
DNS_DOMAIN = "cluster.local"
API_PORT = 6443
BRIDGE = "nodes"
NODES_MAX = 9

OWN_FOLDERS = {"var-lib": "/var/lib", "var-log": "/var/log", "run": "/run"}
"""Folder below a node's folder -> its path for the node's processes. Kubernetes and containerd write to these paths by
default, so that two nodes of one machine would conflict. The machine's own folders do not change."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: a network and a mount namespace, a cgroup and a folder."""

    number: int
    folder: Path

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.240.0.{self.number + 1}"

    @property
    def pod_range(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def device(self) -> str:
        """The network device that leads to the other nodes."""
        return BRIDGE if self.number == 0 else "eth0"


@dataclass(frozen=True, slots=True)
class Layout:
    """A cluster below one folder, `state`, that is made by `up` and removed by `down`."""

    state: Path
    node_count: int = 2

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(number, self.state / f"node-{number}") for number in range(self.node_count))

    @property
    def first_node(self) -> Node:
        """The node that also has the control plane and the cluster's own services."""
        return self.nodes[0]

    @property
    def marker(self) -> Path:
        """The file that marks the folder as a cluster's, so that it may be removed; it has the number of nodes."""
        return self.state / "orca-cluster.json"

    @property
    def certificates(self) -> Path:
        return self.state / "certificates"

    @property
    def configuration(self) -> Path:
        return self.state / "configuration"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def audit_log(self) -> Path:
        """A file with one line of JSON for each call to the API server."""
        return self.logs / "audit.log"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; its address works only in the cluster's network."""
        return self.configuration / "admin.kubeconfig"

    @property
    def api_url(self) -> str:
        return f"https://{self.first_node.address}:{API_PORT}"


def write_marker(layout: Layout) -> None:
    layout.marker.write_text(json.dumps({"nodes": layout.node_count}))


def read_layout(state: Path) -> Layout:
    """Return the layout of the cluster in `state`. Raises: ClusterError if there is none."""
    marker = Layout(state).marker
    if not marker.exists():
        raise ClusterError(f"no cluster was started below {state}")
    return Layout(state, node_count=json.loads(marker.read_text())["nodes"])


def check_state(layout: Layout) -> None:
    """Check the state folder. Raises: ClusterError if it has other files, or if each node has its own folder there."""
    hidden = [folder for folder in OWN_FOLDERS.values() if layout.state.is_relative_to(folder)]
    if hidden:
        raise ClusterError(f"the state folder may not be below {hidden[0]}, because each node has its own folder there")
    if layout.state.exists() and any(layout.state.iterdir()) and not layout.marker.exists():
        raise ClusterError(f"{layout.state} has other files: choose an empty folder for the cluster's state")
