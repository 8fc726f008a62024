"""kubectl: as the administrator of the cluster of this package, inside its network, or by a context of a kubeconfig."""

import json
from abc import ABC, abstractmethod
from typing import Any

from cluster.machine.commands import run
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout
from cluster.machine.namespaces import entering
from cluster.programs.go_programs import KUBERNETES


class Kubectl(ABC):
    """`kubectl("get", "pods")` -> what it wrote."""

    def __call__(self, *words: str, entered: str | None = None, within_s: float = 60.0) -> str:
        """Raises: ClusterError with what it said, when it fails."""
        return run(*self._command(), *words, entered=entered, within_s=within_s)

    @abstractmethod
    def _command(self) -> tuple[str, ...]:
        """The words before those that are asked for."""

    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a list of objects under `items`."""
        found: dict[str, Any] = json.loads(self("get", "--output=json", *words))
        return found

    def apply(self, objects: list[dict[str, Any]]) -> None:
        """Make the cluster have these objects, whatever it has now."""
        content = {"apiVersion": "v1", "kind": "List", "items": objects}
        self("apply", "--server-side", "--force-conflicts", "--filename=-", entered=json.dumps(content))

    def is_ready(self) -> bool:
        """Whether the API server answers and all that it needs is there."""
        try:
            self("get", "--raw=/readyz", "--request-timeout=2s", within_s=10)
        except ClusterError:
            return False
        return True


class OwnKubectl(Kubectl):
    """Of a cluster that runs."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def _command(self) -> tuple[str, ...]:
        enter = entering(self._layout.first_node, mounts=False)
        return (*enter, str(KUBERNETES.folder / "kubectl"), f"--kubeconfig={self._layout.kubeconfig}")


class ContextKubectl(Kubectl):
    """That on the PATH, with the kubeconfig that it finds by itself."""

    def __init__(self, context: str) -> None:
        self._context = context

    def _command(self) -> tuple[str, ...]:
        return ("kubectl", f"--context={self._context}")
