"""Installs Orca as a user does: the chart by helm, an OrcaDeployment by kubectl, the API through the Ingress."""

import base64
import contextlib
import functools
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.kubernetes.kubectl import ContextKubectl, Kubectl, OwnKubectl
from cluster.machine.cache import cache_folder
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout, read_layout
from target import Target, choose_target, read_settings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "orca"
FIVE_LINES = CHART / "examples" / "orcadeployment.yaml"
RELEASE = "orca"
NAMESPACE_LABEL = "orca-e2e"
"""Label of every namespace of the scenarios; its value is the namespace of their operator."""
READY_S = 300.0

Json = dict[str, Any]

SPEC: Json = {
    "model": {"uri": "file:///opt/orca/models/orca-austen"},
    "worker": {"threads": 1},
    # Short drains of gateways: streams in these scenarios take seconds.
    "gateway": {"drainSeconds": 60},
}
"""The spec of a small service, which scenarios extend."""


@functools.cache
def target() -> Target:
    """Return the cluster of this run. Raises: SettingError."""
    return choose_target(read_settings(os.environ), secrets.token_hex(3))


def own_layout() -> Layout:
    """Return the layout of the cluster of `make e2e`. Raises: ClusterError if it does not run."""
    return read_layout(cache_folder() / "cluster")


def connect() -> Kubectl:
    """Return kubectl for the cluster of this run. Raises: ClusterError like `own_layout`."""
    context = target().context
    return OwnKubectl(own_layout()) if context is None else ContextKubectl(context)


def make_namespace(kubectl: Kubectl, purpose: str) -> str:
    """Make a new namespace, whose resources the operator handles after the next `install_chart`. Returns: its name."""
    return mark_namespace(kubectl, f"orca-e2e-{purpose}-{secrets.token_hex(3)}")


def mark_namespace(kubectl: Kubectl, name: str) -> str:
    """Make a namespace with the label of this run. Returns: its name. Raises: ClusterError if it exists already."""
    metadata = {"name": name, "labels": {NAMESPACE_LABEL: target().operator_namespace}}
    kubectl(
        "create",
        "--filename=-",
        standard_input=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}),
    )
    kubectl("wait", "--for=create", f"--namespace={name}", "serviceaccount/default", "--timeout=30s")
    return name


def own_namespaces(kubectl: Kubectl) -> list[Json]:
    """Return the namespaces of this run, including that of the operator."""
    found: list[Json] = kubectl.get("namespaces", f"--selector={NAMESPACE_LABEL}={target().operator_namespace}")[
        "items"
    ]
    return found


def helm(*words: str, within_s: float = 120.0) -> str:
    """Run helm and return its output. Raises: AssertionError with its errors, if it fails."""
    context = target().context
    where = () if context is None else ("--kube-context", context)
    ended = subprocess.run(["helm", *where, *words], capture_output=True, text=True, timeout=within_s, check=False)
    assert ended.returncode == 0, f"helm {' '.join(words)}: {ended.stderr}"
    return ended.stdout


def install_chart(*values: str, texts: Sequence[str] = ()) -> str:
    """Install or upgrade the chart. Args: values, texts: `key=value` each. Returns: the notes."""
    # A tag may look like a number.
    texts = (f"images.tag={target().tag}", f"images.registry={target().registry}", *texts)
    settings = [word for value in (*namespace_values(), *values) for word in ("--set", value)]
    settings += [word for text in texts for word in ("--set-string", text)]
    place = ("--namespace", target().operator_namespace, "--create-namespace")
    return helm(
        "upgrade", "--install", RELEASE, str(CHART), *place, "--wait", "--timeout", "2m", *settings, within_s=150
    )


def namespace_values() -> list[str]:
    """Return chart values that limit the operator to the namespaces of this run; none on the own cluster."""
    if target().is_own:
        return []
    active = [each["metadata"]["name"] for each in own_namespaces(connect()) if each["status"]["phase"] == "Active"]
    return [f"namespaces={{{','.join(active)}}}"]


def kill_operator(kubectl: Kubectl) -> None:
    """Delete the operator's pod by force."""
    selector = "--selector=app.kubernetes.io/name=orca-operator"
    kubectl("delete", "pods", selector, f"--namespace={target().operator_namespace}", "--force", "--grace-period=0")


def uids(pods: Iterable[Json]) -> set[str]:
    """Return the uids of pods, which differ between pods with the same name."""
    return {pod["metadata"]["uid"] for pod in pods}


class Service:
    """One OrcaDeployment in its own namespace.

    It has more than 15 methods because each is one short kubectl command.
    """

    def __init__(self, kubectl: Kubectl, namespace: str, name: str = "austen") -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.name = name

    @property
    def host(self) -> str:
        return f"{self.name}.{self.namespace}.example"

    @property
    def base_url(self) -> str:
        """URL of the Ingress, which routes by the Host header."""
        return f"http://{target().ingress_address}/v1"

    @property
    def ingress(self) -> Json:
        """The Ingress in the spec of the OrcaDeployment."""
        return {"className": target().ingress_class, "host": self.host}

    @property
    def headers(self) -> dict[str, str]:
        return {"Host": self.host}

    def api_key(self) -> str:
        """Return the API key that the operator has made."""
        secret = self.kubectl.get("secret", f"{self.name}-api-key", f"--namespace={self.namespace}")
        return base64.b64decode(secret["data"]["key"]).decode()

    def create(self, spec: Mapping[str, Any]) -> None:
        """Create or change the OrcaDeployment."""
        resource = {
            "apiVersion": "orca-serving.io/v1alpha1",
            "kind": "OrcaDeployment",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": dict(spec),
        }
        self.kubectl("apply", "--filename=-", standard_input=json.dumps(resource))

    def edit(self, **spec: Any) -> None:
        """Merge these fields into the spec."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", "orca", self.name, f"--namespace={self.namespace}", "--type=merge", f"--patch={patch}")

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", "orca", self.name, f"--namespace={self.namespace}", f"--replicas={replicas}")

    def get(self) -> Json:
        return self.kubectl.get("orca", self.name, f"--namespace={self.namespace}")

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition, if they belong to the newest spec."""
        found = self.get()
        status = found.get("status", {})
        for each in status.get("conditions", []):
            if each["type"] == kind and status["observedGeneration"] == found["metadata"]["generation"]:
                return each["status"], each["reason"], each.get("message", "")
        return "Unknown", "", ""

    def wait_for(self, kind: str, *wanted: str, within_s: float = READY_S) -> float:
        """Wait until the condition starts with the wanted status and reason. Returns: the seconds that it took."""
        began = time.monotonic()
        wait_until(lambda: self.condition(kind)[: len(wanted)] == wanted, self.describe, within_s=within_s)
        return time.monotonic() - began

    def wait_until_settled(self, within_s: float = READY_S) -> float:
        """Wait until the wanted revision serves and no change is in progress. Returns: the seconds that it took."""

        def is_settled() -> bool:
            return self.condition("Ready")[0] == "True" and self.condition("Progressing")[0] == "False"

        began = time.monotonic()
        wait_until(is_settled, self.describe, within_s=within_s)
        return time.monotonic() - began

    def kill_operator_after_edit(self) -> None:
        """Kill the operator after it has started to apply the newest spec."""
        wait_until(self.is_observed, self.describe)
        kill_operator(self.kubectl)

    def is_observed(self) -> bool:
        """Has the operator observed the newest spec?"""
        found = self.get()
        seen: int = found.get("status", {}).get("observedGeneration", 0)
        return seen >= found["metadata"]["generation"]

    def pods(self, role: str | None = None) -> list[Json]:
        """Return the pods that are not being deleted."""
        selector = f"orca-serving.io/deployment={self.name}" + (f",orca-serving.io/role={role}" if role else "")
        found: list[Json] = self.kubectl.get("pods", f"--namespace={self.namespace}", f"--selector={selector}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def describe(self) -> str:
        """Return conditions, pods, events and logs: what a person would look at after a timeout."""
        found = [f"conditions: {json.dumps(self.get().get('status', {}).get('conditions', []), indent=1)}"]
        found.append(self.kubectl("get", "pods", "--output=wide", f"--namespace={self.namespace}"))
        events = ("get", "events", f"--namespace={self.namespace}", "--sort-by=.lastTimestamp")
        found += self.kubectl(*events).splitlines()[-15:]
        for pod in self.pods():
            for container in pod.get("status", {}).get("containerStatuses", []):
                if not container["ready"]:
                    name = pod["metadata"]["name"]
                    found.append(f"log of {name}:")
                    with contextlib.suppress(ClusterError):  # there may be no log yet
                        found.append(self.kubectl("logs", name, f"--namespace={self.namespace}", "--tail=15"))
        return "\n".join(found)


def wait_until(is_so: Callable[[], bool], describe: Callable[[], str] = str, *, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, f"not within {within_s:.0f} s\n{describe()}"
        time.sleep(0.2)
