"""Operators of two releases on a real API server: each resource is served by one of them."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from kubernetes import client

from support.operator.api_server import ApiServer
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Start = Callable[[str], OperatorProcess]


@pytest.fixture
def start(server: ApiServer, shop: Shop, tmp_path: Path) -> Iterator[Start]:
    """Start the operator of a release, with images and a Lease of its own."""
    with ExitStack() as ends:

        def begin(release: str) -> OperatorProcess:
            where = ("--namespaces", shop.namespace, "--lease-namespace", shop.namespace)
            lease = ("--lease", release, "--lease-identity", f"{release}-pod")
            images = ("--image-gateway", f"gateway:{release}", "--image-worker", f"worker:{release}")
            operator = OperatorProcess(server, tmp_path / f"{release}.log", *where, *lease, *images)
            operator.start()
            ends.callback(kill, operator)
            return operator

        yield begin


def kill(operator: OperatorProcess) -> None:
    with suppress(ProcessLookupError):
        operator.kill()


def wait_to_serve(shop: Shop, release: str) -> None:
    def is_served() -> bool:
        return shop.status().get("operator") == f"{shop.namespace}/{release}" and images(shop) == [f"gateway:{release}"]

    wait_until(is_served, WITHIN_S, lambda: f"{shop.status()} {images(shop)}")
    shop.wait_for("SchedulerReady", "False")


def images(shop: Shop) -> list[str]:
    """Return the images of the gateways."""
    return [
        each.spec.template.spec.containers[0].image
        for each in shop.apps.list_namespaced_deployment(shop.namespace).items
    ]


def generations(shop: Shop) -> dict[str, int]:
    """Return the generation of each Deployment and StatefulSet: it counts how often its spec was changed."""
    found = [
        *shop.apps.list_namespaced_deployment(shop.namespace).items,
        *shop.apps.list_namespaced_stateful_set(shop.namespace).items,
    ]
    return {each.metadata.name: each.metadata.generation for each in found}


def events(shop: Shop, reason: str) -> list[str]:
    found = shop.core.list_namespaced_event(shop.namespace, field_selector=f"reason={reason}").items
    return [str(each.message) for each in found]


def choose(server: ApiServer, shop: Shop, release: str) -> None:
    annotations = {"orca-serving.io/operator": f"{shop.namespace}/{release}"}
    where = ("orca-serving.io", "v1alpha1", shop.namespace, "orcadeployments", "shop")
    objects = client.CustomObjectsApi(server.api())
    objects.patch_namespaced_custom_object(*where, {"metadata": {"annotations": annotations}})


def test_a_second_release_leaves_a_resource_alone_until_it_is_handed_over(
    shop: Shop, server: ApiServer, start: Start
) -> None:
    blue = start("blue")
    shop.create()
    wait_to_serve(shop, "blue")
    before = generations(shop)

    green = start("green")
    wait_until(lambda: events(shop, "ServedByAnother"), WITHIN_S, lambda: green.log)
    # Some of its regular reconciles.
    seen = green.reconciles()
    wait_until(lambda: green.reconciles() >= seen + 3, WITHIN_S, lambda: green.log)
    assert generations(shop) == before
    assert len(events(shop, "ServedByAnother")) == 1
    assert [each.metric("orca_operator_resources_of_others") for each in (blue, green)] == [0, 1]

    choose(server, shop, "green")
    wait_to_serve(shop, "green")
    wait_until(lambda: blue.metric("orca_operator_resources_of_others") == 1, WITHIN_S, lambda: blue.log)
    assert len(events(shop, "Released")) == 1
    # The other release has another image for stages, so a group comes beside the first one.
    wait_until(lambda: len(shop.schedulers()) == 2, WITHIN_S, lambda: green.log)
    before = generations(shop)
    time.sleep(5)  # more than two regular reconciles of both
    assert generations(shop) == before


def test_one_of_two_releases_that_start_together_serves_a_new_resource(shop: Shop, start: Start) -> None:
    operators = [start("blue"), start("green")]
    for operator in operators:
        wait_until(lambda each=operator: "holds the Lease" in each.log, WITHIN_S, lambda each=operator: each.log)
    shop.create()
    wait_until(lambda: shop.status().get("operator"), WITHIN_S, lambda: str(shop.status()))
    owner = shop.status()["operator"].partition("/")[2]
    wait_to_serve(shop, owner)
    wait_until(lambda: events(shop, "ServedByAnother"), WITHIN_S, lambda: operators[0].log + operators[1].log)
    assert set(images(shop)) == {f"gateway:{owner}"}
    writes = [each.log.count("apply") for each in operators]
    assert min(writes) == 0 < max(writes)


def test_a_write_of_the_status_keeps_the_name_of_the_operator(shop: Shop, start: Start) -> None:
    start("blue")
    shop.create()
    wait_to_serve(shop, "blue")
    shop.edit(gateway={"replicas": 2})
    wait_until(lambda: shop.status()["observedGeneration"] == 2, WITHIN_S, lambda: str(shop.status()))
    assert shop.status()["operator"] == f"{shop.namespace}/blue"
    assert [each["type"] for each in shop.status()["conditions"]] != []
