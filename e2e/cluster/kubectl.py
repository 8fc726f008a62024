"""kubectl as the cluster's administrator, inside its network."""

import json
from typing import Any

from cluster.commands import run
from cluster.errors import ClusterError
from cluster.layout import Layout
from cluster.namespaces import entering
from cluster.programs import KUBERNETES


class Kubectl:
    """`kubectl("get", "pods")` -> what it wrote."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, *words: str, entered: str | None = None, within_s: float = 60.0) -> str:
        """Raises: ClusterError with what it said, when it fails."""
        command = (str(KUBERNETES.folder / "kubectl"), f"--kubeconfig={self.layout.kubeconfig}")
        enter = entering(self.layout.first_node, mounts=False)
        return run(*enter, *command, *words, entered=entered, within_s=within_s)

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
