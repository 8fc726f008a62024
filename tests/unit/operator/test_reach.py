"""Ready means that a client reaches the gateways: through the Ingress or the route that the spec asks for."""

from dataclasses import replace
from typing import Any

import pytest

from orca.operator.domain.observation import Observation
from orca.operator.domain.resource import Json
from orca.operator.plan import status
from orca.operator.plan.plan import make_plan
from support.operator.clusters import BORN_S, FakeCluster
from support.operator.deployments import deployment

INSIDE = "http://shop.ns.svc/v1"
ADDRESS = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
SECRET = {"data": {"tls.crt": "", "tls.key": ""}}


def serving(gateway: Json, kind: str, of: Json | None = None, *, age_s: float = 100) -> Observation:
    """Pods serve. Args: of: status of the Ingress or route. age_s: of everything."""
    cluster = FakeCluster(deployment(gateway=gateway))
    cluster.settle()
    cluster.objects[kind, "shop"]["status"] = of or {}
    cluster.now_s = BORN_S + age_s
    return cluster.observed


def told(observation: Observation) -> tuple[dict[str, tuple[str, str, str]], str]:
    """Conditions by type, and the URL."""
    found = status.make_status(observation, make_plan(observation), {})
    return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found["conditions"]}, found[
        "url"
    ]


def ingress(of: Json | None = None, *, age_s: float = 100, **fields: Any) -> Observation:
    return serving({"ingress": {"host": "a.example", **fields}}, "Ingress", of, age_s=age_s)


def test_an_ingress_with_an_address_is_reached() -> None:
    found, url = told(ingress(ADDRESS))
    assert (found["Ready"][:2], url) == (("True", "Serving"), "http://a.example/v1")


def test_an_ingress_that_nobody_serves_is_not_ready_and_gives_no_dead_url() -> None:
    found, url = told(ingress({"loadBalancer": {}}, className="no-such-class"))
    assert found["GatewayReady"][:2] == ("False", "IngressWithoutAddress")
    assert "no-such-class" in found["GatewayReady"][2]
    assert (found["Ready"][0], found["Degraded"][0], url) == ("False", "True", INSIDE)


def test_a_young_ingress_is_on_its_way() -> None:
    found, _ = told(ingress(age_s=30))
    assert found["GatewayReady"][:2] == ("False", "RouteStarting")
    assert (found["Ready"][0], found["Progressing"][0], found["Degraded"][0]) == ("False", "True", "False")


def test_a_controller_that_gives_no_address_can_be_believed() -> None:
    found, url = told(ingress(waitForAddress=False))
    assert (found["Ready"][0], url) == ("True", "http://a.example/v1")


@pytest.mark.parametrize("secret", [None, {}, {"data": {"tls.crt": ""}}])
def test_a_certificate_that_is_missing_is_named(secret: Json | None) -> None:
    seen = ingress(ADDRESS, tlsSecretName="cert")
    found, url = told(replace(seen, tls_secret=secret))
    assert (found["GatewayReady"][1], "Secret cert" in found["GatewayReady"][2]) == ("SecretMissing", True)
    assert url == INSIDE
    found, url = told(replace(seen, tls_secret=SECRET))
    assert (found["Ready"][0], url) == ("True", "https://a.example/v1")


def balanced(of: Json | None = None, *, age_s: float = 100, **fields: Any) -> Observation:
    return serving({"service": {"type": "LoadBalancer", **fields}}, "Service", of, age_s=age_s)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ({"ip": "192.0.2.1"}, "http://192.0.2.1/v1"),
        ({"ip": "2001:db8::1"}, "http://[2001:db8::1]/v1"),
        ({"hostname": "lb.example"}, "http://lb.example/v1"),
    ],
)
def test_a_load_balancer_is_reached_at_its_address(address: Json, url: str) -> None:
    found, shown = told(balanced({"loadBalancer": {"ingress": [address]}}))
    assert (found["Ready"][:2], shown) == (("True", "Serving"), url)


@pytest.mark.parametrize("of", [{}, {"loadBalancer": {}}, {"loadBalancer": {"ingress": [{}]}}])
def test_a_load_balancer_without_an_address_is_not_ready(of: Json) -> None:
    found, url = told(balanced(of, loadBalancerClass="nobody"))
    assert found["GatewayReady"][:2] == ("False", "LoadBalancerWithoutAddress")
    assert "of the class nobody" in found["GatewayReady"][2]
    assert (found["Ready"][0], found["Degraded"][0], url) == ("False", "True", INSIDE)


def test_an_old_service_that_becomes_a_load_balancer_is_on_its_way() -> None:
    cluster = FakeCluster(deployment())
    cluster.settle()
    cluster.now_s = BORN_S + 3600
    cluster.deployment = deployment(generation=2, gateway={"service": {"type": "LoadBalancer"}})
    cluster.settle()
    found, _ = told(cluster.observed)
    assert (found["GatewayReady"][1], found["Degraded"][0]) == ("RouteStarting", "False")


def test_the_ingress_decides_where_there_is_a_load_balancer_too() -> None:
    both = {"ingress": {"host": "a.example"}, "service": {"type": "LoadBalancer"}}
    found, url = told(serving(both, "Ingress", ADDRESS))
    assert (found["Ready"][0], url) == ("True", "http://a.example/v1")


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort"])
def test_the_url_of_other_services_is_that_inside_the_cluster(kind: str) -> None:
    found, url = told(serving({"service": {"type": kind}}, "Service"))
    assert (found["Ready"][0], url) == ("True", INSIDE)


def parent(accepted: str = "True", resolved: str | None = "True", **reference: Any) -> Json:
    conditions = [{"type": "Accepted", "status": accepted, "reason": "NoMatch", "message": "so it is"}]
    if resolved is not None:
        conditions.append({"type": "ResolvedRefs", "status": resolved, "reason": "BackendNotFound", "message": "so"})
    return {"parentRef": {"name": "edge", **reference}, "conditions": conditions, "controllerName": "c"}


def route(*parents: Json, references: list[Json] | None = None, age_s: float = 100) -> Observation:
    fields = {"parentRefs": references or [{"name": "edge"}], "hostnames": ["a.example"]}
    return serving({"httpRoute": fields}, "HTTPRoute", {"parents": list(parents)}, age_s=age_s)


@pytest.mark.parametrize(
    "entry", [parent(), parent(namespace="ns"), parent(resolved=None)], ids=["", "its own namespace", "few words"]
)
def test_a_route_that_a_gateway_accepts_is_reached(entry: Json) -> None:
    found, url = told(route(entry))
    assert (found["Ready"][:2], url) == (("True", "Serving"), "http://a.example/v1")


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([], "no Gateway edge has taken up the HTTPRoute shop"),
        ([parent(name="another")], "no Gateway edge has taken up"),
        ([parent(namespace="elsewhere")], "no Gateway edge has taken up"),
        ([parent(accepted="False")], "Accepted is False: NoMatch so it is"),
        ([parent(accepted="Unknown")], "Accepted is Unknown"),
        ([parent(resolved="False")], "ResolvedRefs is False: BackendNotFound so"),
        ([{"parentRef": {"name": "edge"}}], "Accepted is Unknown"),
    ],
)
def test_a_route_that_no_gateway_serves_is_not_ready_and_says_why(entries: list[Json], why: str) -> None:
    found, url = told(route(*entries))
    assert found["GatewayReady"][:2] == ("False", "RouteNotAccepted")
    assert why in found["GatewayReady"][2]
    assert (found["Ready"][0], found["Degraded"][0], url) == ("False", "True", INSIDE)
    assert told(route(*entries, age_s=30))[0]["GatewayReady"][1] == "RouteStarting"


def test_what_a_controller_said_of_the_route_before_does_not_count() -> None:
    entry = parent()
    entry["conditions"][0]["observedGeneration"] = 0
    assert told(route(entry))[0]["GatewayReady"][1] == "RouteNotAccepted"


def test_one_of_two_gateways_is_enough_to_be_ready_and_the_other_is_told() -> None:
    two = [{"name": "edge"}, {"name": "inner"}]
    found, url = told(route(parent(), parent(name="inner", accepted="False"), references=two))
    assert (found["Ready"][0], url) == ("True", "http://a.example/v1")
    assert found["Degraded"][:2] == ("True", "RouteNotAccepted")
    assert "inner" in found["Degraded"][2]


def edge(*listeners: Json, programmed: str = "True") -> dict[tuple[str, str], Json]:
    condition = {"type": "Programmed", "status": programmed, "message": "no address"}
    return {("ns", "edge"): {"spec": {"listeners": list(listeners)}, "status": {"conditions": [condition]}}}


def test_a_gateway_that_is_not_programmed_serves_nobody() -> None:
    found, _ = told(replace(route(parent()), gateways=edge(programmed="False")))
    assert (found["GatewayReady"][1], "no address" in found["GatewayReady"][2]) == ("GatewayNotProgrammed", True)


@pytest.mark.parametrize(
    ("listeners", "url"),
    [
        ([{"name": "web", "port": 80, "protocol": "HTTP"}], "http://a.example/v1"),
        ([{"name": "tls", "port": 443, "protocol": "HTTPS"}], "https://a.example/v1"),
        ([{"port": 80, "protocol": "HTTP"}, {"port": 8443, "protocol": "HTTPS"}], "https://a.example/v1"),
        ([{"name": "web", "port": 8080, "protocol": "HTTP"}], "http://a.example/v1"),
        ([], "http://a.example/v1"),
    ],
)
def test_the_listeners_decide_the_scheme_of_the_url_and_their_ports_do_not_count(
    listeners: list[Json], url: str
) -> None:
    assert told(replace(route(parent()), gateways=edge(*listeners)))[1] == url


def test_only_the_listener_that_the_route_names_counts() -> None:
    listeners = [{"name": "web", "port": 80, "protocol": "HTTP"}, {"name": "tls", "port": 443, "protocol": "HTTPS"}]
    references = [{"name": "edge", "sectionName": "web"}]
    seen = route(parent(sectionName="web"), references=references)
    assert told(replace(seen, gateways=edge(*listeners)))[1] == "http://a.example/v1"
