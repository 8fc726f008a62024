"""Service, autoscaled gateways and metadata of all objects, as a real API server keeps them."""

from collections.abc import Iterator
from typing import Any

import pytest

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain.resource import Json
from support.operator.api_server import ApiServer
from support.operator.fake_nodes import FakeNodes
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nodes", "operator"), pytest.mark.timeout(400)]

ROUNDS = 3
"""Reconciles after which a fight over a field would have shown."""


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[FakeNodes]:
    with FakeNodes(server, {"one": {}, "two": {}}) as nodes:
        yield nodes


def service(shop: Shop) -> Any:
    return shop.core.read_namespaced_service("shop", shop.namespace)


def gateways(shop: Shop) -> Any:
    return shop.apps.read_namespaced_deployment("shop-gateway", shop.namespace)


def some_reconciles(operator: OperatorProcess) -> None:
    before = operator.reconciles()
    wait_until(lambda: operator.reconciles() >= before + ROUNDS, WITHIN_S, lambda: operator.log[-2000:])


def test_a_load_balancer_comes_and_goes_with_its_ports_of_nodes(shop: Shop, operator: OperatorProcess) -> None:
    inside = f"http://shop.{shop.namespace}.svc/v1"
    shop.create(gateway={"service": {"annotations": {"a.example/b": "c"}}})
    shop.wait_for("Ready", "True", "Serving")
    before = service(shop)
    assert before.spec.type == "ClusterIP"
    assert (before.metadata.annotations, shop.status()["url"]) == ({"a.example/b": "c"}, inside)
    shop.edit(gateway={"service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "annotations": None}})
    shop.wait_for("GatewayReady", "False", "RouteStarting")
    during = service(shop)
    assert (during.spec.ports[0].node_port is not None, during.metadata.annotations) == (True, None)
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}
    shop.core.patch_namespaced_service_status("shop", shop.namespace, status)
    shop.wait_for("Ready", "True", "Serving")
    assert shop.status()["url"] == "http://192.0.2.1/v1"
    shop.edit(gateway={"service": {"type": "ClusterIP", "externalTrafficPolicy": None}})
    wait_until(lambda: service(shop).spec.type == "ClusterIP", WITHIN_S, lambda: operator.log[-2000:])
    shop.wait_for("Ready", "True", "Serving")
    after = service(shop)
    assert (after.spec.ports[0].node_port, after.spec.external_traffic_policy) == (None, None)
    assert (after.spec.cluster_ip, shop.status()["url"]) == (before.spec.cluster_ip, inside)
    some_reconciles(operator)
    assert "somebody change" not in operator.log_about(shop.namespace)


def test_the_families_of_the_service_are_reached_from_one_to_two_and_back(
    shop: Shop, operator: OperatorProcess
) -> None:
    """The API server of the test has both families."""

    def wait_for_families(*families: str) -> None:
        wait_until(lambda: service(shop).spec.ip_families == [*families], WITHIN_S, lambda: operator.log[-2000:])
        shop.wait_for("Ready", "True")

    shop.create()
    shop.wait_for("Ready", "True")
    wait_for_families("IPv4", "IPv6")
    shop.edit(gateway={"service": {"ipFamilyPolicy": "SingleStack"}})
    wait_for_families("IPv4")
    shop.edit(gateway={"service": {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}})
    wait_for_families("IPv4", "IPv6")
    shop.edit(gateway={"service": {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"], "labels": {"team": "a"}}})
    wait_for_families("IPv4")
    shop.edit(gateway={"service": None})
    wait_for_families("IPv4", "IPv6")
    assert "refuses" not in operator.log_about(shop.namespace)
    assert "somebody change" not in operator.log_about(shop.namespace)


def test_an_autoscaler_owns_the_number_of_gateways(shop: Shop, operator: OperatorProcess) -> None:
    shop.create(gateway={"replicas": 3})
    shop.wait_for("Ready", "True")
    before = gateways(shop).metadata.generation
    shop.edit(gateway={"autoscaled": True})
    shop.wait_for("Ready", "True")
    some_reconciles(operator)
    # The number did not change meanwhile, not even for a moment.
    assert (gateways(shop).spec.replicas, gateways(shop).metadata.generation) == (3, before)
    for number in (5, 2):
        scale = {"spec": {"replicas": number}}
        shop.apps.patch_namespaced_deployment_scale("shop-gateway", shop.namespace, scale)
        some_reconciles(operator)
        shop.wait_for("Ready", "True")
        assert gateways(shop).spec.replicas == number
    shop.edit(gateway={"sloEnforce": True})
    shop.wait_for("Ready", "True")
    assert gateways(shop).spec.replicas == 2
    shop.edit(suspend=True)
    wait_until(lambda: gateways(shop).spec.replicas == 0, WITHIN_S)
    shop.edit(suspend=False)
    wait_until(lambda: gateways(shop).spec.replicas == 1, WITHIN_S)
    shop.edit(gateway={"autoscaled": False})
    wait_until(lambda: gateways(shop).spec.replicas == 3, WITHIN_S)
    assert "somebody change" not in operator.log_about(shop.namespace)


def test_metadata_of_all_objects_comes_and_goes_and_no_pod_is_made_anew(
    shop: Shop, server: ApiServer, operator: OperatorProcess
) -> None:
    cluster = Cluster(server.api())

    def pods() -> set[str]:
        return {each["metadata"]["uid"] for each in children() if each["kind"] == "Pod"}

    def children() -> list[Json]:
        return cluster.children(shop.namespace, "shop")

    def marked() -> set[str]:
        found = [each for each in children() if each["metadata"]["labels"].get("team") == "a"]
        assert all(each["metadata"]["annotations"]["a.example/b"] == "c" for each in found)
        return {each["kind"] for each in found}

    shop.create(pool={"external": {"urlSecret": {"name": "redis"}}}, replicas=2)
    shop.wait_for("Ready", "True")
    before = pods()
    shop.edit(objectMetadata={"labels": {"team": "a"}, "annotations": {"a.example/b": "c"}})
    shop.wait_for("Ready", "True")
    some_reconciles(operator)
    # The Secrets exist already.
    kinds = {"Service", "ConfigMap", "ServiceAccount", "Deployment", "StatefulSet", "PodDisruptionBudget"}
    assert marked() == kinds
    shop.edit(objectMetadata=None)
    wait_until(lambda: marked() == set(), WITHIN_S, lambda: str(marked()))
    shop.wait_for("Ready", "True")
    assert pods() == before
    first = shop.core.list_namespaced_pod(shop.namespace, label_selector=shop.status()["selector"])
    assert len(first.items) == 2
