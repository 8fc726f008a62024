"""The configuration files of a cluster's programs: pure functions of the layout. JSON is valid YAML for all readers."""

import json
from typing import Any

from cluster.images.scratch import TOOLBOX
from cluster.machine.layout import CLUSTER_NAME, DNS_ADDRESS, DNS_DOMAIN, POD_RANGE, Layout, Node

Json = dict[str, Any]

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
"""Path of the socket for a node's processes."""
PRIVILEGED_NAMESPACES = ("kube-system", "local-path-storage")
"""Namespaces exempt from restricted Pod Security: the cluster's own services use folders of their node."""


def write_configuration(layout: Layout) -> None:
    layout.configuration.mkdir()
    for name, content in _files(layout).items():
        file = layout.configuration / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)


def _files(layout: Layout) -> dict[str, str]:
    files = {
        "audit-policy": audit_policy(),
        "admission": admission(),
        **{f"{user}.kubeconfig": kubeconfig(layout, user) for user in _kubeconfig_users(layout)},
        **{f"{node.name}.kubelet": kubelet(layout, node) for node in layout.nodes},
        **{f"{node.name}.kube-proxy": kube_proxy(layout, node) for node in layout.nodes},
        **{f"{node.name}.cni/pods.conflist": cni(node) for node in layout.nodes},
    }
    texts = {name: json.dumps(content, indent=2) for name, content in files.items()}
    return texts | {f"{node.name}.containerd.toml": containerd(layout, node) for node in layout.nodes}


def _kubeconfig_users(layout: Layout) -> list[str]:
    users = ["admin", "kube-controller-manager", "kube-scheduler", "kube-proxy"]
    return [*users, *(node.name for node in layout.nodes)]


def kubeconfig(layout: Layout, user: str) -> Json:
    """Return the kubeconfig of the user with the certificate `<user>.crt`."""
    folder = layout.certificates
    cluster = {"server": layout.api_url, "certificate-authority": str(folder / "ca.crt")}
    identity = {"client-certificate": str(folder / f"{user}.crt"), "client-key": str(folder / f"{user}.key")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": CLUSTER_NAME, "cluster": cluster}],
        "users": [{"name": user, "user": identity}],
        "contexts": [{"name": CLUSTER_NAME, "context": {"cluster": CLUSTER_NAME, "user": user}}],
        "current-context": CLUSTER_NAME,
    }


def audit_policy() -> Json:
    """Return a policy that logs all calls without bodies: enough to compare used verbs with granted rights."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }


def admission() -> Json:
    """Return a configuration with restricted Pod Security as the default of all namespaces."""
    defaults = dict.fromkeys(("enforce", "audit", "warn"), "restricted")
    defaults |= {f"{mode}-version": "latest" for mode in ("enforce", "audit", "warn")}
    pod_security = {
        "apiVersion": "pod-security.admission.config.k8s.io/v1",
        "kind": "PodSecurityConfiguration",
        "defaults": defaults,
        "exemptions": {"namespaces": list(PRIVILEGED_NAMESPACES)},
    }
    return {
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "AdmissionConfiguration",
        "plugins": [{"name": "PodSecurity", "configuration": pod_security}],
    }


def kubelet(layout: Layout, node: Node) -> Json:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.certificates / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CLUSTER_NAME}/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": DNS_DOMAIN,
        # Pods resolve only the cluster's names; the machine's own name servers are out of reach.
        "resolvConf": "/dev/null",
        # The disk of a test machine is often nearly full of caches, but images must stay and pods must run.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # A node without reports is lost after 20 s (the controller manager's grace period), so it reports more often.
        "nodeStatusUpdateFrequency": "4s",
    }


def kube_proxy(layout: Layout, node: Node) -> Json:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node.name,
        "clusterCIDR": POD_RANGE,
        "clientConnection": {"kubeconfig": str(layout.configuration / "kube-proxy.kubeconfig")},
        # The limits of connection tracking belong to the whole machine, so they must not change.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "iptables": {"minSyncPeriod": "100ms"},
    }


def cni(node: Node) -> Json:
    """Return a network with one link per pod and routed packets, so that the rules for Services apply to all."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": node.pod_range}]], "routes": [{"dst": "0.0.0.0/0"}]}
    return {
        "cniVersion": "0.4.0",
        "name": CLUSTER_NAME,
        "plugins": [
            {"type": "ptp", "ipMasq": False, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def containerd(layout: Layout, node: Node) -> str:
    """Return TOML for containerd. Its folder for CNI files must have only the file of `cni`."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2

[grpc]
address = "{CONTAINERD_SOCKET}"

[{cri}]
sandbox_image = "{TOOLBOX}"
# CI containers may not lower a process's OOM score; without this setting no pod would start there.
restrict_oom_score_adj = true

[{cri}.cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{layout.configuration / f"{node.name}.cni"}"
"""
