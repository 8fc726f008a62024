"""Runs kubectl: as the administrator of this package's cluster, in its network, or with a context of a kubeconfig."""

import json
from abc import ABC, abstractmethod
from typing import Any

from cluster.machine.commands import run
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout
from cluster.machine.namespaces import enter_command
from cluster.programs.go_programs import KUBERNETES


class Kubectl(ABC):
    """A kubectl command: `kubectl("get", "pods")` returns its output."""

    def __call__(self, *words: str, standard_input: str | None = None, within_s: float = 60.0) -> str:
        """Run kubectl and return its output. Raises: ClusterError with its errors, if it fails."""
        return run(*self._command(), *words, standard_input=standard_input, within_s=within_s)

    @abstractmethod
    def _command(self) -> tuple[str, ...]:
        """Return the command before the given arguments."""

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object, or a list of objects in `items`."""
        found: dict[str, Any] = json.loads(self("get", "--output=json", *words))
        return found

    def apply(self, objects: list[dict[str, Any]]) -> None:
        """Create or change these objects in the cluster."""
        content = {"apiVersion": "v1", "kind": "List", "items": objects}
        self("apply", "--server-side", "--force-conflicts", "--filename=-", standard_input=json.dumps(content))

    def is_ready(self) -> bool:
        """Does the API server answer that it is ready?"""
        try:
            self("get", "--raw=/readyz", "--request-timeout=2s", within_s=10)
        except ClusterError:
            return False
        return True


class OwnKubectl(Kubectl):
    """kubectl for the running cluster of this package."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def _command(self) -> tuple[str, ...]:
        enter = enter_command(self._layout.first_node, mounts=False)
        return (*enter, str(KUBERNETES.folder / "kubectl"), f"--kubeconfig={self._layout.kubeconfig}")


class ContextKubectl(Kubectl):
    """The kubectl on the PATH, with a context of its default kubeconfig."""

    def __init__(self, context: str) -> None:
        self._context = context

    def _command(self) -> tuple[str, ...]:
        return ("kubectl", f"--context={self._context}")
