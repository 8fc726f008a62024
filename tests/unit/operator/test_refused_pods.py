"""Pods that nobody may make, mounts that wait and volumes that go: the status says so in the words of the cluster."""

from dataclasses import replace
from typing import Any

import pytest

from orca.operator.domain import names
from orca.operator.domain.cluster_events import Events, read_events, reasons_to_read
from orca.operator.domain.observation import Observation
from orca.operator.domain.resource import Json
from orca.operator.plan import status
from orca.operator.plan.plan import make_plan
from orca.operator.reconcile import observe
from support.operator.clusters import BORN, BORN_S, RELEASE, FakeCluster
from support.operator.deployments import deployment
from support.operator.fake_api_server import fake_api_server

ON_HUB = {"uri": "hf://org/model"}
QUOTA = 'create Pod failed error: pods "x" is forbidden: exceeded quota: few'
AT = "2026-01-01T00:01:00Z"


def event(kind: str, name: str, message: str, *, uid: str | None = None, at: str = AT, **more: Any) -> Json:
    about = {"kind": kind, "name": name, "uid": f"uid-{name}" if uid is None else uid}
    return {"involvedObject": about, "message": message, "lastTimestamp": at, **more}


def seen(cluster: FakeCluster, *events: Json) -> Observation:
    return replace(cluster.observed, events=read_events(events))


def told(observation: Observation) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message by condition."""
    found = status.make_status(observation, make_plan(observation), {})
    return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found["conditions"]}


def lacking(role: str, **spec: Any) -> tuple[FakeCluster, str]:
    """A cluster of which the pods of a role are not made, with the name of what should make them."""
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    [pod, *_] = cluster.names("Pod", role)
    maker = pod.rpartition("-")[0]
    del cluster.objects["Pod", pod]
    [key] = [key for key in cluster.objects if key[1] == maker and key[0] in ("StatefulSet", "Deployment")]
    cluster.objects[key]["status"] |= {"replicas": 0, "availableReplicas": 0}
    return cluster, maker


@pytest.mark.parametrize(
    ("role", "part"), [("stage", "WorkersReady"), ("scheduler", "SchedulerReady"), ("pool", "PoolReady")]
)
def test_pods_that_the_api_server_refuses_to_a_stateful_set_are_told_in_its_words(role: str, part: str) -> None:
    cluster, maker = lacking(role)
    found = told(seen(cluster, event("StatefulSet", maker, QUOTA)))
    assert found[part] == ("False", "PodsForbidden", f"StatefulSet {maker} cannot make its pods: {QUOTA}")
    assert found["Degraded"][:2] == ("True", "PodsForbidden")


def test_pods_that_the_api_server_refuses_to_the_gateways_are_told_from_their_deployment() -> None:
    cluster, maker = lacking("gateway")
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": QUOTA}
    cluster.objects["Deployment", maker]["status"]["conditions"] = [failure]
    assert told(cluster.observed)["GatewayReady"] == (
        "False",
        "PodsForbidden",
        f"Deployment {maker} cannot make its pods: {QUOTA}",
    )


def test_a_fetch_that_the_api_server_refuses_is_told_and_is_degraded() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    found = told(seen(cluster, event("Job", job, "must specify limits.cpu for: fetch")))
    assert found["ModelReady"][:2] == ("False", "PodsForbidden")
    assert "must specify limits.cpu" in found["ModelReady"][2]
    assert found["Degraded"][:2] == ("True", "PodsForbidden")
    assert told(cluster.observed)["ModelReady"][1] == "ModelLoading"


@pytest.mark.parametrize(
    "stale",
    [{"uid": "of-another"}, {"at": "2025-12-31T23:59:00Z"}],
    ids=["of an object that had this name", "before a pod was made"],
)
def test_an_event_that_is_over_is_not_told(stale: Json) -> None:
    cluster, maker = lacking("stage", parallelism={"stages": 2})
    [left] = cluster.names("Pod", "stage")
    owner = [{"uid": f"uid-{maker}", "controller": True}]
    cluster.objects["Pod", left]["metadata"] |= {"ownerReferences": owner, "creationTimestamp": BORN}
    found = told(seen(cluster, event("StatefulSet", maker, QUOTA, **stale)))
    assert found["WorkersReady"][1] == "StagesStarting"


def test_of_several_events_about_one_object_the_newest_counts() -> None:
    newer = event("StatefulSet", "x", "new", at="", series={"lastObservedTime": "2026-01-01T00:02:00.123456Z"})
    for items in ([newer, event("StatefulSet", "x", "old")], [event("StatefulSet", "x", "old"), newer]):
        assert read_events(items)["StatefulSet", "x"].message == "new"


def test_a_group_whose_pods_are_refused_gives_way_for_that_and_not_for_want_of_nodes() -> None:
    cluster, maker = lacking("stage", startupSeconds=30)
    cluster.now_s = BORN_S + 3600
    observation = seen(cluster, event("StatefulSet", maker, QUOTA, at="2026-01-01T00:59:00Z"))
    plan = make_plan(observation)
    assert plan.pauses[maker].reason == "PodsForbidden"
    found = told(observation)["WorkersReady"]
    assert found[1] == "PodsForbidden"
    assert "has given way once" in found[2]
    assert QUOTA in found[2]
    assert "node" not in found[2]


def waiting(role: str) -> tuple[FakeCluster, str]:
    """A pod of that role that has a node and does not start."""
    cluster = FakeCluster(deployment())
    cluster.settle()
    [pod] = cluster.names("Pod", role)
    cluster.make_unready(pod)
    return cluster, pod


@pytest.mark.parametrize(
    ("role", "part"), [("stage", "WorkersReady"), ("scheduler", "SchedulerReady"), ("gateway", "GatewayReady")]
)
def test_a_mount_that_waits_is_told_once_the_kubelet_has_had_time(role: str, part: str) -> None:
    cluster, pod = waiting(role)
    said = event("Pod", pod, 'MountVolume.SetUp failed for volume "ca" : secret "ca" not found')
    cluster.now_s = BORN_S + 10
    assert told(seen(cluster, said))[part][1] != "MountFailed"
    cluster.now_s = BORN_S + 20
    found = told(seen(cluster, said))[part]
    assert (found[1], 'secret "ca" not found' in found[2]) == ("MountFailed", True)


def test_a_claim_that_gets_no_volume_is_told_with_its_reason() -> None:
    cluster, pod = waiting("pool")
    cluster.make_unready(pod, node=None)
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "shop-pool"}}
    cluster.objects["Pod", pod]["spec"] = {"volumes": [volume]}
    cluster.objects["PersistentVolumeClaim", "shop-pool"]["status"] = {"phase": "Pending"}
    said = event("PersistentVolumeClaim", "shop-pool", "no storage class is set")
    found = told(seen(cluster, said))["PoolReady"]
    assert (found[1], "no storage class is set" in found[2]) == ("VolumeUnbound", True)


def test_events_are_read_only_while_something_is_missing() -> None:
    cluster = FakeCluster(deployment())
    cluster.settle()
    later_s = BORN_S + 20
    assert reasons_to_read(cluster.observed.children, later_s) == []
    cluster, _ = lacking("stage")
    assert reasons_to_read(cluster.observed.children, later_s) == ["FailedCreate"]
    cluster, pod = waiting("stage")
    assert "FailedMount" in reasons_to_read(cluster.observed.children, later_s)
    cluster.make_unready(pod, node=None)
    assert "ProvisioningFailed" in reasons_to_read(cluster.observed.children, later_s)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_an_operator_without_the_right_to_read_events_works_all_the_same(is_allowed: bool) -> None:
    path = "/api/v1/namespaces/ns/events"
    with fake_api_server() as (fake, cluster):
        fake.objects["/apis/apps/v1/namespaces/ns/statefulsets/x"] = {
            "metadata": {"name": "x", "uid": "uid-x", "labels": names.labels("shop", "stage"), "ownerReferences": []},
            "spec": {"replicas": 1},
        }
        fake.objects["/apis/apps/v1/namespaces/ns/statefulsets/x"]["metadata"]["labels"] |= {names.HASH_LABEL: "h"}
        fake.objects[path] = {"items": [event("StatefulSet", "x", QUOTA)]}
        if not is_allowed:
            fake.refuses["GET", "/events"] = 403, "not allowed"
        found: Events = observe(cluster, RELEASE, deployment(), frozenset()).events
    assert [each.message for each in found.values()] == ([QUOTA] if is_allowed else [])


def going_pool() -> FakeCluster:
    cluster = FakeCluster(deployment())
    cluster.settle()
    cluster.objects["PersistentVolumeClaim", "shop-pool"]["metadata"]["deletionTimestamp"] = AT
    return cluster


def test_a_pool_volume_that_is_being_deleted_is_degraded_and_redis_is_not_restarted() -> None:
    cluster = going_pool()
    found = told(cluster.observed)
    assert found["Degraded"][:2] == ("True", "VolumeIsGoing")
    assert "shop-pool" in found["Degraded"][2]
    assert found["Ready"][0] == "True"
    before = cluster.objects["StatefulSet", "shop-pool"]
    cluster.deployment = deployment(generation=2, pool={"managed": {"memoryMiB": 256}})
    cluster.pool_secret = {"data": {"users.acl": "bmV3", "password": "bmV3"}}
    cluster.reconcile()
    assert cluster.objects["StatefulSet", "shop-pool"] == before


def test_redis_comes_back_on_a_new_volume_when_no_pod_holds_the_old_one() -> None:
    cluster = going_pool()
    for pod in cluster.names("Pod", "pool"):
        del cluster.objects["Pod", pod]
    cluster.deployment = deployment(generation=2, pool={"managed": {"memoryMiB": 256}})
    before = cluster.objects["StatefulSet", "shop-pool"]
    cluster.reconcile()
    assert cluster.objects["StatefulSet", "shop-pool"] != before


def test_a_model_volume_that_is_being_deleted_is_told() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.settle()
    [claim] = [name for name in cluster.names("PersistentVolumeClaim") if "model" in name]
    cluster.objects["PersistentVolumeClaim", claim]["metadata"]["deletionTimestamp"] = AT
    found = told(cluster.observed)
    assert (found["ModelReady"][1], claim in found["ModelReady"][2]) == ("VolumeIsGoing", True)
