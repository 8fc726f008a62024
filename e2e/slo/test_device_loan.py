"""Groups have all devices when a resource gets a goal: one lends its own to the profile, and the other one serves.

Nothing fails and no answer is wrong, though the operator dies while a group is away.
"""

import time
from collections.abc import Callable

import pytest

from cluster.kubernetes.kubectl import Kubectl
from devices import give_devices, new_device
from figures import record_figures
from installation import SPEC, Service, install_chart, kill_operator, wait_until
from load import Load, is_answering
from planned import PLAN_S, WORKER, of_role

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(1800)]

GROUPS = 2
DEVICE = new_device()


def test_a_group_lends_its_device_to_the_profile_and_comes_back(kubectl: Kubectl, namespace: str) -> None:
    give_devices(kubectl, DEVICE, GROUPS)
    install_chart()
    service = Service(kubectl, namespace)
    worker = {**WORKER, "resources": {**WORKER["resources"], "limits": {DEVICE: "1"}}}
    gateway = {**SPEC["gateway"], "ingress": service.ingress}
    service.create({**SPEC, "replicas": GROUPS, "worker": worker, "gateway": gateway})
    service.wait_until_settled()
    load = Load(service)
    wait_until(lambda: is_answering(load), service.describe)
    steps: tuple[Callable[[], bool], ...] = (
        lambda: service.condition("WorkersReady")[1] == "DevicesLent",
        lambda: any("nodeName" in pod["spec"] for pod in of_role(service, "pods", "profile")),
    )
    with load.running():
        began = time.monotonic()
        service.edit(slo={"latencyMs": 120_000, "devices": 1, "workload": {"lengths": "8:32/60:120"}})
        for is_reached in steps:
            wait_until(is_reached, service.describe, within_s=PLAN_S)
            assert len(service.pods("scheduler")) >= GROUPS - 1, service.describe()
            kill_operator(kubectl)
        measures_s = time.monotonic() - began
        service.wait_for("PlanReady", "True", within_s=PLAN_S)
        plan_s = time.monotonic() - began
        service.wait_until_settled()
        groups_s = time.monotonic() - began
    record_figures(
        "slo: a group lends its device to the profile, operator killed at each step",
        {
            "profile_begins_s": round(measures_s, 1),
            "plan_ready_s": round(plan_s, 1),
            "all_groups_serve_s": round(groups_s, 1),
            "operators_killed": len(steps),
            **load.summary(),
        },
    )
    load.check()
    assert len(service.pods("scheduler")) == GROUPS, service.describe()
