"""The managed Redis gets the memory that it may take: its limit is checked, and it has requests by default."""

from typing import Any

import pytest

from orca.operator.domain import names
from orca.operator.domain.resource import BadSpec, Json
from orca.operator.plan import pool_memory
from orca.operator.plan.plan import make_plan
from orca.operator.plan.status import make_status
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

LEAST = "1984Mi"
"""The memory that Redis may take with the default of memoryMiB, 1536."""


def limited(amount: object) -> Json:
    return {"resources": {"limits": {"memory": amount}}}


def patched(**resources: Json) -> Json:
    return {"podPatch": {"spec": {"containers": [{"name": "redis", "resources": resources}]}}}


def resources(**pool: Any) -> Json:
    """Return the resources of the container of Redis."""
    cluster = FakeCluster(deployment(pool=pool))
    cluster.settle()
    [container] = cluster.objects["StatefulSet", "shop-pool"]["spec"]["template"]["spec"]["containers"]
    found: Json = container["resources"]
    return found


@pytest.mark.parametrize("amount", ["1983Mi", "1.9Gi", "2080M", "2e9", 2e9, 2080374783, "1500M", "256Mi"])
def test_a_memory_limit_below_what_redis_may_take_is_refused_with_both_numbers(amount: object) -> None:
    with pytest.raises(BadSpec, match=rf"pool\.resources\.limits\.memory .* less than the {LEAST} .* 1536 MiB"):
        deployment(pool=limited(amount))


@pytest.mark.parametrize("amount", ["1984Mi", "2Gi", "2100M", "2.1e9", 2.1e9, 2080374784])
def test_a_memory_limit_with_room_for_redis_is_accepted(amount: object) -> None:
    assert deployment(pool=limited(amount)).spec.pool.resources.limits["memory"] == amount


def test_the_limit_goes_with_the_memory_that_redis_may_fill() -> None:
    small = {"managed": {"memoryMiB": 256}}
    assert deployment(pool={**small, **limited("384Mi")}).spec.pool.managed.least_limit == "384Mi"
    with pytest.raises(BadSpec, match="383Mi is less than the 384Mi"):
        deployment(pool={**small, **limited("383Mi")})


def test_a_memory_limit_in_the_patch_is_checked_in_place_of_the_fields() -> None:
    with pytest.raises(BadSpec, match=r"pool\.podPatch: the memory limit 1Gi is less than the 1984Mi"):
        deployment(pool=patched(limits={"memory": "1Gi"}))
    small = {**limited("1Gi"), **patched(limits={"memory": "2Gi"})}
    assert deployment(pool=small).spec.pool.patched_resources.limits == {"memory": "2Gi"}


@pytest.mark.parametrize("patch", [{"spec": {"containers": "word"}}, {"spec": {"containers": [{"name": "redis"}]}}, {}])
def test_a_patch_without_resources_has_no_limit(patch: Json) -> None:
    assert deployment(pool={"podPatch": patch}).spec.pool.patched_resources.limits == {}


def test_the_limit_of_an_external_pools_fields_says_nothing() -> None:
    external = {"external": {"urlSecret": {"name": "redis"}}}
    assert deployment(pool={**external, **limited("1Mi")}).spec.pool.external is not None


def test_redis_requests_what_it_may_fill_unless_the_spec_says_otherwise() -> None:
    assert resources() == {"requests": {"cpu": "100m", "memory": "1536Mi"}}
    small = {"managed": {"memoryMiB": 256}}
    assert resources(**small)["requests"] == {"cpu": "100m", "memory": "256Mi"}
    mine = {"requests": {"memory": "3Gi"}}
    assert resources(resources=mine) == {"requests": {"cpu": "100m", "memory": "3Gi"}}
    zero = {"requests": {"memory": "0", "cpu": 0}}
    assert resources(resources=zero) == {"requests": {"memory": "0", "cpu": "0"}}


def test_a_limit_is_a_request_too_so_it_gets_no_default() -> None:
    limits = {"cpu": "50m", "memory": "2Gi"}
    assert resources(resources={"limits": limits}) == {"limits": limits}
    assert resources(**patched(limits=limits)) == {"limits": limits}


def running(pod: Json, **pool: Any) -> FakeCluster:
    """Return a cluster whose Redis runs with these resources, whoever has set them."""
    cluster = FakeCluster(deployment(pool=pool))
    cluster.settle()
    cluster.objects["Pod", "shop-pool-0"]["spec"]["containers"] = [{"name": "redis", "resources": pod}]
    return cluster


def degraded(cluster: FakeCluster) -> tuple[str, str, str]:
    observed = cluster.observed
    conditions = make_status(observed, make_plan(observed), {})["conditions"]
    [found] = [each for each in conditions if each["type"] == "Degraded"]
    return found["status"], found["reason"], found["message"]


def test_a_limit_of_a_limit_range_that_is_too_low_is_reported() -> None:
    status, reason, message = degraded(running({"limits": {"memory": "512Mi"}}))
    assert (status, reason) == ("True", "PoolMemoryLimit")
    for part in ("shop-pool-0", "512Mi", LEAST, "1536 MiB", "LimitRange", "pool.resources.limits.memory"):
        assert part in message


@pytest.mark.parametrize("pod", [{}, {"limits": {"cpu": "1"}}, {"limits": {"memory": LEAST}}])
def test_a_limit_with_room_or_none_is_no_problem(pod: Json) -> None:
    assert pool_memory.find_problem(running(pod).observed) is None


def test_the_limits_of_sidecars_and_of_pods_that_go_say_nothing() -> None:
    cluster = running({"limits": {"memory": "512Mi"}})
    pod = cluster.objects["Pod", "shop-pool-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pool_memory.find_problem(cluster.observed) is None
    del pod["metadata"]["deletionTimestamp"]
    pod["spec"]["containers"] = [{"name": "sidecar", "resources": {"limits": {"memory": "8Mi"}}}]
    assert pool_memory.find_problem(cluster.observed) is None
    assert pod["metadata"]["labels"][names.ROLE_LABEL] == names.POOL
