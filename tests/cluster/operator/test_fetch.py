"""A model is fetched: the operator, the API server and the Job controller are the real ones, the pods are simulated."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from orca.operator.domain import names
from support.operator.api_server import ApiServer
from support.operator.fake_nodes import NOW, FakeNodes, Json
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("operator"), pytest.mark.timeout(400)]

URI = "hf://org/model"


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[FakeNodes]:
    with FakeNodes(server, {"one": {}}) as nodes:
        yield nodes


@pytest.fixture
def on_paper(shop: Shop) -> Iterator[Json]:
    """A model whose volume is there; what is made of it is gone behind the test."""
    claimed = {
        "metadata": {"name": shop.namespace},
        "spec": {
            "storageClassName": shop.namespace,
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/nowhere"},
        },
    }
    shop.core.create_persistent_volume(claimed)
    yield {"uri": URI, "cache": {"sizeGiB": 1, "storageClassName": shop.namespace}}
    shop.delete()


def ended(exit_code: int, message: str = "") -> Json:
    """Return what a kubelet reports of a pod whose container has ended."""
    how = {"exitCode": exit_code, "message": message, "reason": "Error", "startedAt": NOW, "finishedAt": NOW}
    return {"phase": "Failed" if exit_code else "Succeeded", "state": {"terminated": how}}


def fetches_say(nodes: FakeNodes, said: Json | None) -> None:
    """All other pods run."""

    def says(pod: Any) -> Json | None:
        return said if pod.metadata.labels.get(names.ROLE_LABEL) == "fetch" else None

    nodes.says = says


def fetch_pods(shop: Shop) -> list[str]:
    found = shop.core.list_namespaced_pod(shop.namespace, label_selector=f"{names.ROLE_LABEL}=fetch").items
    return [pod.metadata.name for pod in found]


def test_pods_that_read_a_model_are_created_after_its_fetch(shop: Shop, nodes: FakeNodes, on_paper: Json) -> None:
    fetches_say(nodes, None)
    shop.create(model=on_paper)
    shop.wait_for("ModelReady", "False", "ModelLoading")
    wait_until(lambda: fetch_pods(shop) != [], WITHIN_S)
    assert (shop.groups(), shop.apps.list_namespaced_deployment(shop.namespace).items) == ([], [])
    fetches_say(nodes, ended(0))
    shop.wait_for("ModelReady", "True", "Fetched")
    shop.wait_for("Ready", "True", "Serving")


def test_gateways_that_wait_for_a_fetch_keep_their_model_while_the_resource_is_suspended(
    shop: Shop, nodes: FakeNodes, on_paper: Json
) -> None:
    fetches_say(nodes, None)
    shop.create()
    shop.wait_for("Ready", "True", "Serving")
    [before] = shop.apps.list_namespaced_deployment(shop.namespace).items
    shop.edit(model=on_paper, suspend=True)
    shop.wait_for("GatewayReady", "False", "Suspended")

    def gateways() -> tuple[int, Any]:
        [found] = shop.apps.list_namespaced_deployment(shop.namespace).items
        return found.spec.replicas, found.spec.template.spec.containers[0].args

    wait_until(lambda: gateways()[0] == 0, WITHIN_S)
    assert gateways() == (0, before.spec.template.spec.containers[0].args)
    wait_until(lambda: shop.groups() == [], WITHIN_S)
    shop.edit(model={"uri": "file:///m", "cache": None}, suspend=False)
    shop.wait_for("Ready", "True", "Serving")


def test_a_fetch_with_a_permanent_failure_ends_with_its_reason(
    shop: Shop, nodes: FakeNodes, on_paper: Json, server: ApiServer
) -> None:
    fetches_say(nodes, ended(2, f"ModelDenied: {URI}: revision main: HTTP 401"))
    shop.create(model=on_paper)
    shop.wait_for("ModelReady", "False", "ModelDenied")
    jobs = client.BatchV1Api(server.api())

    def has_failed() -> bool:
        [job] = jobs.list_namespaced_job(shop.namespace).items
        return any(each.type == "Failed" and each.reason == "PodFailurePolicy" for each in job.status.conditions or [])

    wait_until(has_failed, WITHIN_S)
    assert len(fetch_pods(shop)) == 1


def test_a_fetch_with_a_transient_failure_is_retried(shop: Shop, nodes: FakeNodes, on_paper: Json) -> None:
    fetches_say(nodes, ended(1, f"ModelUnreachable: {URI}: revision main: HTTP 503"))
    shop.create(model=on_paper)
    shop.wait_for("ModelReady", "False", "ModelUnreachable")
    shop.wait_for("Degraded", "True", "ModelUnreachable")
    fetches_say(nodes, ended(0))
    shop.wait_for("Ready", "True", "Serving")
    assert len(fetch_pods(shop)) > 1


def test_a_fetched_model_stays_when_its_finished_job_is_cleaned_up(
    shop: Shop, nodes: FakeNodes, on_paper: Json, server: ApiServer
) -> None:
    fetches_say(nodes, ended(0))
    shop.create(model=on_paper)
    shop.wait_for("Ready", "True", "Serving")
    jobs = client.BatchV1Api(server.api())
    wait_until(lambda: mark(shop) is not None, WITHIN_S)
    jobs.delete_collection_namespaced_job(shop.namespace, propagation_policy="Background")
    wait_until(lambda: jobs.list_namespaced_job(shop.namespace).items == [], WITHIN_S)
    shop.edit(replicas=2, model={**on_paper, "cache": {"sizeGiB": 1}})
    shop.wait_for("Ready", "True", "Serving")
    assert (len(shop.groups()), jobs.list_namespaced_job(shop.namespace).items) == (2, [])
    assert mark(shop) is not None


def mark(shop: Shop) -> str | None:
    """Return the mark of the model's claim."""
    selector = f"{names.ROLE_LABEL}={names.FETCH}"
    [claim] = shop.core.list_namespaced_persistent_volume_claim(shop.namespace, label_selector=selector).items
    return (claim.metadata.annotations or {}).get(names.FETCHED_ANNOTATION)


def test_a_fetch_gets_another_shape_while_it_runs(
    shop: Shop, nodes: FakeNodes, on_paper: Json, server: ApiServer
) -> None:
    fetches_say(nodes, None)
    shop.create(model=on_paper)
    wait_until(lambda: fetch_pods(shop) != [], WITHIN_S)
    shop.edit(fetch={"podPatchRemove": ["/spec/securityContext/runAsUser"], "resources": {"limits": {"cpu": "1"}}})
    jobs = client.BatchV1Api(server.api())

    def users_and_limits() -> list[tuple[Any, Any]]:
        templates = [each.spec.template.spec for each in jobs.list_namespaced_job(shop.namespace).items]
        return [(each.security_context.run_as_user, each.containers[0].resources.limits) for each in templates]

    wait_until(lambda: users_and_limits() == [(None, {"cpu": "1", "memory": "1Gi"})], WITHIN_S, users_and_limits)
    fetches_say(nodes, ended(0))
    shop.wait_for("Ready", "True", "Serving")


def test_a_fetched_model_in_the_wanted_state_is_not_written(
    shop: Shop, nodes: FakeNodes, on_paper: Json, operator: OperatorProcess
) -> None:
    fetches_say(nodes, ended(0))
    shop.create(model=on_paper)
    shop.wait_for("Ready", "True", "Serving")
    operator.kill()
    before = len(operator.log)
    operator.start()
    wait_until(lambda: "operator (" in operator.log[before:], WITHIN_S)
    shop.edit(replicas=2)
    wait_until(lambda: len(shop.groups()) == 2, WITHIN_S)
    told = [text.count("child=shop-model") for text in (operator.log[:before], operator.log[before:])]
    assert (told[0] > 0, told[1]) == (True, 0)
