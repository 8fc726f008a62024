"""Pods that die without a word: the client that resumes gets every answer whole, and the service mends itself."""

import time

import pytest

from figures import note
from installation import Service, wait_until
from load import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool"])
def test_a_pod_is_deleted_by_force(service: Service, load: Load, role: str) -> None:
    with load.running():
        time.sleep(2)  # so that streams are open
        began = time.monotonic()
        before = service.pod_ids()
        victim = service.pods(role)[0]["metadata"]["name"]
        service.kubectl("delete", "pod", victim, "--force", "--grace-period=0", f"--namespace={service.namespace}")
        wait_until(lambda: bool(service.pod_ids() - before), service.story)
        service.wait_settled()
        seconds = time.monotonic() - began
        time.sleep(2)
    figures = {"seconds": round(seconds, 1), "resuming": load.resuming.summary(), "plain": load.plain.summary()}
    note(f"force delete {role}", figures)
    assert not load.resuming.failed, load.resuming.failed[0]
    assert not load.resuming.wrong, load.resuming.wrong[0]
    assert not load.plain.wrong, load.plain.wrong[0]
