"""NetworkPolicies of a deployment: the parts of the data path reach each other, clients the gateways, and that is all.

    clients -> gateways -> pool <- schedulers <-> stages <-> stages        operator -> pool
    Prometheus -> gateways, schedulers (metrics ports)                     all -> DNS
    operator -> fetches -> anywhere

The internal ports carry no keys, so this is what keeps them internal. Whether a policy has any effect is the network
plugin's: some enforce none.
"""

from collections.abc import Sequence

from orca.operator import names
from orca.operator.render import fetch, gateway, group, pool
from orca.operator.resource import Deployment, Json

_ANYBODY: Json = {}
_DNS = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
_OPERATOR = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "orca-operator"}}}


def policies(deployment: Deployment) -> list[Json]:
    """One for each role."""
    stage, scheduler, gateways = (_pods(deployment, role) for role in (group.STAGE, group.SCHEDULER, gateway.ROLE))
    redis = _pods(deployment, "pool")
    to_pool = _to_pool(deployment, redis)
    found = [
        _policy(
            deployment,
            gateway.ROLE,
            ingress=[_rule("from", _ANYBODY, gateway.PORT), _rule("from", _ANYBODY, gateway.METRICS_PORT)],
            egress=[to_pool],
        ),
        _policy(
            deployment,
            group.SCHEDULER,
            ingress=[_rule("from", stage, group.RENDEZVOUS_PORT), _rule("from", _ANYBODY, group.METRICS_PORT)],
            egress=[to_pool, _rule("to", stage)],
        ),
        # Ranks meet at ports that the system gives them.
        _policy(
            deployment,
            group.STAGE,
            ingress=[_rule("from", stage), _rule("from", scheduler)],
            egress=[_rule("to", stage), _rule("to", scheduler)],
        ),
    ]
    if deployment.spec.model.is_fetched:
        # Hubs and stores may be anywhere.
        told = [_rule("from", _OPERATOR, fetch.PORT)]
        found.append(_policy(deployment, fetch.ROLE, ingress=told, egress=[_ANYBODY]))
    if deployment.spec.pool.external is None:
        callers = [_rule("from", each, pool.PORT) for each in (gateways, scheduler, _OPERATOR)]
        found.append(_policy(deployment, "pool", ingress=callers, egress=[]))
    return found


def _policy(deployment: Deployment, role: str, *, ingress: Sequence[Json], egress: Sequence[Json]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": names.policy(deployment.name, role),
            "namespace": deployment.namespace,
            "labels": names.labels(deployment.name, role),
        },
        "spec": {
            "podSelector": _pods(deployment, role)["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(ingress),
            "egress": [*egress, _DNS],
        },
    }


def _to_pool(deployment: Deployment, redis: Json) -> Json:
    """An external pool may be anywhere, at any port: its address is in a Secret."""
    return _rule("to", redis, pool.PORT) if deployment.spec.pool.external is None else {}


def _rule(direction: str, peer: Json, port: int | None = None) -> Json:
    """Args: direction: `from` or `to`; port: None for every port."""
    rule: Json = {direction: [peer]} if peer else {}
    if port is not None:
        rule["ports"] = [{"protocol": "TCP", "port": port}]
    return rule


def _pods(deployment: Deployment, role: str) -> Json:
    """A peer: this deployment's pods of a role."""
    return {"podSelector": {"matchLabels": {names.DEPLOYMENT_LABEL: deployment.name, names.ROLE_LABEL: role}}}
