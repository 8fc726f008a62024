"""Pods that die without warning: the resuming client gets every whole answer, and the service repairs itself."""

import time

import pytest

from figures import record_figures
from installation import Service, uids, wait_until
from load import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool"])
def test_a_pod_is_deleted_by_force(service: Service, load: Load, role: str) -> None:
    before = uids(service.pods())
    with load.running():
        began = time.monotonic()
        victim = service.pods(role)[0]["metadata"]["name"]
        service.kubectl("delete", "pod", victim, "--force", "--grace-period=0", f"--namespace={service.namespace}")
        wait_until(lambda: bool(uids(service.pods()) - before), service.describe)
        service.wait_until_settled()
        seconds = time.monotonic() - began
    judge(f"force delete {role}", load, seconds)


def test_a_resource_is_deleted_and_made_again(service: Service, load: Load) -> None:
    """All of its pods end. The pool's volume and the Secrets stay, and with them the accepted requests."""
    resource = service.get()
    with load.running():
        began = time.monotonic()
        service.kubectl("delete", "orca", service.name, f"--namespace={service.namespace}")
        service.create(resource["spec"])
        service.wait_until_settled()
        seconds = time.monotonic() - began
    judge("delete and re-create with all pods", load, seconds)


def judge(name: str, load: Load, seconds: float) -> None:
    """Check that no client got a wrong answer, and that the resuming one misses none."""
    record_figures(name, {"seconds": round(seconds, 1), **load.summary()})
    load.check_resuming()
