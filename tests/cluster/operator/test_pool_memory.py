"""LimitRanges that give the managed Redis a limit, on a real API server."""

import pytest

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain.resource import read
from orca.operator.plan import pool_memory
from orca.operator.reconcile import observe
from support.operator.api_server import ApiServer
from support.operator.clusters import RELEASE
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("operator")]


def limit_memory(shop: Shop, amount: str) -> None:
    """Give containers without a limit this one."""
    limits = [{"type": "Container", "default": {"memory": amount}}]
    shop.core.create_namespaced_limit_range(
        shop.namespace, {"metadata": {"name": "limits"}, "spec": {"limits": limits}}
    )


def pods(shop: Shop) -> list[str]:
    """Return the names of the pods of Redis."""
    found = shop.core.list_namespaced_pod(shop.namespace, label_selector="orca-serving.io/role=pool")
    return [str(each.metadata.name) for each in found.items]


def message(shop: Shop, kind: str) -> str:
    return next((str(each["message"]) for each in shop.status()["conditions"] if each["type"] == kind), "")


def test_a_default_limit_that_redis_may_exceed_is_a_problem(shop: Shop, server: ApiServer) -> None:
    limit_memory(shop, "1600Mi")
    shop.create(pool={"managed": {}})
    wait_until(lambda: pods(shop), WITHIN_S)
    cluster = Cluster(server.api())
    body = cluster.deployment(shop.namespace, "shop")
    assert body is not None
    problem = pool_memory.find_problem(observe(cluster, RELEASE, read(body), frozenset()))
    assert problem is not None
    assert problem.reason == "PoolMemoryLimit"
    assert "allow Redis 1600Mi of memory, and it may take 1984Mi" in problem.message


def test_a_default_limit_below_the_request_is_reported_in_the_words_of_the_api_server(
    shop: Shop, operator: OperatorProcess
) -> None:
    limit_memory(shop, "512Mi")
    shop.create(pool={"managed": {}})
    shop.wait_for("PoolReady", "False", "PodsForbidden")
    assert "must be less than or equal to memory limit of 512Mi" in message(shop, "PoolReady")
    shop.edit(pool={"resources": {"limits": {"memory": "2Gi"}}})
    wait_until(lambda: shop.condition("PoolReady")[1] != "PodsForbidden", WITHIN_S, lambda: operator.log)
