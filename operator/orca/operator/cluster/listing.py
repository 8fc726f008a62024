"""Lists all resources and nodes again and again: so lost nodes are seen, what a dead watch has missed is found, and it
shows that the API server is heard."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain.observed import condition

Key = tuple[str, str]
"""Namespace and name of an OrcaDeployment."""

LIST_S = 30.0
"""Most seconds between two lists, however seldom all resources are looked at: a lost node is not to wait for that, and
who has heard nothing for longer is taken for deaf (service.py, OrcaOperatorDeaf)."""


@dataclass(frozen=True, slots=True)
class Listed:
    uids: frozenset[str]  # of all resources
    due: tuple[Key, ...]  # to be looked at, though nothing was heard of them


class Listing:
    """Of some namespaces, or of the whole cluster."""

    def __init__(
        self, cluster: Cluster, namespaces: Sequence[str], *, resync_s: float, clock: Callable[[], float]
    ) -> None:
        """Args: resync_s: all are due after so long. clock: seconds; only differences count."""
        self._cluster = cluster
        self._namespaces = namespaces
        self._resync_s = resync_s
        self._clock = clock
        self._were_due_s = -math.inf
        self.lost_nodes: frozenset[str] = frozenset()
        self.every_s = resync_s / math.ceil(resync_s / LIST_S)

    def list(self) -> Listed:
        """All are due also when a node is lost, or back. Raises: ApiError."""
        found = [each["metadata"] for each in self._cluster.deployments(self._namespaces)]
        uids = frozenset(each["uid"] for each in found)
        lost, now_s = self._find_lost_nodes(), self._clock()
        if lost == self.lost_nodes and now_s - self._were_due_s < self._resync_s:
            return Listed(uids, due=())
        self.lost_nodes, self._were_due_s = lost, now_s
        return Listed(uids, due=tuple((each["namespace"], each["name"]) for each in found))

    def _find_lost_nodes(self) -> frozenset[str]:
        """Those that the cluster has not heard of for a while; who serves single namespaces may not see nodes."""
        nodes = [] if self._namespaces else self._cluster.nodes()
        return frozenset(node["metadata"]["name"] for node in nodes if condition(node, "Ready") != "True")
