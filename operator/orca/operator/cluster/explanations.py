"""Reads that only explain something: Events of the cluster, and Gateways of the Gateway API.

An operator may lack the right to them, for example with roles that somebody else wrote. Then nothing is explained.
"""

from collections.abc import Callable, Iterable
from functools import partial

from orca.operator.cluster.api_calls import ApiCalls, ApiServerError
from orca.operator.domain.resource import Json, OrcaDeployment


def list_events(calls: ApiCalls, namespace: str, reasons: Iterable[str]) -> list[Json]:
    """Return the Events of a namespace with these reasons. Raises: ApiServerError if the API server does not answer."""
    found: list[Json] = []
    for reason in reasons:
        query = {"fieldSelector": f"reason={reason}"}
        path = f"/api/v1/namespaces/{namespace}/events"
        listed = _or_none(partial(calls.call, "GET", path, query=query))
        found += [] if listed is None else listed["items"]
    return found


def read_gateways(calls: ApiCalls, deployment: OrcaDeployment) -> dict[tuple[str, str], Json]:
    """Return the Gateways to which the route attaches, by namespace and name.

    Raises: ApiServerError if the API server does not answer.
    """
    route = deployment.spec.gateway.http_route
    parents = () if route is None else route.parent_refs
    found = {}
    for namespace, name in sorted({(each.get("namespace") or deployment.namespace, each["name"]) for each in parents}):
        path = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/gateways/{name}"
        gateway = _or_none(partial(calls.get, path))
        if gateway is not None:
            found[namespace, name] = gateway
    return found


def _or_none(call: Callable[[], Json | None]) -> Json | None:
    try:
        return call()
    except ApiServerError as error:
        if not error.is_refusal:
            raise
        return None
