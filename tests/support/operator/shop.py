"""Actions of an operator test: on resources in a namespace of its own, and on the operator's process."""

import base64
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from kubernetes import client

from orca.core.process.ports import free_port
from support.operator.api_server import ApiServer
from support.waiting import wait_until

WITHIN_S = 100.0
IMAGES = tuple(
    word for role in ("gateway", "scheduler", "worker", "pool", "fetch") for word in (f"--image-{role}", "i:1")
)
POOL_SECRET = "redis"
WORKER_IMAGE = "i:1"
"""The image of stages in IMAGES."""


class Shop:
    """One namespace with what a test does in it."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.namespace = namespace
        self.core = client.CoreV1Api(server.api())
        self.apps = client.AppsV1Api(server.api())
        self._objects = client.CustomObjectsApi(server.api())
        self._where = ("orca-serving.io", "v1alpha1", namespace, "orcadeployments")

    def create(self, name: str = "shop", **spec: Any) -> None:
        """Create the resource, with the pool of the test unless the spec names another."""
        pool = {"external": {"urlSecret": {"name": POOL_SECRET}}}
        body = {
            "apiVersion": "orca-serving.io/v1alpha1",
            "kind": "OrcaDeployment",
            "metadata": {"name": name},
            "spec": {"model": {"uri": "file:///m"}, "pool": pool, **spec},
        }
        self._objects.create_namespaced_custom_object(*self._where, body)

    def edit(self, name: str = "shop", **spec: Any) -> None:
        self._objects.patch_namespaced_custom_object(*self._where, name, {"spec": spec})

    def note_queued(self, queued: int, name: str = "shop") -> None:
        """Write the number into the status, as the operator does."""
        status = {"status": {"requests": {"queued": queued}}}
        self._objects.patch_namespaced_custom_object_status(*self._where, name, status)

    def delete(self, name: str = "shop") -> None:
        self._objects.delete_namespaced_custom_object(*self._where, name)

    def status(self, name: str = "shop") -> dict[str, Any]:
        found: dict[str, Any] = self._objects.get_namespaced_custom_object(*self._where, name)
        return {"generation": found["metadata"]["generation"], **found.get("status", {})}

    def spec(self, name: str = "shop") -> dict[str, Any]:
        """Return the spec as the API server stores it."""
        found: dict[str, Any] = self._objects.get_namespaced_custom_object(*self._where, name)
        return dict(found["spec"])

    def condition(self, kind: str, name: str = "shop") -> tuple[str, str]:
        """Status and reason, once they tell of the newest spec."""
        status = self.status(name)
        for each in status.get("conditions", []):
            if each["type"] == kind and status["observedGeneration"] == status["generation"]:
                return each["status"], each["reason"]
        return "Unknown", ""

    def wait_for(self, kind: str, *wanted: str) -> None:
        """Wait until the condition has the status. Args: wanted: status, and optionally the reason."""
        wait_until(lambda: self.condition(kind)[: len(wanted)] == wanted, WITHIN_S, lambda: f"{kind}: {self.status()}")

    def groups(self) -> list[str]:
        found = self.apps.list_namespaced_stateful_set(self.namespace, label_selector="orca-serving.io/role=stage")
        return sorted(each.metadata.name for each in found.items)

    def pool_login(self) -> dict[str, str]:
        """URL and login of the pool of the test."""
        data = self.core.read_namespaced_secret(POOL_SECRET, self.namespace).data
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def schedulers(self) -> list[Any]:
        """StatefulSets, by name."""
        selector = "orca-serving.io/role=scheduler"
        found = self.apps.list_namespaced_stateful_set(self.namespace, label_selector=selector).items
        return sorted(found, key=lambda each: str(each.metadata.name))

    def generations(self) -> list[int]:
        """Return the generations of the existing schedulers, ascending."""
        return sorted(int(each.metadata.labels["orca-serving.io/generation"]) for each in self.schedulers())


class OperatorProcess:
    """`orca operator` against the API server."""

    def __init__(self, server: ApiServer, log: Path, *options: str, kubeconfig: Path | None = None) -> None:
        """Args: options: more of them; they win. kubeconfig: another way to that server than the straight one."""
        self._kubeconfig = kubeconfig or server.kubeconfig
        self._log = log
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    def reconciles(self) -> int:
        """Return how many times the operator has reconciled a resource."""
        return self.metric("orca_operator_reconciles_total")

    def metric(self, name: str) -> int:
        """Sum over its labels."""
        lines = [line for line in self.page("/metrics").splitlines() if line.startswith(name)]
        return sum(int(float(line.split()[1])) for line in lines)

    def page(self, path: str) -> str:
        """Raises: OSError when it does not answer with 200."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as page:
            return str(page.read().decode())

    @property
    def log(self) -> str:
        return self._log.read_text()

    def log_about(self, namespace: str) -> str:
        """Return the lines about one namespace: the operator also serves those of other tests."""
        lines = self.log.splitlines()
        return "\n".join(line for line in lines if f"namespace={namespace}" in line or f"/{namespace}/" in line)

    def start(self) -> None:
        options = ["--listen", f"127.0.0.1:{self._port}", "--resync-seconds", "2", "--log-format", "text"]
        command = [sys.executable, "-m", "orca.cli.main", "operator", *IMAGES, *options, *self._options]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig), "PYTHONWARNINGS": "ignore"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Its exit status after SIGTERM."""
        self.send(signal.SIGTERM)
        return self.wait(30)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, within_s: float) -> int:
        """Its exit status. Raises: subprocess.TimeoutExpired while it lives."""
        assert self._process is not None
        return self._process.wait(within_s)
