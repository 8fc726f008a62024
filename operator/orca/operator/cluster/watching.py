"""Handlers of watches through kopf, and regular lists: they name the resources to reconcile.

Every event only names a resource to reconcile. kopf keeps the watches alive. Its handlers for creation, change and
deletion are not used: they need finalizers, so nobody could delete a resource while the operator is gone, and
annotations to remember their progress. The children of a deleted resource end by owner references.

The lists notice lost nodes, find what a dead watch has missed, and show that the API server still answers.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Cluster
from orca.operator.domain import names
from orca.operator.domain.objects import condition_status
from orca.operator.domain.resource import GROUP, PLURAL, VERSION, Json

Key = tuple[str, str]
"""Namespace and name of an OrcaDeployment."""

OnChange = Callable[[str, str], Awaitable[None]]
"""Called with namespace and name of an OrcaDeployment that may have changed."""

CHILDREN = (
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("", "v1", "persistentvolumeclaims"),
    ("apps", "v1", "deployments"),
    ("apps", "v1", "statefulsets"),
    ("batch", "v1", "jobs"),
    ("networking.k8s.io", "v1", "ingresses"),
    ("policy", "v1", "poddisruptionbudgets"),
)

UNAUTHORIZED = 401
"""Status of credentials that have run out. All namespaces have the same, and a restart may read newer ones."""

LIST_S = 30.0
"""Most seconds between two lists, even if resources are due less often. A lost node must not wait for those, and an
operator that has heard nothing for longer counts as deaf (service.py, alert OrcaOperatorDeaf)."""


def make_registry(on_change: OnChange) -> kopf.OperatorRegistry:
    """Return kopf handlers for the resource and for its children."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**options: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**options) or kopf.login_with_kubeconfig(**options)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_resource(
        event: Any, namespace: str | None, name: str | None, meta: Any, status: Any, **_: Any
    ) -> None:
        if event["type"] != "MODIFIED" or is_news(meta, status):
            await on_change(str(namespace), str(name))

    async def on_child(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        await on_change(str(namespace), str(labels[names.DEPLOYMENT_LABEL]))

    for group, version, plural in CHILDREN:
        watched = kopf.on.event(
            group, version, plural, id=plural, labels={names.DEPLOYMENT_LABEL: kopf.PRESENT}, registry=registry
        )
        watched(on_child)
    return registry


def is_news(meta: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Return whether a change of a resource is a reason to reconcile. The operator's own writes to the status are none.

    An annotation that chooses another operator is one: the former has to release the resource, the other to take it.
    """
    is_answered = status.get("observedGeneration") == meta.get("generation")
    chosen = (meta.get("annotations") or {}).get(names.OPERATOR_ANNOTATION)
    is_as_chosen = chosen in (None, status.get(names.OPERATOR_FIELD))
    return not (is_answered and is_as_chosen) or bool(meta.get("deletionTimestamp"))


def make_settings(*, is_namespaced: bool) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # The operator's own conditions and Events say what happens, with stable reasons.
    settings.posting.enabled = False
    # Without rights for the whole cluster, kopf cannot watch which kinds exist.
    settings.scanning.disabled = is_namespaced
    # A watch whose connection died silently is noticed when its time ends.
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 300
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    # kopf applies the labels that handlers name only after it has listed everything: with 10,000 pods of others it used
    # 597 MB, beyond the chart's limit. It uses 85 MB when the API server sends only labelled objects.
    for kind in CHILDREN:
        settings.watching.label_selectors[kind] = names.DEPLOYMENT_LABEL
    return settings


@dataclass(frozen=True, slots=True)
class ListedResources:
    uids: frozenset[str]  # of all resources
    due: tuple[Key, ...]  # to reconcile, though no event named them
    served: tuple[str | None, ...]  # namespaces that the API server lists; None stands for the whole cluster
    refused: Mapping[str, str]  # namespaces that it does not list, with its words


class ResourceLists:
    """Regular lists of resources and nodes, of some namespaces or of the whole cluster."""

    def __init__(
        self, cluster: Cluster, namespaces: Sequence[str], *, resync_s: float, clock: Callable[[], float]
    ) -> None:
        """Args: resync_s: all resources are due this often. clock: seconds; only differences count."""
        self._cluster = cluster
        self._namespaces = namespaces
        self._resync_s = resync_s
        self._clock = clock
        self._were_due_s = -math.inf
        self._served: tuple[str | None, ...] = ()
        self.lost_nodes: frozenset[str] = frozenset()
        self.every_s = resync_s / math.ceil(resync_s / LIST_S)

    def list(self) -> ListedResources:
        """List once. All resources are due also when a node is lost or back, and when a namespace comes.

        Raises: ApiServerError if the API server does not answer. Its refusal of one namespace is no error: such a
            namespace may be deleted, and its Role with it, while the others are served.
        """
        found, served, refused = self._list_namespaces()
        uids = frozenset(each["uid"] for each in found)
        lost, now_s = self._find_lost_nodes(), self._clock()
        is_at_rest = lost == self.lost_nodes and set(served) <= set(self._served)
        self._served = served
        if is_at_rest and now_s - self._were_due_s < self._resync_s:
            return ListedResources(uids, due=(), served=served, refused=refused)
        self.lost_nodes, self._were_due_s = lost, now_s
        due = tuple((each["namespace"], each["name"]) for each in found)
        return ListedResources(uids, due=due, served=served, refused=refused)

    def _list_namespaces(self) -> tuple[Sequence[Json], tuple[str | None, ...], Mapping[str, str]]:
        """Return the metadata of all resources, the namespaces with an answer, and the others with the reason."""
        if not self._namespaces:
            return [each["metadata"] for each in self._cluster.deployments(None)], (None,), {}
        found: MutableSequence[Json] = []
        refused: dict[str, str] = {}
        failure: ApiServerError | None = None
        for namespace in self._namespaces:
            try:
                found += [each["metadata"] for each in self._cluster.deployments(namespace)]
            except ApiServerError as error:
                if not error.is_answer or error.status == UNAUTHORIZED:
                    raise
                refused[namespace] = str(error)
                failure = failure if error.is_refusal else error
        served = tuple(each for each in self._namespaces if each not in refused)
        if failure is not None and not served:
            raise failure
        return found, served, refused

    def _find_lost_nodes(self) -> frozenset[str]:
        """Return the nodes that the cluster has not heard from for a while.

        An operator that serves single namespaces may not see nodes.
        """
        nodes = [] if self._namespaces else self._cluster.nodes()
        return frozenset(node["metadata"]["name"] for node in nodes if condition_status(node, "Ready") != "True")
