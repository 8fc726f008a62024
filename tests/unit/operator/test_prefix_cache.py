"""The prefix cache of a deployment: its fields become flags, and an edit replaces the pods of one part alone."""

from typing import Any

import pytest

from orca.gateway.settings import parse_settings as gateway_settings
from orca.operator.domain import names
from orca.operator.domain.actions import Apply
from orca.operator.domain.resource import Json
from orca.scheduler.settings import parse_settings as scheduler_settings
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

SCHEDULER = {"ORCA_SCHEDULER_POOL": "redis://a.example:6379/0"}
GATEWAY = {"ORCA_GATEWAY_POOL": "redis://a.example:6379/0"}


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def arguments(cluster: FakeCluster, kind: str, part: str) -> list[str]:
    """Return the arguments of the only container of a part, without its subcommand."""
    [name] = cluster.names(kind, part)
    [container] = cluster.objects[kind, name]["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["args"][1:]
    return words


def has_cache(cluster: FakeCluster) -> bool:
    return scheduler_settings(arguments(cluster, "StatefulSet", names.SCHEDULER), SCHEDULER).prefix_cache


def charge(cluster: FakeCluster) -> str:
    return scheduler_settings(arguments(cluster, "StatefulSet", names.SCHEDULER), SCHEDULER).prefix_charge


def sharing(cluster: FakeCluster) -> str:
    return gateway_settings(arguments(cluster, "Deployment", names.GATEWAY), GATEWAY).prefix_sharing


@pytest.mark.parametrize("scheduler", [{}, {"prefixCache": True}])
def test_the_cache_is_on_without_a_flag(scheduler: Json) -> None:
    cluster = settled(scheduler=scheduler)
    assert "--prefix-cache" not in arguments(cluster, "StatefulSet", names.SCHEDULER)
    assert has_cache(cluster)


@pytest.mark.parametrize("gateway", [{}, {"prefixSharing": "All"}])
def test_all_calls_share_without_a_flag(gateway: Json) -> None:
    cluster = settled(gateway=gateway)
    assert "--prefix-sharing" not in arguments(cluster, "Deployment", names.GATEWAY)
    assert sharing(cluster) == "all"


def test_the_cache_can_be_switched_off_and_an_edit_replaces_schedulers_only() -> None:
    cluster = settled(scheduler={"prefixCache": False})
    assert not has_cache(cluster)
    assert edited(cluster, scheduler={"prefixCache": True}) == cluster.names("StatefulSet", names.SCHEDULER)
    assert has_cache(cluster)


def test_shared_blocks_may_be_charged_once_and_an_edit_replaces_schedulers_only() -> None:
    cluster = settled(scheduler={"prefixCharge": "Once"})
    assert charge(cluster) == "once"
    assert edited(cluster, scheduler={"prefixCharge": "Each"}) == cluster.names("StatefulSet", names.SCHEDULER)
    assert "--prefix-charge" not in arguments(cluster, "StatefulSet", names.SCHEDULER)
    assert charge(cluster) == "each"


def test_calls_may_share_with_those_of_their_key_and_an_edit_replaces_gateways_only() -> None:
    cluster = settled(gateway={"prefixSharing": "Key"})
    assert sharing(cluster) == "key"
    assert edited(cluster, gateway={"prefixSharing": "All"}) == cluster.names("Deployment", names.GATEWAY)
    assert sharing(cluster) == "all"


def edited(cluster: FakeCluster, **spec: Any) -> list[str]:
    """Edit the deployment. Return the names of the objects that are applied."""
    cluster.deployment = deployment(generation=2, **spec)
    return [
        each.manifest["metadata"]["name"]
        for plan in cluster.settle()
        for each in plan.actions
        if isinstance(each, Apply)
    ]
