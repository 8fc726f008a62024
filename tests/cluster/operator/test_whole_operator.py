"""The operator as a process, against a real API server with the real controllers, on simulated nodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from support.operator.api_server import ApiServer
from support.operator.fake_nodes import FakeNodes
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

# Wide: a reconcile takes 0.1 s, and three processes of tests share two processors.
pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[FakeNodes]:
    with FakeNodes(server, {"one": {}, "two": {}}) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def everything_runs(nodes: FakeNodes) -> Iterator[FakeNodes]:
    yield nodes
    nodes.says = lambda _: None


def test_a_resource_becomes_ready_and_its_parts_belong_to_it(shop: Shop) -> None:
    shop.create(replicas=2)
    shop.wait_for("Ready", "True", "Serving")
    status = shop.status()
    assert status["groups"] == {"total": 2, "ready": 2, "desired": 2, "updated": 2, "summary": "2/2"}
    for each in shop.apps.list_namespaced_stateful_set(shop.namespace).items:
        assert each.metadata.owner_references[0].kind == "OrcaDeployment"


def test_a_resource_in_the_wanted_state_is_not_written(shop: Shop, operator: OperatorProcess) -> None:
    shop.create()
    shop.wait_for("Ready", "True")
    before = operator.log.count("apply (")
    written = shop.status()
    operator.kill()
    operator.start()
    wait_until(lambda: operator.log.count("operator (") == 2, WITHIN_S)
    wait_until(lambda: operator.reconciles() >= 2, WITHIN_S, lambda: operator.log[-2000:])
    assert shop.status() == written
    assert operator.log.count("apply (") == before


@pytest.mark.slow
def test_scaling_edits_and_a_revert_reach_the_spec(shop: Shop) -> None:
    shop.create()
    shop.wait_for("Ready", "True")
    [first] = shop.groups()
    shop.edit(replicas=3)
    shop.edit(parallelism={"stages": 2})
    shop.edit(parallelism={"stages": 1})
    shop.wait_for("Ready", "True", "Serving")
    wait_until(lambda: len(shop.groups()) == 3, WITHIN_S, lambda: str(shop.groups()))
    assert first in shop.groups()
    shop.edit(replicas=0)
    shop.wait_for("Ready", "True", "Holding")
    wait_until(lambda: shop.groups() == [], WITHIN_S, lambda: str(shop.groups()))


def test_deleted_and_changed_objects_are_restored(shop: Shop, operator: OperatorProcess) -> None:
    shop.create()
    shop.wait_for("Ready", "True")
    [group] = shop.groups()
    gone = shop.apps.read_namespaced_stateful_set(group, shop.namespace).metadata.uid
    shop.apps.delete_namespaced_stateful_set(group, shop.namespace)
    shop.apps.patch_namespaced_deployment("shop-gateway", shop.namespace, {"spec": {"replicas": 5}})

    def is_back() -> bool:
        deployment = shop.apps.read_namespaced_deployment("shop-gateway", shop.namespace)
        found = shop.apps.list_namespaced_stateful_set(shop.namespace).items
        names = {each.metadata.name: each.metadata.uid for each in found}
        return deployment.spec.replicas == 1 and names.get(group, gone) != gone

    wait_until(is_back, WITHIN_S, lambda: operator.log[-2000:])
    shop.wait_for("Ready", "True")


def test_what_somebody_adds_stays_and_the_resource_is_ready(shop: Shop, operator: OperatorProcess) -> None:
    """Add what `kubectl set env`, Reloader, Kyverno and GKE Autopilot add."""
    shop.create()
    shop.wait_for("Ready", "True")
    container = {"name": "gateway", "env": [{"name": "ADDED", "value": "1"}]}
    pod: dict[str, Any] = {"containers": [container], "imagePullSecrets": [{"name": "his"}]}
    read = shop.apps.read_namespaced_deployment("shop-gateway", shop.namespace).spec.template.spec
    pod["tolerations"] = [each.to_dict() for each in read.tolerations] + [{"key": "arch", "operator": "Exists"}]
    for each in pod["tolerations"]:
        each["tolerationSeconds"] = each.pop("toleration_seconds", None)
    body = {"spec": {"template": {"spec": pod}}}
    shop.apps.patch_namespaced_deployment("shop-gateway", shop.namespace, body)
    before = operator.reconciles()
    wait_until(lambda: operator.reconciles() >= before + 4, WITHIN_S, lambda: operator.log[-2000:])
    shop.wait_for("Ready", "True")
    assert shop.condition("Accepted")[0] == "True"
    there = shop.apps.read_namespaced_deployment("shop-gateway", shop.namespace).spec.template.spec
    assert "ADDED" in [each.name for each in there.containers[0].env]
    assert "arch" in [each.key for each in there.tolerations]
    assert "somebody has changed" not in operator.log_about(shop.namespace)


@pytest.mark.slow
def test_a_resource_that_is_deleted_leaves_no_groups_while_no_operator_runs(
    shop: Shop, operator: OperatorProcess
) -> None:
    shop.create()
    shop.wait_for("Ready", "True")
    operator.kill()
    shop.delete()
    wait_until(lambda: shop.groups() == [], WITHIN_S)
    wait_until(lambda: shop.apps.list_namespaced_deployment(shop.namespace).items == [], WITHIN_S)


@pytest.mark.slow
def test_a_restarted_operator_applies_what_it_missed(shop: Shop, operator: OperatorProcess) -> None:
    shop.create()
    shop.wait_for("Ready", "True")
    operator.kill()
    shop.edit(replicas=2)
    operator.start()
    shop.wait_for("Ready", "True", "Serving")
    assert len(shop.groups()) == 2


def test_an_operator_shuts_down_cleanly_on_sigterm(operator: OperatorProcess) -> None:
    wait_until(lambda: "operator (" in operator.log, WITHIN_S, lambda: operator.log)
    assert operator.stop() == 0


@pytest.mark.slow
def test_a_crash_is_reported_with_its_pod_and_last_log_lines_until_it_is_fixed(shop: Shop, nodes: FakeNodes) -> None:
    ended = {"exitCode": 2, "message": "setting model: /m is not a folder", "reason": "Error"}
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
    nodes.says = lambda pod: waiting if pod.metadata.labels["orca-serving.io/role"] == "stage" else None
    shop.create()
    shop.wait_for("Degraded", "True", "BadConfiguration")
    [told] = [each for each in shop.status()["conditions"] if each["type"] == "WorkersReady"]
    assert told["message"].endswith("container stage: setting model: /m is not a folder")
    nodes.says = lambda _: None
    shop.wait_for("Degraded", "False")
    shop.wait_for("Ready", "True")


def message(shop: Shop, kind: str) -> str:
    [told] = [str(each["message"]) for each in shop.status()["conditions"] if each["type"] == kind]
    return told


@pytest.mark.slow
def test_pods_that_a_quota_forbids_are_told_in_its_words_until_there_is_room(shop: Shop) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    shop.core.create_namespaced_resource_quota(shop.namespace, quota)
    shop.create()
    shop.wait_for("Degraded", "True", "PodsForbidden")
    conditions = [each for each in shop.status()["conditions"] if each["reason"] == "PodsForbidden"]
    assert all("exceeded quota: few" in each["message"] for each in conditions)
    shop.core.delete_namespaced_resource_quota("few", shop.namespace)
    shop.wait_for("Ready", "True")


@pytest.mark.slow
def test_a_fetch_that_a_quota_forbids_is_told(shop: Shop) -> None:
    quota = {"metadata": {"name": "limits"}, "spec": {"hard": {"limits.cpu": "8"}}}
    shop.core.create_namespaced_resource_quota(shop.namespace, quota)
    shop.create(model={"uri": "hf://org/model"})
    shop.wait_for("ModelReady", "False", "PodsForbidden")
    assert "must specify limits.cpu" in message(shop, "ModelReady")
    shop.wait_for("Degraded", "True", "PodsForbidden")


def test_an_ingress_is_reached_when_its_controller_has_given_it_an_address(shop: Shop, server: ApiServer) -> None:
    shop.create(gateway={"ingress": {"host": "a.example", "className": "nobody"}})
    shop.wait_for("SchedulerReady", "True")
    shop.wait_for("GatewayReady", "False", "RouteStarting")
    assert shop.status()["url"] == f"http://shop.{shop.namespace}.svc/v1"
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}
    client.NetworkingV1Api(server.api()).patch_namespaced_ingress_status("shop", shop.namespace, status)
    shop.wait_for("Ready", "True", "Serving")
    assert shop.status()["url"] == "http://a.example/v1"


@pytest.mark.slow
def test_a_group_without_a_node_is_reported_and_the_next_one_waits(shop: Shop) -> None:
    shop.create(replicas=2, worker={"device": "cuda"})
    shop.wait_for("WorkersReady", "False", "NoCapacity")
    assert len(shop.groups()) == 1


@pytest.mark.slow
def test_a_group_that_finds_no_nodes_is_paused_with_all_of_its_pods(shop: Shop) -> None:
    shop.create(worker={"device": "cuda"}, parallelism={"stages": 2}, startupSeconds=10)
    wait_until(lambda: len(shop.groups()) == 1, WITHIN_S)
    [group] = shop.groups()

    def is_away() -> bool:
        of_group = f"orca-serving.io/group={group}"
        sets = shop.apps.list_namespaced_stateful_set(shop.namespace, label_selector=of_group).items
        pods = shop.core.list_namespaced_pod(shop.namespace, label_selector=of_group).items
        told = [each["message"] for each in shop.status().get("conditions", []) if each["type"] == "WorkersReady"]
        return [each.spec.replicas for each in sets] == [0, 0] and not pods and "has given way" in " ".join(told)

    wait_until(is_away, WITHIN_S, lambda: str(shop.status()))


@pytest.mark.slow
def test_a_new_resource_rolls_over_to_another_model_without_a_gap(shop: Shop) -> None:
    shop.create()
    shop.wait_for("Ready", "True")
    [old] = shop.groups()
    shop.edit(model={"uri": "file:///other"})
    seen: list[list[str]] = []

    def is_over() -> bool:
        seen.append(shop.groups())
        return shop.condition("Ready") == ("True", "Serving") and len(seen[-1]) == 1

    wait_until(is_over, WITHIN_S, lambda: str(seen[-5:]))
    assert all(seen)
    assert shop.groups() != [old]


def test_objects_of_another_owner_are_left_unchanged(shop: Shop) -> None:
    port = {"port": 80, "protocol": "TCP"}
    shop.core.create_namespaced_service(
        shop.namespace, {"metadata": {"name": "shop"}, "spec": {"selector": {"app": "his"}, "ports": [port]}}
    )
    shop.create()
    shop.wait_for("Accepted", "False", "Refused")
    [told] = [each for each in shop.status()["conditions"] if each["type"] == "Accepted"]
    assert "Service shop exists already" in told["message"]
    shop.wait_for("SchedulerReady", "True")
    his = shop.core.read_namespaced_service("shop", shop.namespace)
    assert his.spec.selector == {"app": "his"}
    assert his.metadata.owner_references is None


@pytest.mark.slow
def test_a_cluster_without_the_gateway_api_still_serves_and_reports_it(shop: Shop) -> None:
    shop.create(gateway={"httpRoute": {"parentRefs": [{"name": "edge"}]}})
    shop.wait_for("Accepted", "False", "Refused")
    shop.wait_for("SchedulerReady", "True")


@pytest.mark.slow
def test_a_changed_status_causes_no_reconcile(shop: Shop, server: ApiServer, tmp_path: Path) -> None:
    shop.create()
    shop.wait_for("Ready", "True", "Serving")
    own = OperatorProcess(server, tmp_path / "own.log", "--namespaces", shop.namespace, "--resync-seconds", "3600")
    own.start()
    try:
        wait_until(lambda: "operator (" in own.log, WITHIN_S, lambda: own.log)
        wait_until(lambda: own.reconciles() > 0, WITHIN_S)
        looks = own.reconciles()
        for number in range(300):
            shop.note_queued(number)
        # The watches of the children begin one after the other, each with news.
        assert own.reconciles() - looks <= 15
    finally:
        own.kill()
