"""NetworkPolicies of a deployment: parts of the data path reach each other, clients reach the gateways, no more.

    clients -> gateways -> pool <- schedulers <-> stages <-> stages        operator -> pool
    Prometheus -> gateways, schedulers (metrics ports)                     all -> DNS
    operator -> fetches -> anywhere                profiles, plans, checks -> pool

The internal ports ask for no keys, so only these policies keep them internal. Some network plugins enforce no policy.

Stages in the network of their nodes (worker.hostNetwork) have the addresses of the nodes and no policy: no selector
matches them. Schedulers then accept connections to their rendezvous from anybody and may call the stages' port at any
address, so the network between the nodes must be closed.
"""

from collections.abc import Iterable, Sequence

from orca.operator.domain import names
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.render import fetch, gateway, group, pool
from orca.operator.render.objects import metadata, selector

_ANYBODY: Json = {}
_OPERATOR = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "orca-operator"}}}


def policies(
    deployment: OrcaDeployment, stages: Iterable[Json] = (), *, dns_ports: Sequence[int] = (53,)
) -> list[Json]:
    """Render one policy for each role whose pods can be selected.

    Args:
        stages: pod specs of the stages that exist; those of old groups may be in the other network.
        dns_ports: ports of the pods behind the cluster's DNS. Plugins judge a call after its address was translated.
    """
    dns = {"ports": [{"protocol": protocol, "port": port} for port in dns_ports for protocol in ("UDP", "TCP")]}
    return [_with_egress(each, dns) for each in _policies(deployment, stages)]


def _with_egress(policy: Json, rule: Json) -> Json:
    """Return a policy that also allows calls by this rule."""
    return {**policy, "spec": {**policy["spec"], "egress": [*policy["spec"]["egress"], rule]}}


def _policies(deployment: OrcaDeployment, stages: Iterable[Json]) -> list[Json]:
    """Render the policies without the calls that all pods make."""
    scheduler, gateways = (_pods(deployment, role) for role in (names.SCHEDULER, names.GATEWAY))
    networks = {deployment.spec.worker.host_network, *(bool(each.get("hostNetwork")) for each in stages)}
    is_on_nodes = True in networks
    stage = _ANYBODY if is_on_nodes else _pods(deployment, names.STAGE)
    redis = _pods(deployment, names.POOL)
    to_pool = _to_pool(deployment, redis)
    found = [
        _policy(
            deployment,
            names.GATEWAY,
            ingress=[_rule("from", _ANYBODY, gateway.PORT), _rule("from", _ANYBODY, gateway.METRICS_PORT)],
            egress=[to_pool],
        ),
        _policy(
            deployment,
            names.SCHEDULER,
            ingress=[_rule("from", stage, group.RENDEZVOUS_PORT), _rule("from", _ANYBODY, group.METRICS_PORT)],
            egress=[to_pool, _rule("to", stage, group.STAGE_PORT if is_on_nodes else None)],
        ),
    ]
    if False in networks:
        # Ranks connect to each other at ports that the kernel chooses.
        peers = (_pods(deployment, names.STAGE), scheduler)
        ingress, egress = ([_rule(direction, peer) for peer in peers] for direction in ("from", "to"))
        found.append(_policy(deployment, names.STAGE, ingress=ingress, egress=egress))
    if deployment.spec.model.is_fetched:
        # Hubs and stores may be anywhere.
        polls = [_rule("from", _OPERATOR, fetch.PORT)]
        found.append(_policy(deployment, names.FETCH, ingress=polls, egress=[_ANYBODY]))
    jobs = (names.PROFILE, names.PLAN, names.FOLLOW) if deployment.spec.slo is not None else ()
    found += [_policy(deployment, role, ingress=[], egress=[to_pool]) for role in jobs]
    if deployment.spec.pool.external is None:
        parts = (gateways, scheduler, *(_pods(deployment, role) for role in jobs), _OPERATOR)
        callers = [_rule("from", each, pool.PORT) for each in parts]
        found.append(_policy(deployment, names.POOL, ingress=callers, egress=[]))
    return found


def _policy(deployment: OrcaDeployment, role: str, *, ingress: Sequence[Json], egress: Sequence[Json]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(deployment, names.policy(deployment.name, role), role),
        "spec": {
            "podSelector": _pods(deployment, role)["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(ingress),
            "egress": list(egress),
        },
    }


def _to_pool(deployment: OrcaDeployment, redis: Json) -> Json:
    """Return the rule to the pool. An external pool may be anywhere, at any port: its address is in a Secret."""
    return _rule("to", redis, pool.PORT) if deployment.spec.pool.external is None else {}


def _rule(direction: str, peer: Json, port: int | None = None) -> Json:
    """Args: direction: `from` or `to`. port: None for every port."""
    rule: Json = {direction: [peer]} if peer else {}
    if port is not None:
        rule["ports"] = [{"protocol": "TCP", "port": port}]
    return rule


def _pods(deployment: OrcaDeployment, role: str) -> Json:
    """Return a peer: this deployment's pods of a role."""
    return {"podSelector": {"matchLabels": selector(deployment, role)}}
