"""Gateways whose number an autoscaler chooses: the operator never writes it, and everything else follows it."""

from typing import Any

import pytest

from orca.operator.domain.actions import HandOver
from orca.operator.domain.resource import Json
from orca.operator.plan import status
from orca.operator.plan.plan import make_plan
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment


def settled(gateway: Json, **spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(gateway=gateway, **spec))
    cluster.settle()
    return cluster


def change(cluster: FakeCluster, **spec: Any) -> list[Any]:
    """Returns: the actions until it is settled."""
    cluster.deployment = deployment(generation=cluster.deployment.generation + 1, **spec)
    return [action for plan in cluster.settle() for action in plan.actions]


def gateways(cluster: FakeCluster) -> Json:
    found: Json = cluster.objects["Deployment", "shop-gateway"]
    return found


def told(cluster: FakeCluster) -> dict[str, tuple[str, str, str]]:
    found = status.make_status(cluster.observed, make_plan(cluster.observed), {})
    return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found["conditions"]}


def test_new_gateways_begin_with_one_and_nothing_is_handed_over() -> None:
    cluster = settled({"autoscaled": True, "replicas": 3})
    assert gateways(cluster)["spec"]["replicas"] == 1
    assert cluster.reconcile().actions == ()


@pytest.mark.parametrize("number", [1, 2, 7, 0])
def test_every_number_of_an_autoscaler_stays_and_is_reported(number: int) -> None:
    cluster = settled({"autoscaled": True})
    cluster.scale(number)
    cluster.settle()
    change(cluster, gateway={"autoscaled": True, "sloEnforce": True})
    assert gateways(cluster)["spec"]["replicas"] == number
    if number:
        assert told(cluster)["GatewayReady"] == ("True", "Serving", f"{number} of {number} gateways are up")
    else:
        assert told(cluster)["GatewayReady"][:2] == ("False", "GatewaysAtZero")
        assert (told(cluster)["Ready"][0], told(cluster)["Degraded"][0]) == ("False", "False")


def test_a_number_that_the_operator_has_written_is_handed_over_and_stays() -> None:
    """A field that an apply leaves out and nobody else has would become 1: two of three gateways would go."""
    cluster = settled({"replicas": 3})
    actions = change(cluster, gateway={"replicas": 3, "autoscaled": True})
    [handed] = [action for action in actions if isinstance(action, HandOver)]
    assert handed.manifest["spec"] == {"replicas": 3}
    assert handed.manifest["metadata"]["uid"] == gateways(cluster)["metadata"]["uid"]
    assert gateways(cluster)["spec"]["replicas"] == 3


def test_the_operator_takes_the_number_back_when_it_is_to_choose_it() -> None:
    cluster = settled({"autoscaled": True})
    cluster.scale(7)
    change(cluster, gateway={"replicas": 2})
    assert gateways(cluster)["spec"]["replicas"] == 2
    cluster.scale(7)
    cluster.settle()
    assert gateways(cluster)["spec"]["replicas"] == 2


def test_suspended_gateways_go_and_come_back_with_one_which_an_autoscaler_can_raise() -> None:
    cluster = settled({"autoscaled": True})
    cluster.scale(4)
    change(cluster, gateway={"autoscaled": True}, suspend=True)
    assert gateways(cluster)["spec"]["replicas"] == 0
    change(cluster, gateway={"autoscaled": True})
    assert gateways(cluster)["spec"]["replicas"] == 1
    cluster.scale(4)
    cluster.settle()
    assert gateways(cluster)["spec"]["replicas"] == 4


def test_gateways_that_were_suspended_while_they_were_held_come_back_too() -> None:
    """A held Deployment is written as it is with no pods, so the wanted manifest has not changed afterwards."""
    cluster = settled({"autoscaled": True})
    fetched = {"uri": "hf://org/model"}
    cluster.deployment = deployment(generation=2, gateway={"autoscaled": True}, model=fetched, suspend=True)
    cluster.reconcile()
    assert gateways(cluster)["spec"]["replicas"] == 0
    change(cluster, gateway={"autoscaled": True})
    assert gateways(cluster)["spec"]["replicas"] == 1
