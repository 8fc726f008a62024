"""Labels and annotations that the spec gives to all objects: everywhere, and without a restart of anything."""

from typing import Any

import pytest

from orca.operator.domain import group_pauses, names
from orca.operator.domain.actions import Apply
from orca.operator.domain.resource import Json
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

GIVEN: Json = {"labels": {"team": "a"}, "annotations": {"a.example/cost": "7"}}
ON_HUB = {"uri": "hf://org/model"}


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def change(cluster: FakeCluster, **spec: Any) -> FakeCluster:
    cluster.deployment = deployment(generation=cluster.deployment.generation + 1, **spec)
    return cluster


def objects(cluster: FakeCluster) -> dict[tuple[str, str], Json]:
    return {key: each for key, each in cluster.objects.items() if key[0] != "Pod"}


def test_every_object_has_them_beside_the_operators_own() -> None:
    cluster = settled(model=ON_HUB, objectMetadata=GIVEN, gateway={"ingress": {}})
    kinds = {kind for kind, _ in objects(cluster)}
    assert {"Service", "PersistentVolumeClaim", "Secret", "StatefulSet", "Deployment", "Ingress", "Job"} <= kinds
    for key, each in objects(cluster).items():
        assert each["metadata"]["labels"].items() >= {"team": "a", names.DEPLOYMENT_LABEL: "shop"}.items(), key
        assert each["metadata"]["annotations"]["a.example/cost"] == "7", key


def test_pods_and_selectors_do_not_have_them() -> None:
    for key, each in objects(settled(model=ON_HUB, objectMetadata=GIVEN)).items():
        spec = each.get("spec", {})
        metadata = spec.get("template", {}).get("metadata", {})
        assert "team" not in metadata.get("labels", {}), key
        assert "a.example/cost" not in metadata.get("annotations", {}), key
        assert "team" not in str(spec.get("selector")), key


@pytest.mark.parametrize("spec", [{}, {"model": ON_HUB, "replicas": 2, "pool": {}}])
def test_a_change_of_them_is_written_and_restarts_nothing(spec: Json) -> None:
    cluster = settled(**spec)
    before = objects(cluster)
    plans = change(cluster, objectMetadata=GIVEN, **spec).settle()
    others = [action for plan in plans for action in plan.actions if not isinstance(action, Apply)]
    assert others == []
    after = objects(cluster)
    assert after.keys() == before.keys()
    assert {key: each.get("spec") for key, each in after.items()} == {
        key: each.get("spec") for key, each in before.items()
    }
    written = {kind for (kind, _), each in after.items() if each["metadata"]["labels"].get("team") == "a"}
    assert written >= {"Service", "PersistentVolumeClaim", "StatefulSet", "Deployment", "ConfigMap"}


def test_they_go_again_when_the_spec_does_not_give_them_any_more() -> None:
    cluster = change(settled(objectMetadata=GIVEN), objectMetadata={})
    cluster.settle()
    assert "team" not in cluster.objects["Deployment", "shop-gateway"]["metadata"]["labels"]
    assert (
        cluster.objects["Service", "shop"]["metadata"]["labels"]
        == settled().objects["Service", "shop"]["metadata"]["labels"]
    )


def test_a_fetch_that_runs_is_not_begun_again() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    before = cluster.objects["Job", job]
    change(cluster, model=ON_HUB, objectMetadata=GIVEN).reconcile()
    cluster.reconcile()
    assert cluster.objects["Job", job] == before


def test_what_an_object_has_of_its_own_counts() -> None:
    more = {"annotations": {"a.example/cost": "7", "nginx.ingress.kubernetes.io/proxy-buffering": "on"}}
    gateway = {"ingress": {}, "service": {"labels": {"team": "b"}, "annotations": {"a.example/cost": "8"}}}
    cluster = settled(objectMetadata=more | {"labels": {"team": "a"}}, gateway=gateway)
    service = cluster.objects["Service", "shop"]["metadata"]
    assert (service["labels"]["team"], service["annotations"]["a.example/cost"]) == ("b", "8")
    ingress = cluster.objects["Ingress", "shop"]["metadata"]["annotations"]
    assert ingress["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    claim = cluster.objects["PersistentVolumeClaim", "shop-pool"]["metadata"]["annotations"]
    assert claim["helm.sh/resource-policy"] == "keep"


def test_gateways_that_are_suspended_while_their_model_is_fetched_keep_them() -> None:
    cluster = settled(objectMetadata=GIVEN)
    change(cluster, objectMetadata=GIVEN, model=ON_HUB, suspend=True).reconcile()
    gateways = cluster.objects["Deployment", "shop-gateway"]
    assert gateways["spec"]["replicas"] == 0
    assert gateways["metadata"]["annotations"]["a.example/cost"] == "7"
    assert group_pauses.read(gateways) == group_pauses.Pause()
