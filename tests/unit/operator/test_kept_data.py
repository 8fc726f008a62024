"""Objects that hold requests, keys or models outlive the mistakes of others: nobody prunes or swaps them in silence."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import pytest

from orca.operator.cluster import credentials, probes
from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.domain import names
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.plan import pool_move, status
from orca.operator.plan.children import KEPT_KINDS, drift, finish
from orca.operator.reconcile import observe, reconcile
from support.operator.clusters import RELEASE, FakeCluster
from support.operator.deployments import deployment
from support.operator.fake_api_server import fake_api_server

CLAIMED = ("app.kubernetes.io/instance", "helm.sh/", "argocd.argoproj.io/", "kustomize.toolkit.fluxcd.io/")
"""Labels by which Argo CD, Helm and Flux find what they may prune."""
ON_HUB = {"uri": "hf://org/model"}
HERE, THERE = "redis://here.example:6379/0", "redis://there.example:6379/0"


def finished(of: OrcaDeployment) -> list[Json]:
    """All children, with the Secrets that the operator draws."""
    cluster = FakeCluster(of)
    cluster.settle()
    drawn = [finish(of, make(of)) for make in (credentials.pool_secret, credentials.api_key_secret)]
    return [*drawn, *(each for (kind, _), each in cluster.objects.items() if kind != "Pod")]


def test_no_object_has_a_label_by_which_other_tools_find_their_own() -> None:
    for each in finished(deployment(model=ON_HUB)):
        labels = each["metadata"]["labels"] | each.get("spec", {}).get("template", {}).get("metadata", {}).get(
            "labels", {}
        )
        assert [label for label in labels if label.startswith(CLAIMED)] == [], each["metadata"]["name"]
        assert labels.get("app.kubernetes.io/managed-by") == names.MANAGER


def test_what_has_no_owner_is_marked_so_that_no_tool_prunes_it() -> None:
    ownerless = [each for each in finished(deployment(model=ON_HUB)) if "ownerReferences" not in each["metadata"]]
    assert sorted(each["kind"] for each in ownerless) == ["PersistentVolumeClaim"] * 2 + ["Secret"] * 3
    for each in ownerless:
        found = each["metadata"]["annotations"]
        assert "Prune=false" in found["argocd.argoproj.io/sync-options"]
        assert found["kustomize.toolkit.fluxcd.io/prune"] == "disabled"
        assert found["helm.sh/resource-policy"] == "keep"


def test_what_ends_with_the_resource_is_owned_and_not_marked() -> None:
    for each in finished(deployment(model=ON_HUB, deletionPolicy="Delete")):
        assert each["metadata"]["ownerReferences"]
        if each["kind"] in KEPT_KINDS:
            assert not names.KEPT_ANNOTATIONS.keys() & each["metadata"].get("annotations", {}).keys()


def test_a_mark_that_somebody_removes_comes_back() -> None:
    [claim] = [each for each in finished(deployment()) if each["kind"] == "PersistentVolumeClaim"]
    there = {**claim, "metadata": {**claim["metadata"], "annotations": {}}}
    assert drift(claim, there) == "metadata.annotations.argocd.argoproj.io/sync-options"


@pytest.mark.parametrize("name", ["shop-pool", "shop-api-key"])
@pytest.mark.parametrize(
    "his",
    [
        {},
        {"labels": names.labels("shop", "pool"), "ownerReferences": [{"uid": "his", "controller": True}]},
    ],
    ids=["no label", "controlled by another"],
)
def test_a_secret_of_somebody_else_is_refused_by_its_name_and_stays(name: str, his: Json) -> None:
    path = f"/api/v1/namespaces/ns/secrets/{name}"
    with fake_api_server() as (fake, cluster):
        fake.objects[path] = {"metadata": {"name": name, "uid": "x", **his}, "data": {"openai": ""}}
        with pytest.raises(ApiServerError, match=f"Secret {name} exists already and does not belong") as refused:
            observe(cluster, RELEASE, deployment(), frozenset())
        assert refused.value.is_refusal
        assert fake.objects[path]["data"] == {"openai": ""}


def test_a_secret_that_is_drawn_again_is_told_by_an_event() -> None:
    with fake_api_server() as (fake, cluster):
        refusals = Refusals(lambda: 0.0)
        reconcile(cluster, observe(cluster, RELEASE, deployment(), frozenset()), {}, refusals)
        told = [body for _, path, body in fake.said if path.endswith("/events") and body is not None]
        assert "SecretDrawn" not in [each["reason"] for each in told]
        before = fake.status("shop")
        del fake.objects["/api/v1/namespaces/ns/secrets/shop-pool"]
        reconcile(cluster, observe(cluster, RELEASE, deployment(), frozenset()), before, refusals)
        told = [body for _, path, body in fake.said if path.endswith("/events") and body is not None]
    [drawn] = [each for each in told if each["reason"] == "SecretDrawn"]
    assert (drawn["type"], "no Secret shop-pool" in drawn["message"]) == ("Warning", True)


@pytest.mark.parametrize("secret", [{}, {"data": None}, {"data": {"url": ""}}])
def test_a_secret_without_the_keys_that_pods_wait_for_is_named(secret: Json) -> None:
    cluster = FakeCluster(deployment())
    cluster.reconcile()
    cluster.pool_secret = secret
    found = status.make_status(cluster.observed, cluster.reconcile(), {})
    [pool] = [each for each in found["conditions"] if each["type"] == "PoolReady"]
    assert (pool["reason"], "Secret shop-pool has no key" in pool["message"]) == ("SecretMissing", True)


def external(url: str = HERE, **spec: Any) -> FakeCluster:
    """One that serves, with its requests in the Redis of that URL."""
    cluster = FakeCluster(deployment(pool={"external": {"urlSecret": {"name": "redis"}}}, **spec))
    point(cluster, url)
    cluster.settle()
    cluster.pool = PoolStatus(generation=max(cluster.observed.generations.values(), default=None))
    return cluster


def secret(url: str) -> Json:
    return {"data": {"url": base64.b64encode(url.encode()).decode()}}


def point(cluster: FakeCluster, url: str) -> None:
    cluster.pool_secret = secret(url)


def judged(cluster: FakeCluster, named: PoolStatus, left: PoolStatus) -> PoolStatus:
    cluster.pool = pool_move.judge(cluster.observed, named, left)
    return cluster.pool


def used(cluster: FakeCluster) -> set[str]:
    """URLs in the pods that are made from now on."""
    templates = [
        each["spec"]["template"]
        for (kind, _), each in cluster.objects.items()
        if kind != "Pod" and "template" in each.get("spec", {})
    ]
    variables = [each for template in templates for each in template["spec"]["containers"][0]["env"]]
    return {each["value"] for each in variables if each["name"] in ("ORCA_GATEWAY_POOL", "ORCA_SCHEDULER_POOL")}


def test_the_redis_in_use_is_known_from_what_runs_and_its_url_is_in_no_secret() -> None:
    cluster = external()
    assert (cluster.observed.pool_in_use, used(cluster)) == (HERE, {HERE})
    assert pool_move.url_left(cluster.observed) is None
    point(cluster, THERE)
    assert pool_move.url_left(cluster.observed) == HERE


REFUSED = [
    "redis://u:p@there.example:6379",
    "redis://there.example?password=p",
    "unix:///redis.sock",
    "redis://there .example",
    "",
    "nonsense",
]
"""URLs that parts do not accept."""


@pytest.mark.parametrize("url", REFUSED)
def test_no_part_starts_with_a_url_that_it_refuses(url: str) -> None:
    cluster = external(url)
    assert cluster.observed.pool_in_use is None
    assert (cluster.names("Deployment"), cluster.names("StatefulSet")) == ([], [])
    point(cluster, HERE)
    cluster.settle()
    assert used(cluster) == {HERE}


@pytest.mark.parametrize("bad", [*map(secret, REFUSED), {"data": {}}, {"data": None}, {"data": {"url": "%"}}, None])
def test_a_bad_secret_between_two_urls_does_not_lead_parts_to_another_redis(bad: Json | None) -> None:
    cluster = external()
    before = {key: each for key, each in cluster.objects.items() if key[0] != "Pod"}
    cluster.pool_secret, served = bad, cluster.pool
    cluster.pool = asyncio.run(probes.poll_pool(cluster.deployment, bad, None))
    assert cluster.pool.problem is not None
    assert cluster.reconcile().actions == ()
    told = status.make_status(cluster.observed, cluster.reconcile(), {})
    [found] = [each for each in told["conditions"] if each["type"] == "PoolReady"]
    assert (found["status"], found["message"]) == ("False", cluster.pool.problem)

    point(cluster, THERE)
    assert pool_move.url_left(cluster.observed) == HERE
    assert judged(cluster, PoolStatus(), PoolStatus(queued=1)).has_moved
    assert cluster.reconcile().actions == ()
    assert {key: each for key, each in cluster.objects.items() if key[0] != "Pod"} == before

    point(cluster, HERE)
    assert pool_move.url_left(cluster.observed) is None
    cluster.pool = served
    assert cluster.reconcile().actions == ()


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (PoolStatus(queued=2, running=1), "3 of them have not ended"),
        (PoolStatus(replaced_unfinished=1), "1 of them have not ended"),
        (PoolStatus(), "gateways may still accept some"),
        (PoolStatus(problem="refused"), "nobody knows"),
    ],
)
def test_parts_do_not_follow_a_secret_to_another_redis_and_the_status_says_why(left: PoolStatus, why: str) -> None:
    cluster = external()
    before = {key: each for key, each in cluster.objects.items() if key[0] != "Pod"}
    point(cluster, THERE)
    found = judged(cluster, PoolStatus(), left)
    told = status.make_status(cluster.observed, cluster.reconcile(), {})
    assert found.has_moved
    for kind in ("Accepted", "PoolReady"):
        [each] = [each for each in told["conditions"] if each["type"] == kind]
        assert (each["status"], each["reason"]) == ("False", "PoolMoved")
        assert why in each["message"]
    assert used(cluster) == {HERE}
    assert {key: each for key, each in cluster.objects.items() if key[0] != "Pod"} == before


def test_parts_follow_to_another_address_of_the_same_requests() -> None:
    cluster = external()
    point(cluster, THERE)
    assert not judged(cluster, cluster.pool, PoolStatus(problem="it is gone")).has_moved
    cluster.settle()
    assert (used(cluster), cluster.observed.pool_in_use) == ({THERE}, THERE)


def suspended(of: FakeCluster) -> FakeCluster:
    of.deployment = deployment(pool={"external": {"urlSecret": {"name": "redis"}}}, suspend=True)
    of.settle()
    return of


@pytest.mark.parametrize("left", [PoolStatus(), PoolStatus(queued=1), PoolStatus(problem="refused")])
def test_a_suspended_resource_moves_when_nothing_is_left_behind(left: PoolStatus) -> None:
    cluster = suspended(external())
    point(cluster, THERE)
    may_move = left == PoolStatus()
    assert judged(cluster, PoolStatus(), left).has_moved != may_move
    cluster.reconcile()
    assert cluster.observed.pool_in_use == (THERE if may_move else HERE)


@pytest.mark.parametrize("begin", [suspended, lambda cluster: cluster])
def test_a_gateway_that_still_runs_keeps_the_resource_at_its_redis(
    begin: Callable[[FakeCluster], FakeCluster],
) -> None:
    cluster = begin(external())
    cluster.add_pod("shop-gateway-late", names.labels("shop", "gateway"))
    point(cluster, THERE)
    assert judged(cluster, PoolStatus(), PoolStatus()).has_moved
