"""Two groups of two stages on three GPUs: a group gets all GPUs that it needs, or releases those that it has.

The GPUs are those of devices.py.
"""

import time

import pytest

from cluster.kubernetes.kubectl import Kubectl
from devices import give_devices, new_device
from figures import record_figures
from installation import SPEC, Service, install_chart, wait_until
from load import Load, is_answering

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(600)]

GPU = new_device()
STARTUP_S = 15


def test_the_group_that_does_not_fit_gives_way_and_comes_when_there_is_room(kubectl: Kubectl, namespace: str) -> None:
    give_devices(kubectl, GPU, 3)
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
    wait_until(lambda: ready_groups(service) == 1, service.describe, within_s=120)
    load = Load(service)
    wait_until(lambda: is_answering(load), service.describe)
    with load.running():
        wait_until(lambda: "has given way" in service.condition("WorkersReady")[2], service.describe)
        assert service.condition("WorkersReady")[:2] == ("False", "NoCapacity"), service.describe()
        wait_until(lambda: len(service.pods("stage")) == 2, service.describe)
        assert all("nodeName" in pod["spec"] for pod in service.pods("stage")), "it has not released its GPU"
        give_devices(kubectl, GPU, 4)
        began = time.monotonic()
        service.wait_until_settled()
        seconds = time.monotonic() - began
    record_figures("two groups of two on three GPUs", {"second one serves after": round(seconds, 1), **load.summary()})
    load.check()
    assert ready_groups(service) == 2, service.describe()


def ready_groups(service: Service) -> int:
    """Return the number of ready groups; 0 before the operator has observed the resource."""
    found: int = service.get().get("status", {}).get("groups", {}).get("ready", 0)
    return found
