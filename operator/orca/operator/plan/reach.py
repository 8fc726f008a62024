"""The way of clients to the gateways: whether the Ingress, the route or the load balancer serves, and the URL. Pure.

Pods that run are not enough. A Gateway may refuse the HTTPRoute, nobody may serve an Ingress of this class or make a
load balancer, and the Secret with the certificate may be missing. The cluster says so in the status of these objects.
"""

from collections.abc import Mapping
from typing import Any

from orca.operator.domain import names, problems
from orca.operator.domain.objects import condition, seconds
from orca.operator.domain.observation import Observation
from orca.operator.domain.problems import Problem
from orca.operator.domain.resource import Json, OrcaDeployment

STARTING = "RouteStarting"
ROUTE_REFUSED = "RouteNotAccepted"
NO_ADDRESS = "IngressWithoutAddress"
GATEWAY_DOWN = "GatewayNotProgrammed"
NO_LOAD_BALANCER = "LoadBalancerWithoutAddress"

PATIENCE_S = 60.0
"""An Ingress, a route or a Service that was written later is on its way: its controller has to notice it, and may have
to order a load balancer."""

_LOAD_BALANCER = "LoadBalancer"
_TLS_KEYS = ("tls.crt", "tls.key")
_TLS_PROTOCOLS = frozenset({"HTTPS", "TLS"})


def find_problem(observation: Observation) -> Problem | None:
    """Return why no client can come from outside; None if clients can, or if the spec asks for no such way."""
    gateway, name = observation.spec.gateway, observation.name
    found, kind = None, "Ingress"
    if gateway.ingress is not None:
        found = _problem_of_ingress(observation)
    elif gateway.http_route is not None:
        found, kind = _problem_of_route(observation), "HTTPRoute"
    elif gateway.service.type == _LOAD_BALANCER:
        found, kind = _problem_of_load_balancer(observation), "Service"
    there = observation.children.get(kind, name)
    if found is None or there is None:
        return found
    is_young = observation.now_s - _written_s(there) < PATIENCE_S
    return Problem(STARTING, found.message) if is_young else found


def find_refused_parent(observation: Observation) -> Problem | None:
    """Return why one of several Gateways does not serve the route; None if all do."""
    if observation.spec.gateway.http_route is None or observation.children.get("HTTPRoute", observation.name) is None:
        return None
    return next((found for found in _parent_problems(observation) if found is not None), None)


def url(observation: Observation) -> str:
    """Return where clients reach the API now: from outside if that works, otherwise inside the cluster."""
    deployment = observation.deployment
    if find_problem(observation) is not None:
        return _inside(deployment)
    ingress, route = deployment.spec.gateway.ingress, deployment.spec.gateway.http_route
    if ingress is not None and ingress.host is not None:
        return f"{'https' if ingress.tls_secret_name else 'http'}://{ingress.host}/v1"
    if route is not None and route.hostnames:
        return f"{_route_scheme(observation)}://{route.hostnames[0]}/v1"
    if ingress is None and route is None and (address := _load_balancer_address(observation)) is not None:
        return f"http://{address}/v1"
    return _inside(deployment)


def _written_s(there: Json) -> float:
    """Return when the operator has last written an object. A Service may be old when it becomes a load balancer."""
    written = [each for each in there["metadata"].get("managedFields") or [] if each.get("manager") == names.MANAGER]
    times = [each["time"] for each in written if "time" in each]
    return max(map(seconds, [there["metadata"]["creationTimestamp"], *times]))


def _load_balancer_address(observation: Observation) -> str | None:
    """Return the address of the load balancer, as a URL has it; None if there is none, or none is wanted."""
    there = observation.children.get("Service", observation.name)
    if there is None or observation.spec.gateway.service.type != _LOAD_BALANCER:
        return None
    for each in (there.get("status", {}).get("loadBalancer") or {}).get("ingress") or []:
        if each.get("hostname"):
            return str(each["hostname"])
        if each.get("ip"):
            return f"[{each['ip']}]" if ":" in each["ip"] else str(each["ip"])
    return None


def _inside(deployment: OrcaDeployment) -> str:
    return f"http://{deployment.name}.{deployment.namespace}.svc/v1"


def _problem_of_ingress(observation: Observation) -> Problem | None:
    name, ingress = observation.name, observation.spec.gateway.ingress
    assert ingress is not None
    there = observation.children.get("Ingress", name)
    if there is None:
        return Problem(STARTING, f"there is no Ingress {name} yet")
    if ingress.tls_secret_name is not None:
        secret, field = observation.tls_secret, "gateway.ingress.tlsSecretName"
        missing = problems.of_secret(ingress.tls_secret_name, secret, _TLS_KEYS, field=field, names_keys=False)
        if missing is not None:
            return missing
    if ingress.wait_for_address and not (there.get("status", {}).get("loadBalancer") or {}).get("ingress"):
        of_class = f"of the class {ingress.class_name}" if ingress.class_name else "of the default class"
        return Problem(
            NO_ADDRESS,
            f"no controller {of_class} has given the Ingress {name} an address; if yours gives none, set"
            " gateway.ingress.waitForAddress to false",
        )
    return None


def _problem_of_load_balancer(observation: Observation) -> Problem | None:
    if _load_balancer_address(observation) is not None:
        return None
    chosen = observation.spec.gateway.service.load_balancer_class
    of_class = f"of the class {chosen}" if chosen else "of this cluster"
    message = f"no load balancer {of_class} has given the Service {observation.name} an address"
    return Problem(NO_LOAD_BALANCER, message)


def _problem_of_route(observation: Observation) -> Problem | None:
    """Return the problem of the first Gateway, unless another one serves the route."""
    if observation.children.get("HTTPRoute", observation.name) is None:
        return Problem(STARTING, f"there is no HTTPRoute {observation.name} yet")
    found = _parent_problems(observation)
    return None if None in found else next(iter(found))


def _parent_problems(observation: Observation) -> list[Problem | None]:
    """Return the problem of each Gateway that the spec names; None for one that serves the route."""
    route = observation.spec.gateway.http_route
    there = observation.children.get("HTTPRoute", observation.name)
    assert route is not None
    assert there is not None
    return [_problem_of_parent(observation, parent, there) for parent in route.parent_refs]


def _problem_of_parent(observation: Observation, parent: Mapping[str, Any], there: Json) -> Problem | None:
    name, namespace = parent["name"], observation.deployment.namespace
    entries = [
        each
        for each in there.get("status", {}).get("parents") or []
        if _is_about(each.get("parentRef") or {}, parent, namespace)
    ]
    if not entries:
        why = "there is none of this name, or no controller runs it"
        return Problem(ROUTE_REFUSED, f"no Gateway {name} has taken up the HTTPRoute {observation.name}: {why}")
    for entry in entries:
        found = _refusal_of(entry, there["metadata"].get("generation", 0))
        if found is None:
            break
    else:
        return Problem(ROUTE_REFUSED, f"the Gateway {name} does not serve the HTTPRoute {observation.name}: {found}")
    gateway = observation.gateways.get((parent.get("namespace") or namespace, name))
    programmed = {} if gateway is None else condition(gateway, "Programmed")
    if programmed.get("status") == "False":
        return Problem(GATEWAY_DOWN, f"the Gateway {name} is not programmed: {programmed.get('message', '')}")
    return None


def _refusal_of(entry: Mapping[str, Any], generation: int) -> str | None:
    """Return why one controller does not serve the route; None if it does. Args: generation: of the route."""
    conditions = {each["type"]: each for each in entry.get("conditions") or []}
    for kind in ("Accepted", "ResolvedRefs"):
        # A controller may leave ResolvedRefs out, but says whether it has accepted the route.
        found = conditions.get(kind, {"status": "Unknown" if kind == "Accepted" else "True"})
        if found["status"] != "True":
            return f"{kind} is {found['status']}: {found.get('reason', '')} {found.get('message', '')}".rstrip(": ")
        if found.get("observedGeneration", generation) < generation:
            return "its controller has not seen the last change of the route"
    return None


def _is_about(entry: Mapping[str, Any], parent: Mapping[str, Any], namespace: str) -> bool:
    """Return whether an entry of the status is about a parent. Args: namespace: of the route, the default of both."""
    is_gateway = entry.get("name") == parent["name"] and (
        (entry.get("namespace") or namespace) == (parent.get("namespace") or namespace)
    )
    return is_gateway and parent.get("sectionName") in (None, entry.get("sectionName"))


def _route_scheme(observation: Observation) -> str:
    """Return https if a listener of the route has TLS; http if none has, and if the listeners are unknown.

    The port of a listener is not the clients' in every implementation: Traefik's is the one behind its Service.
    """
    route, namespace = observation.spec.gateway.http_route, observation.deployment.namespace
    assert route is not None
    protocols = {
        listener.get("protocol")
        for parent in route.parent_refs
        if (gateway := observation.gateways.get((parent.get("namespace") or namespace, parent["name"]))) is not None
        for listener in gateway["spec"].get("listeners") or []
        if parent.get("sectionName") in (None, listener.get("name"))
    }
    return "https" if protocols & _TLS_PROTOCOLS else "http"
