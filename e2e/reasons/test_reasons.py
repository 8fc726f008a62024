"""Reasons why a service does not serve: causes each, and measures the seconds until a condition names it and clears.

An edit brings a healthy service into trouble, and another one repairs it. If a new group is made before the old one is
removed, the old one keeps serving, so that only the condition shows the trouble.
"""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from cluster.kubernetes.kubectl import Kubectl
from devices import give_devices, new_device
from figures import record_figures
from installation import SPEC, Json, Service, install_chart, make_namespace, target

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GPU = new_device()
STARTUP_S = 20
NO_IMAGE = f"{target().registry}/orca-worker:none"
NO_NODE = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}}


@pytest.fixture(scope="module")
def well(kubectl: Kubectl) -> Iterator[Service]:
    """Return a service for this module alone; each test leaves it healthy."""
    namespace = make_namespace(kubectl, "reasons")
    install_chart()
    service = Service(kubectl, namespace)
    service.create({**SPEC, "startupSeconds": STARTUP_S})
    service.wait_until_settled()
    yield service
    kubectl("delete", "namespace", namespace, "--wait=false")


@dataclass(frozen=True)
class Trouble:
    """An edit that fails, the expected condition, and the edit that repairs it."""

    name: str
    edit: Json
    condition: str
    reason: str
    named: str  # text that the message must contain
    mend: Json
    by_hand: Callable[[Service], None] | None = None  # a repair in the cluster instead of the spec


def give_gpus(service: Service) -> None:
    give_devices(service.kubectl, GPU, 1)


def make_keys(service: Service) -> None:
    """Create the missing Secret, with a line in the format of `orca keys make`."""
    made = service.kubectl.get("secret", f"{service.name}-api-key", f"--namespace={service.namespace}")
    keys = base64.b64decode(made["data"]["keys"]).decode()
    where = ("--namespace", service.namespace)
    service.kubectl("create", "secret", "generic", "team-keys", *where, f"--from-literal=keys={keys}")


def model(uri: str) -> Json:
    return {"model": {"uri": uri}}


# Gateways get another model first, so their condition is the first to report a missing one.
SMALL = {"limits": {"memory": "64Mi"}}
TROUBLES = (
    Trouble(
        "unschedulable: no GPU",
        {"worker": {"resources": {"limits": {GPU: "1"}}}},
        "WorkersReady",
        "NoCapacity",
        GPU,
        {"worker": {"resources": None}},
        by_hand=give_gpus,
    ),
    Trouble(
        "image missing",
        {"images": {"worker": NO_IMAGE}},
        "WorkersReady",
        "ImagePull",
        NO_IMAGE,
        {"images": {"worker": None}},
    ),
    Trouble(
        "model missing",
        model("file:///opt/orca/models/none"),
        "GatewayReady",
        "BadConfiguration",
        "/opt/orca/models/none",
        model(SPEC["model"]["uri"]),
    ),
    Trouble(
        "model broken",
        model("file:///opt/orca"),
        "GatewayReady",
        "BadConfiguration",
        "config.json",
        model(SPEC["model"]["uri"]),
    ),
    Trouble(
        "out of memory",
        {"worker": {"resources": SMALL}},
        "WorkersReady",
        "OutOfMemory",
        "container stage",
        {"worker": {"resources": None}},
    ),
    Trouble(
        "Redis down",
        {"pool": {"podPatch": NO_NODE}},
        "PoolReady",
        "NoCapacity",
        "austen-pool-0",
        {"pool": {"podPatch": None}},
    ),
    Trouble(
        "bad setting: no such network interface",
        {"worker": {"networkInterface": "none0"}, "parallelism": {"stages": 2}},
        "WorkersReady",
        "BadConfiguration",
        "none0",
        {"worker": {"networkInterface": None}, "parallelism": {"stages": 1}},
    ),
    Trouble(
        "group never forms: its stages do not reach each other",
        {"worker": {"networkInterface": "lo"}, "parallelism": {"stages": 2}},
        "SchedulerReady",
        "GroupForming",
        "0 of 1 groups",
        {"worker": {"networkInterface": None}, "parallelism": {"stages": 1}},
    ),
    Trouble(
        "bad secret: not there",
        {"gateway": {"apiKeysSecret": {"name": "team-keys"}}},
        "GatewayReady",
        "SecretMissing",
        "team-keys",
        {"gateway": {"apiKeysSecret": None}},
        by_hand=make_keys,
    ),
)


@pytest.mark.parametrize(
    "trouble",
    [
        # A repair by hand changes a node, which must not happen in a foreign cluster.
        pytest.param(each, id=each.name, marks=[pytest.mark.own_cluster] if each.by_hand is give_gpus else [])
        for each in TROUBLES
    ],
)
def test_a_reason_is_said_and_gone_once_it_is_mended(well: Service, trouble: Trouble) -> None:
    well.edit(**trouble.edit)
    until_said = well.wait_for(trouble.condition, "False", trouble.reason)
    assert trouble.named in well.condition(trouble.condition)[2], well.describe()
    # Until the startup time is over, a slow start does not count as degraded.
    well.wait_for("Degraded", "True", trouble.reason, within_s=2 * STARTUP_S)
    if trouble.by_hand is None:
        well.edit(**trouble.mend)
    else:
        trouble.by_hand(well)
    until_gone = well.wait_for(trouble.condition, "True")
    well.wait_until_settled()
    record_figures(f"reason: {trouble.name}", {"said after": round(until_said, 1), "gone after": round(until_gone, 1)})
    well.edit(**trouble.mend)
    well.wait_until_settled()


@pytest.mark.own_cluster
def test_a_pool_elsewhere_that_does_not_answer(kubectl: Kubectl, namespace: str) -> None:
    where = ("--namespace", namespace)
    kubectl("create", "secret", "generic", "pool", *where, "--from-literal=url=redis://10.96.0.99:6379/0")
    service = Service(kubectl, namespace)
    service.create({**SPEC, "pool": {"external": {"urlSecret": {"name": "pool"}}}})
    said = service.wait_for("PoolReady", "False", "PoolUnreachable")
    record_figures("reason: external pool unreachable", {"said after": round(said, 1)})
