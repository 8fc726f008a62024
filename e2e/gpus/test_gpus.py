"""Two groups of two stages on three GPUs: a group gets all that it needs or gives back what it has.

The GPUs are a number patched into a node, as its device plugin would write it; the cluster's own scheduler hands them
out, and the stages compute on the processor.
"""

import json
import secrets
import time

import pytest

from cluster.kubernetes.kubectl import Kubectl
from conftest import SPEC, answers
from figures import note
from installation import Service, install_chart, wait_until
from load import Load

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(600)]

GPU = f"example.com/gpu-{secrets.token_hex(3)}"
"""Named anew for each run: what is patched into a node stays."""
STARTUP_S = 15


def give_gpus(kubectl: Kubectl, count: int) -> None:
    node = kubectl.get("nodes")["items"][-1]["metadata"]["name"]
    patch = [{"op": "add", "path": f"/status/capacity/{GPU.replace('/', '~1')}", "value": str(count)}]
    kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={json.dumps(patch)}")


def test_the_group_that_does_not_fit_gives_way_and_comes_when_there_is_room(kubectl: Kubectl, namespace: str) -> None:
    give_gpus(kubectl, 3)
    install_chart()
    service = Service(kubectl, namespace)
    service.create(
        {
            **SPEC,
            "replicas": 2,
            "parallelism": {"stages": 2},
            "startupSeconds": STARTUP_S,
            "worker": {**SPEC["worker"], "resources": {"limits": {GPU: "1"}}},
            "gateway": {**SPEC["gateway"], "ingress": service.ingress},
        }
    )
    wait_until(lambda: ready_groups(service) == 1, service.story, within_s=120)
    load = Load(service)
    wait_until(lambda: answers(load), service.story)
    with load.running():
        wait_until(lambda: "has given way" in service.condition("WorkersReady")[2], service.story)
        assert service.condition("WorkersReady")[:2] == ("False", "NoCapacity"), service.story()
        wait_until(lambda: len(service.pods("stage")) == 2, service.story)
        assert all("nodeName" in pod["spec"] for pod in service.pods("stage")), "it has not given back what it had"
        give_gpus(kubectl, 4)
        began = time.monotonic()
        service.wait_settled()
        seconds = time.monotonic() - began
    note("two groups of two on three GPUs", {"second one serves after": round(seconds, 1), **load.summary()})
    load.check()
    assert ready_groups(service) == 2, service.story()


def ready_groups(service: Service) -> int:
    """None before the operator has looked."""
    found: int = service.get().get("status", {}).get("groups", {}).get("ready", 0)
    return found
