"""The network policies allow exactly these connections, read by the rules of a network plugin."""

from typing import Any

import pytest

from orca.core.domain.errors import SettingError
from orca.operator.domain import names
from orca.operator.domain.resource import Json
from orca.operator.render import network
from orca.operator.settings import parse_settings
from support.operator.deployments import deployment

ROLES = ("gateway", "scheduler", "stage", "pool")
STRANGER = {"app": "other"}
OPERATOR = {"app.kubernetes.io/name": "orca-operator"}


def pod(role: str) -> Json:
    return names.labels("shop", role)


def can_reach(source: Json, target: Json, port: int, **spec: Any) -> bool:
    """Return whether a connection passes: out of one pod, and into the other."""
    found = network.policies(deployment(**spec))
    return _passes(found, source, target, port, "egress", "to") and _passes(
        found, target, source, port, "ingress", "from"
    )


def _passes(found: list[Json], subject: Json, peer: Json, port: int, rules: str, direction: str) -> bool:
    selecting = [each["spec"] for each in found if _selects(each["spec"]["podSelector"], subject)]
    return not selecting or any(_allows(rule, peer, port, direction) for spec in selecting for rule in spec[rules])


def _allows(rule: Json, peer: Json, port: int, direction: str) -> bool:
    is_port = "ports" not in rule or port in [each["port"] for each in rule["ports"]]
    return is_port and (direction not in rule or any(_selects(each["podSelector"], peer) for each in rule[direction]))


def _selects(selector: Json, labels: Json) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("gateway", "pool", 6379),
        ("scheduler", "pool", 6379),
        ("scheduler", "stage", 7000),
        ("stage", "scheduler", 7002),
        ("stage", "stage", 43210),
    ],
)
def test_each_part_reaches_the_parts_that_it_needs(source: str, target: str, port: int) -> None:
    assert can_reach(pod(source), pod(target), port)


def test_clients_prometheus_and_the_operator_reach_their_ports() -> None:
    assert can_reach(STRANGER, pod("gateway"), 8000)
    assert can_reach(STRANGER, pod("gateway"), 9090)
    assert can_reach(STRANGER, pod("scheduler"), 9090)
    assert can_reach(OPERATOR, pod("pool"), 6379)


@pytest.mark.parametrize(("target", "port"), [("pool", 6379), ("stage", 7000), ("stage", 43210), ("scheduler", 7002)])
def test_other_pods_cannot_connect_to_the_parts(target: str, port: int) -> None:
    assert not can_reach(STRANGER, pod(target), port)


@pytest.mark.parametrize("role", ROLES)
def test_no_part_connects_outside_the_deployment(role: str) -> None:
    assert not can_reach(pod(role), STRANGER, 443)


def test_only_a_fetch_connects_outside_and_only_the_operator_polls_it() -> None:
    model = {"uri": "hf://org/model"}
    assert can_reach(pod("fetch"), STRANGER, 443, model=model)
    assert can_reach(OPERATOR, pod("fetch"), 9090, model=model)
    assert not can_reach(STRANGER, pod("fetch"), 9090, model=model)
    assert not can_reach(pod("stage"), STRANGER, 443, model=model)


def test_each_part_that_the_operator_calls_admits_the_operator() -> None:
    found = network.policies(deployment(model={"uri": "hf://org/model"}))
    rules = [rule for policy in found for rule in policy["spec"]["ingress"] if "from" in rule]
    of_operator = [rule for rule in rules if any(_selects(each["podSelector"], OPERATOR) for each in rule["from"])]
    let_in = {port["port"] for rule in of_operator for port in rule["ports"]}
    assert let_in == {6379, 9090}  # tests/process/chart checks the same in the chart's policy


def test_gateways_cannot_connect_to_the_engine() -> None:
    assert not can_reach(pod("gateway"), pod("stage"), 7000)


def test_an_external_pool_may_have_any_address() -> None:
    external = {"external": {"urlSecret": {"name": "redis"}}}
    assert can_reach(pod("gateway"), STRANGER, 6380, pool=external)
    assert not can_reach(pod("stage"), STRANGER, 6380, pool=external)


def test_stages_in_the_host_network_are_reached_without_a_selector() -> None:
    worker = {"hostNetwork": True}
    assert can_reach(pod("scheduler"), STRANGER, 7000, worker=worker)
    assert can_reach(STRANGER, pod("scheduler"), 7002, worker=worker)
    assert not can_reach(pod("scheduler"), STRANGER, 443, worker=worker)
    assert not can_reach(STRANGER, pod("pool"), 6379, worker=worker)
    found = network.policies(deployment(worker=worker))
    assert [each["metadata"]["name"] for each in found] == ["shop-gateway", "shop-scheduler", "shop-pool"]


def test_every_part_may_call_the_dns_ports_of_the_cluster_and_53_by_default() -> None:
    for ports, more in (((53,), {}), ((53, 5353), {"dns_ports": (53, 5353)})):
        for policy in network.policies(deployment(model={"uri": "hf://org/model"}), **more):
            allowed = [(each["protocol"], each["port"]) for each in policy["spec"]["egress"][-1]["ports"]]
            assert allowed == [(protocol, port) for port in ports for protocol in ("UDP", "TCP")]


def test_the_dns_ports_of_the_settings_reach_the_policies() -> None:
    words = [
        word for role in ("gateway", "scheduler", "worker", "pool", "fetch") for word in (f"--image-{role}", "i:1")
    ]
    assert parse_settings(words, {}).release.dns_ports == (53,)
    assert parse_settings([*words, "--dns-ports", "53,5353"], {}).release.dns_ports == (53, 5353)
    for bad in ("dns", "0", "65536", "53,-1"):
        with pytest.raises(SettingError, match=r"setting --dns-ports: .* ports from 1 to 65535"):
            parse_settings([*words, "--dns-ports", bad], {})
