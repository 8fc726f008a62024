"""A node that is drained, and nodes that are lost with everything on them.

The last node is drained or lost; the first has the control plane and the Ingress. A lost node is cut off from the
others: its pods keep running, and do not know of those that replace them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.layout import Layout, Node
from cluster.machine.namespaces import disconnect_node, reconnect_node
from figures import record_figures
from installation import SPEC, Json, Service, install_chart, kill_operator, wait_until
from load import Load, is_answering

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(900)]

LOST_S = 60.0
"""Time until the cluster reports a node as lost, and until its pods' toleration of 10 seconds has ended."""


@pytest.fixture
def spread(kubectl: Kubectl, layout: Layout, namespace: str, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A gateway on each node, the only group on the last one, and Redis on the node of the parameter."""
    first, *_, last = [node.name for node in layout.nodes]
    install_chart()
    service = Service(kubectl, namespace)
    on = {"spec": {"nodeSelector": {"kubernetes.io/hostname": {"first": first, "last": last}[request.param]}}}
    gateway: Json = {**SPEC["gateway"], "replicas": 2, "ingress": service.ingress}
    service.create({**SPEC, "replicas": 0, "gateway": gateway, "pool": {"podPatch": on}})
    service.wait_until_settled()
    wait_until(lambda: nodes_of(service, "gateway") == {first, last}, service.describe)
    kubectl("cordon", first)
    try:
        service.scale(1)
        service.wait_until_settled()
    finally:
        kubectl("uncordon", first)
    yield service
    kubectl("uncordon", last)


def nodes_of(service: Service, role: str) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in service.pods(role)}


@contextlib.contextmanager
def away(layout: Layout, node: Node) -> Iterator[None]:
    """Cut the node off from the others inside the block."""
    disconnect_node(layout, node)
    try:
        yield
    finally:
        reconnect_node(layout, node)


def under_load(service: Service, name: str, change: Callable[[], Json]) -> Load:
    """Make a change under load. Args: change: returns its figures."""
    load = Load(service)
    wait_until(lambda: is_answering(load), service.describe)
    with load.running():
        began = time.monotonic()
        figures = change()
        seconds = round(time.monotonic() - began, 1)
    record_figures(name, {"seconds": seconds, **figures, **load.summary()})
    return load


@pytest.mark.parametrize("operator", ["stays", "dies"])
@pytest.mark.parametrize("spread", ["first"], indirect=True)
def test_a_drained_node_is_not_noticed(spread: Service, layout: Layout, operator: str) -> None:
    last = layout.nodes[-1].name

    def change() -> Json:
        spread.kubectl("cordon", last)
        if operator == "dies":
            kill_operator(spread.kubectl)
        drain = ("drain", last, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s")
        spread.kubectl(*drain, within_s=200)
        wait_until(lambda: last not in nodes_of(spread, "stage"), spread.describe)
        spread.wait_until_settled()
        return {}

    under_load(spread, f"node drained, operator {operator}", change).check()


@pytest.mark.parametrize("spread", ["first"], indirect=True)
def test_a_lost_node_costs_a_pause(spread: Service, layout: Layout) -> None:
    last = layout.nodes[-1]

    def change() -> Json:
        began = time.monotonic()
        with away(layout, last):
            wait_until(lambda: last.name not in nodes_of(spread, "stage"), spread.describe, within_s=LOST_S)
            seen = time.monotonic() - began
            spread.wait_until_settled()
            return {"given up after": round(seen, 1), "whole again after": round(time.monotonic() - began, 1)}

    under_load(spread, "node lost, without Redis", change).check_resuming()
    wait_until(lambda: is_ready(spread.kubectl, last.name))


@pytest.mark.parametrize("spread", ["last"], indirect=True)
def test_a_node_lost_with_the_pool_on_it_makes_the_service_wait(spread: Service, layout: Layout) -> None:
    """The pool's volume is only on this node: there are no answers until it is back, and nothing is lost then."""
    last = layout.nodes[-1]

    def change() -> Json:
        began = time.monotonic()
        with away(layout, last):
            reported_s = spread.wait_for("PoolReady", "False", within_s=LOST_S)
            wait_until(lambda: last.name not in nodes_of(spread, "stage"), spread.describe, within_s=LOST_S)
        back = time.monotonic()
        wait_until(lambda: is_ready(spread.kubectl, last.name))
        spread.wait_until_settled()
        return {
            "condition says so after": round(reported_s, 1),
            "away": round(back - began, 1),
            "whole again after its return": round(time.monotonic() - back, 1),
        }

    under_load(spread, "node lost, with Redis", change).check_resuming()


def is_ready(kubectl: Kubectl, node: str) -> bool:
    conditions = kubectl.get("node", node)["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
