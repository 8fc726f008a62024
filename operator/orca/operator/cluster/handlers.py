"""What the operator hears of the cluster, through kopf: each event only names a resource that has to be looked at.

kopf keeps the watches alive. Its handlers for creation, change and deletion are not used: they would need finalizers,
so that nobody could delete a resource while the operator is gone, and annotations to remember their progress. What a
resource leaves behind ends by owner references.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from orca.operator.domain import names
from orca.operator.domain.resource import GROUP, PLURAL, VERSION

Seen = Callable[[str, str], Awaitable[None]]
"""Gets namespace and name of an OrcaDeployment of which there is news."""

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


def make_registry(seen: Seen) -> kopf.OperatorRegistry:
    """Handlers for the resource and for its children."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**of: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**of) or kopf.login_with_kubeconfig(**of)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_resource(
        event: Any, namespace: str | None, name: str | None, meta: Any, status: Any, **_: Any
    ) -> None:
        # Our own words in its status are no news.
        is_answered = status.get("observedGeneration") == meta.get("generation")
        if event["type"] != "MODIFIED" or not is_answered or meta.get("deletionTimestamp"):
            await seen(str(namespace), str(name))

    async def on_child(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        await seen(str(namespace), str(labels[names.DEPLOYMENT_LABEL]))

    for group, version, plural in CHILDREN:
        watched = kopf.on.event(
            group, version, plural, id=plural, labels={names.DEPLOYMENT_LABEL: kopf.PRESENT}, registry=registry
        )
        watched(on_child)
    return registry


def make_settings(*, is_namespaced: bool) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # Conditions and Events of our own say what happens, in words that stay.
    settings.posting.enabled = False
    # Without rights for the whole cluster, what there is cannot be watched.
    settings.scanning.disabled = is_namespaced
    # A watch whose connection died in silence is noticed by its end.
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 300
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    # The labels that handlers name are looked at here, behind a list of all there is: 10,000 pods of others took
    # 597 MB, beyond the chart's limit, and take 85 when the API server sends only what is marked.
    for kind in CHILDREN:
        settings.watching.label_selectors[kind] = names.DEPLOYMENT_LABEL
    return settings
