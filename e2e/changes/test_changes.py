"""Every planned change of a running service, with streams open: nothing fails, and nobody reads another answer.

The plain client may wait, as it does when the pool holds its request while no group runs, and it may try again what a
gateway refused; a stream that broke, an error or another text fails the scenario.
"""

import json
import time
from collections.abc import Callable

import pytest

from figures import note
from installation import Service, wait_until
from load import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def under_load(name: str, service: Service, load: Load, change: Callable[[], None]) -> dict[str, object]:
    """The change with the load around it, judged. Returns: its figures."""
    before = service.pod_ids()
    with load.running():
        time.sleep(2)  # so that streams are open
        began = time.monotonic()
        change()
        seconds = time.monotonic() - began
        time.sleep(2)  # and some begin behind it
    after = service.pod_ids()
    figures: dict[str, object] = {
        "seconds": round(seconds, 1),
        "new_pods": len(after - before),
        "plain": load.plain.summary(),
        "resuming": load.resuming.summary(),
    }
    note(name, figures)
    load.check()
    return figures


def edited(service: Service, **spec: object) -> Callable[[], None]:
    def change() -> None:
        service.edit(**spec)
        service.wait_settled()

    return change


@pytest.mark.parametrize("replicas", [2, 1])
def test_groups_come_and_go(service: Service, load: Load, replicas: int) -> None:
    def change() -> None:
        service.scale(replicas)
        service.wait_settled()

    under_load(f"scale to {replicas}", service, load, change)


def test_without_groups_requests_are_held_and_answered_later(service: Service, load: Load) -> None:
    def change() -> None:
        service.scale(0)
        service.wait_for("Ready", "True", "Holding")
        wait_until(lambda: not service.pods("stage"), service.story)
        time.sleep(5)
        service.scale(1)
        service.wait_settled()

    under_load("scale 1 to 0 to 1", service, load, change)


@pytest.mark.parametrize("stages", [2, 1])
def test_the_model_is_divided_anew(service: Service, load: Load, stages: int) -> None:
    under_load(f"stages {stages}", service, load, edited(service, parallelism={"stages": stages}))


@pytest.mark.parametrize("tensor", [2, 1])
def test_stages_are_divided_anew(service: Service, load: Load, tensor: int) -> None:
    under_load(f"tensor {tensor}", service, load, edited(service, parallelism={"tensor": tensor}))


def test_a_batch_size_restarts_nothing(service: Service, load: Load) -> None:
    [pod] = service.pods("scheduler")
    name = pod["metadata"]["name"]

    def change() -> None:
        service.edit(scheduler={"maxBatchSize": 8})
        wait_until(
            lambda: (
                '"max_batch_size":8'
                in service.kubectl("logs", name, f"--namespace={service.namespace}").replace(" ", "")
            )
        )

    figures = under_load("batch size 16 to 8", service, load, change)
    assert figures["new_pods"] == 0


@pytest.mark.parametrize("replicas", [3, 1])
def test_gateways_come_and_go(service: Service, load: Load, replicas: int) -> None:
    def change() -> None:
        service.edit(gateway={"replicas": replicas})
        wait_until(lambda: len(service.pods("gateway")) == replicas, service.story, within_s=120)
        service.wait_settled()

    under_load(f"gateways {replicas}", service, load, change)


def test_gateways_are_replaced(service: Service, load: Load) -> None:
    """As by a new image: every gateway pod is another one."""
    old = {pod["metadata"]["uid"] for pod in service.pods("gateway")}

    def change() -> None:
        service.edit(gateway={"podPatch": {"metadata": {"annotations": {"made": "anew"}}}})
        wait_until(
            lambda: not old & {pod["metadata"]["uid"] for pod in service.pods("gateway")}, service.story, within_s=180
        )
        service.wait_settled()

    under_load("gateways replaced", service, load, change)


def test_groups_are_replaced(service: Service, load: Load) -> None:
    """As by a new image: a new group forms beside the old one, and the old one goes."""
    patch = {"metadata": {"annotations": {"made": "anew"}}}
    figures = under_load("stages replaced", service, load, edited(service, worker={"podPatch": patch}))
    assert figures["new_pods"] == 2


def test_a_revert_in_the_middle_of_a_rollout(service: Service, load: Load) -> None:
    [before] = [pod["metadata"]["uid"] for pod in service.pods("stage")]

    def change() -> None:
        service.edit(parallelism={"stages": 2})
        wait_until(lambda: len(service.pods("stage")) == 3, service.story)
        service.edit(parallelism={"stages": 1})
        service.wait_settled()

    under_load("revert in mid-rollout", service, load, change)
    assert [pod["metadata"]["uid"] for pod in service.pods("stage")] == [before]


def test_three_edits_in_quick_succession(service: Service, load: Load) -> None:
    def change() -> None:
        service.edit(parallelism={"stages": 2})
        service.edit(scheduler={"prefetch": 0})
        service.edit(replicas=2, parallelism={"stages": 1})
        service.wait_settled()
        service.edit(replicas=1, scheduler={"prefetch": 1})
        service.wait_settled()

    under_load("three edits", service, load, change)


def test_a_resource_is_replaced_by_kubectl(service: Service, load: Load) -> None:
    def change() -> None:
        found = service.get()
        found.pop("status")
        found["spec"]["scheduler"]["maxBatchSize"] = 16
        service.kubectl("replace", "--filename=-", entered=json.dumps(found))
        service.wait_settled()

    under_load("kubectl replace", service, load, change)
