"""Nodes that are only objects, with a fake kubelet: it reports that each pod runs, or what a test wants.

The real controllers make the pods and the real scheduler gives them their nodes, so what the operator sees is what it
sees in a cluster, without a container.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from support.operator.api_server import ApiServer

POLL_S = 0.1
NOW = "2026-01-01T00:00:00Z"

Json = dict[str, Any]
Says = Callable[[Any], Json | None]
"""A function from a pod to the status of its container, with its phase if it has ended; None means ready."""


def running(pod: Any) -> None:
    """Report that every pod runs."""


class FakeNodes:
    """Simulated nodes and their kubelet: `with FakeNodes(server, {"a": {"nvidia.com/gpu": "2"}}) as nodes`."""

    def __init__(self, server: ApiServer, nodes: Mapping[str, Mapping[str, str]]) -> None:
        """Args: nodes: what each has beside processors and memory."""
        self._core = client.CoreV1Api(server.api())
        self._nodes = nodes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.says: Says = running

    def __enter__(self) -> "FakeNodes":
        for name, resources in self._nodes.items():
            self.add(name, resources)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for name in self._nodes:
            self._core.delete_node(name)

    def add(self, name: str, resources: Mapping[str, str]) -> None:
        self._core.create_node({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        has = {"cpu": "64", "memory": "256Gi", "pods": "200", **resources}
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": NOW, "lastTransitionTime": NOW}
        status = {"capacity": has, "allocatable": has, "conditions": [{**ready, "reason": "Paper", "message": ""}]}
        self._core.patch_node_status(name, {"status": status})

    def _run(self) -> None:
        while not self._is_over.wait(POLL_S):
            # A busy API server may refuse or drop any call; the next round makes it again.
            with contextlib.suppress(client.ApiException, HTTPError):
                for pod in self._core.list_pod_for_all_namespaces().items:
                    with contextlib.suppress(client.ApiException):
                        self._sync(pod)

    def _sync(self, pod: Any) -> None:
        if pod.spec.node_name is None:
            return
        name, namespace = pod.metadata.name, pod.metadata.namespace
        if pod.metadata.deletion_timestamp is not None:
            self._core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
            return
        if pod.status.phase in ("Succeeded", "Failed"):
            return
        said = self.says(pod)
        phase = "Running"
        if said is not None and "phase" in said:
            phase, said = said["phase"], {key: value for key, value in said.items() if key != "phase"}
        state = {"state": {"running": {"startedAt": NOW}}, "restartCount": 0, **(said or {})}
        is_ready = str(said is None)
        container = {"name": pod.spec.containers[0].name, "image": "x", "imageID": "", "ready": said is None, **state}
        # What serves does so since now; of what does not, nobody waits for its time to be over.
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if said is None else NOW
        conditions = [
            {"type": kind, "status": is_ready, "lastTransitionTime": since} for kind in ("Ready", "ContainersReady")
        ]
        known = pod.status.container_statuses
        if known and known[0].ready == (said is None) and pod.status.phase == "Running" and said is None:
            return
        status = {"phase": phase, "conditions": conditions, "containerStatuses": [container], "podIP": "192.0.2.1"}
        self._core.patch_namespaced_pod_status(name, namespace, {"status": status})
