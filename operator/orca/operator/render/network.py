"""NetworkPolicies of a deployment: the parts of the data path reach each other, clients the gateways, and that is all.

    clients -> gateways -> pool <- schedulers <-> stages <-> stages        operator -> pool
    Prometheus -> gateways, schedulers (metrics ports)                     all -> DNS
    operator -> fetches -> anywhere

The internal ports carry no keys, so this is what keeps them internal. Whether a policy has any effect is the network
plugin's: some enforce none.

Stages in the network of their nodes (worker.hostNetwork) have the addresses of nodes and no policy: no selector finds
them. Schedulers then let anybody to their rendezvous and call any address at the stages' port, and it is the network
between the nodes that has to be closed.
"""

from collections.abc import Iterable, Sequence

from orca.operator.domain import names
from orca.operator.domain.resource import Deployment, Json
from orca.operator.render import fetch, gateway, group, pool
from orca.operator.render.objects import metadata, selector

_ANYBODY: Json = {}
_DNS = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
_OPERATOR = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "orca-operator"}}}


def policies(deployment: Deployment, stages: Iterable[Json] = ()) -> list[Json]:
    """One for each role whose pods can be selected.

    Args: stages: specs of the stage pods that are there, of which those of before may be in the other network.
    """
    scheduler, gateways = (_pods(deployment, role) for role in (group.SCHEDULER, gateway.ROLE))
    networks = {deployment.spec.worker.host_network, *(bool(each.get("hostNetwork")) for each in stages)}
    is_on_nodes = True in networks
    stage = _ANYBODY if is_on_nodes else _pods(deployment, group.STAGE)
    redis = _pods(deployment, pool.ROLE)
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
            egress=[to_pool, _rule("to", stage, group.STAGE_PORT if is_on_nodes else None)],
        ),
    ]
    if False in networks:
        # Ranks meet at ports that the system gives them.
        peers = (_pods(deployment, group.STAGE), scheduler)
        met = [[_rule(direction, peer) for peer in peers] for direction in ("from", "to")]
        found.append(_policy(deployment, group.STAGE, ingress=met[0], egress=met[1]))
    if deployment.spec.model.is_fetched:
        # Hubs and stores may be anywhere.
        told = [_rule("from", _OPERATOR, fetch.PORT)]
        found.append(_policy(deployment, fetch.ROLE, ingress=told, egress=[_ANYBODY]))
    if deployment.spec.pool.external is None:
        callers = [_rule("from", each, pool.PORT) for each in (gateways, scheduler, _OPERATOR)]
        found.append(_policy(deployment, pool.ROLE, ingress=callers, egress=[]))
    return found


def _policy(deployment: Deployment, role: str, *, ingress: Sequence[Json], egress: Sequence[Json]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(deployment, names.policy(deployment.name, role), role),
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
    return {"podSelector": {"matchLabels": selector(deployment, role)}}
