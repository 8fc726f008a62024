"""A group lends its devices to the Job that measures the model, when the groups have all that the Job needs."""

import random
from dataclasses import replace
from typing import Any

import pytest

from orca.operator.domain import names
from orca.operator.domain.actions import Annotate
from orca.operator.domain.api_refusals import Refusal
from orca.operator.domain.cluster_events import read_events
from orca.operator.domain.objects import timestamp
from orca.operator.domain.resource import Json
from orca.operator.plan.plan import ReconcilePlan, make_plan
from orca.operator.plan.slo.device_loan import LOAN_S, WAIT_S
from orca.operator.plan.slo.making import RETRY_S
from orca.operator.plan.status import is_on_the_way, make_status
from support.effort import tries
from support.operator.clusters import BORN, BORN_S, FakeCluster
from support.operator.deployments import deployment

STATED = {"latencyMs": 8000, "devices": 2, "workload": {"lengths": "32:512/1:128"}}
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def serving(*, slo: Json = STATED, **spec: Any) -> FakeCluster:
    """A service whose groups have all devices, and which has just got a goal. The Job of its profile waits."""
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    cluster.deployment = deployment(generation=2, slo=slo, **spec)
    cluster.reconcile()
    wait(cluster)
    return cluster


def job_of(cluster: FakeCluster) -> str:
    [job] = cluster.names("Job")
    return job


def wait(cluster: FakeCluster, message: str = NO_GPU) -> None:
    """The pod of the Job finds no node, from the birth of the cluster on."""
    job = job_of(cluster)
    labels = cluster.objects["Job", job]["spec"]["template"]["metadata"]["labels"]
    cluster.add_pod(f"{job}-x", labels, is_ready=False, node=None)
    pod = cluster.objects["Pod", f"{job}-x"]
    unplaced = {"type": "PodScheduled", "status": "False", "message": message, "lastTransitionTime": BORN}
    pod["status"]["conditions"].append(unplaced)


def place(cluster: FakeCluster) -> None:
    pod = cluster.objects["Pod", f"{job_of(cluster)}-x"]
    pod["spec"]["nodeName"] = "node-1"
    del pod["status"]["conditions"][1:]


def lend(cluster: FakeCluster, lent: int = 1) -> FakeCluster:
    """Reconcile until groups have gone."""
    cluster.now_s = BORN_S + WAIT_S
    before = groups(cluster)
    for _ in range(4):
        cluster.reconcile()
    assert groups(cluster) == before - lent
    return cluster


def bring_back(cluster: FakeCluster) -> None:
    """Reconcile until all groups are there, and let their pods run."""
    for _ in range(3):
        cluster.reconcile()
        cluster.start_pods()


def told(cluster: FakeCluster) -> Json:
    observed = cluster.observed
    return make_status(observed, make_plan(observed), {})


def condition(cluster: FakeCluster, kind: str) -> tuple[str, str, str]:
    [found] = [each for each in told(cluster)["conditions"] if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


def marks(plan: ReconcilePlan) -> list[Annotate]:
    return [each for each in plan.actions if isinstance(each, Annotate) and each.kind == "Job"]


def groups(cluster: FakeCluster) -> int:
    return len(cluster.names("StatefulSet", "stage"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_group_goes_until_the_job_has_a_node_and_comes_back(replicas: int) -> None:
    cluster = lend(serving(replicas=replicas))
    assert cluster.reconcile().actions == ()
    status, reason, message = condition(cluster, "WorkersReady")
    assert (status, reason) == ("False", "DevicesLent")
    assert message.startswith(f"devices of groups are lent to the Job {job_of(cluster)}")
    assert condition(cluster, "PlanReady")[1] == "NoCapacity"
    assert condition(cluster, "PlanReady")[2].endswith("; groups lend it devices; the defaults serve")
    assert condition(cluster, "Degraded")[0] == "False"
    assert is_on_the_way(told(cluster)), "the end of the loan is no event"
    place(cluster)
    cluster.reconcile()
    assert groups(cluster) == replicas
    assert condition(cluster, "WorkersReady")[1] == "DevicesLent", "it waits while the Job measures"
    cluster.settle()
    assert condition(cluster, "PlanReady")[:2] == ("True", "Planned")
    assert groups(cluster) == replicas
    assert condition(cluster, "Ready")[0] == "True"


def test_a_job_waits_a_minute_before_it_takes_anything() -> None:
    cluster = serving()
    cluster.now_s = BORN_S + WAIT_S - 1
    assert cluster.reconcile().actions == ()
    cluster.now_s += 1
    assert len(marks(cluster.reconcile())) == 1


@pytest.mark.parametrize(
    ("message", "is_lent"),
    [
        ("0/4 nodes are available: 1 Insufficient cpu, 3 node(s) didn't match Pod's node affinity/selector.", True),
        ("0/1 nodes are available: 1 cannot allocate all claims.", True),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {a: b}.", False),
        ("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.", False),
    ],
)
def test_a_group_lends_only_what_it_has(message: str, is_lent: bool) -> None:
    """Nothing that a group gives back makes a pod fit a node that it may not use."""
    cluster = serving()
    wait(cluster, message)
    cluster.now_s = BORN_S + WAIT_S
    assert bool(marks(cluster.reconcile())) == is_lent


@pytest.mark.parametrize(("message", "is_lent"), [("exceeded quota: gpus", True), ("violates PodSecurity", False)])
def test_a_quota_that_groups_use_up_is_lent_too(message: str, is_lent: bool) -> None:
    cluster = serving()
    job = job_of(cluster)
    del cluster.objects["Pod", f"{job}-x"]
    about = {"kind": "Job", "name": job, "uid": f"uid-{job}"}
    events = read_events([{"involvedObject": about, "message": message, "lastTimestamp": BORN}])
    cluster.now_s = BORN_S + WAIT_S
    assert bool(marks(make_plan(replace(cluster.observed, events=events)))) == is_lent


@pytest.mark.parametrize("why", ["unplaced", "going", "rollout", "short"])
def test_groups_on_their_way_lend_nothing(why: str) -> None:
    cluster = serving(replicas=2)
    first, second = cluster.names("StatefulSet", "stage")
    if why == "unplaced":
        cluster.make_unready(f"{second}-0", node=None)
    elif why == "going":
        cluster.objects["StatefulSet", first]["metadata"]["deletionTimestamp"] = BORN
    elif why == "rollout":
        cluster.deployment = deployment(generation=3, slo=STATED, replicas=2, parallelism={"stages": 2})
    else:
        cluster.deployment = deployment(generation=3, slo=STATED, replicas=3)
    cluster.now_s = BORN_S + WAIT_S
    assert not marks(cluster.reconcile())


def test_a_loan_ends_after_its_time_and_there_is_no_second_one() -> None:
    cluster = lend(serving())
    cluster.now_s += LOAN_S
    cluster.reconcile()
    assert groups(cluster) == 1
    for _ in range(3):
        cluster.now_s += WAIT_S
        cluster.start_pods()
        assert not marks(cluster.reconcile())
        assert groups(cluster) == 1
    _, reason, message = condition(cluster, "PlanReady")
    assert reason == "NoCapacity"
    assert f"which happens once: delete the Job {job_of(cluster)} to try again" in message
    assert condition(cluster, "Ready")[0] == "True"


def test_a_job_that_fails_after_a_loan_waits_for_a_person() -> None:
    cluster = lend(serving())
    job = job_of(cluster)
    del cluster.objects["Pod", f"{job}-x"]
    cluster.end_job(job, "Failed")
    cluster.now_s += 10 * RETRY_S
    cluster.reconcile()
    cluster.start_pods()
    cluster.reconcile()
    assert (cluster.names("Job"), groups(cluster)) == ([job], 1)
    assert "delete the Job" in condition(cluster, "PlanReady")[2]
    del cluster.objects["Job", job]
    cluster.reconcile()
    assert condition(cluster, "PlanReady")[1] == "Profiling"


def test_a_failed_job_without_a_loan_is_made_again() -> None:
    cluster = serving()
    job = job_of(cluster)
    cluster.end_job(job, "Failed")
    cluster.now_s = BORN_S + RETRY_S + 1
    cluster.reconcile()
    assert cluster.names("Job") == []


@pytest.mark.parametrize("written", ["nonsense", timestamp(BORN_S + 10**6)])
def test_a_note_that_makes_no_sense_lends_nothing(written: str) -> None:
    cluster = serving()
    cluster.objects["Job", job_of(cluster)]["metadata"]["annotations"] = {names.LOAN_ANNOTATION: written}
    cluster.now_s = BORN_S + WAIT_S
    for _ in range(4):
        cluster.reconcile()
        assert groups(cluster) == 1


def test_a_note_that_the_api_server_refuses_concerns_only_the_plan() -> None:
    cluster = serving()
    cluster.now_s = BORN_S + WAIT_S
    [mark] = marks(make_plan(cluster.observed))
    observed = cluster.observed
    refused = make_status(observed, make_plan(observed), {}, [Refusal(mark, "forbidden")])
    found = {each["type"]: (each["status"], each["reason"]) for each in refused["conditions"]}
    assert (found["Accepted"][0], found["PlanReady"]) == ("True", ("False", "Refused"))


def test_the_end_of_a_goal_ends_a_loan() -> None:
    cluster = lend(serving())
    cluster.deployment = deployment(generation=3)
    cluster.reconcile()
    assert groups(cluster) == 1


def test_a_service_that_was_suspended_meanwhile_has_all_its_groups_again() -> None:
    cluster = lend(serving(replicas=2))
    cluster.deployment = deployment(generation=3, slo=STATED, replicas=2, suspend=True)
    cluster.settle()
    assert groups(cluster) == 0
    cluster.deployment = deployment(generation=4, slo=STATED, replicas=2)
    bring_back(cluster)
    assert groups(cluster) == 2


@pytest.mark.parametrize(("devices", "replicas", "lent"), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 3, 2), (4, 3, 2)])
def test_as_many_groups_lend_as_have_the_devices_and_one_of_several_stays(
    devices: int, replicas: int, lent: int
) -> None:
    cluster = lend(serving(replicas=replicas, slo={**STATED, "devices": devices}), lent)
    assert condition(cluster, "WorkersReady")[1] == "DevicesLent"
    place(cluster)
    bring_back(cluster)
    assert groups(cluster) == replicas


def test_a_group_of_several_devices_lends_them_all() -> None:
    cluster = lend(serving(replicas=3, parallelism={"stages": 2}), 1)
    assert condition(cluster, "WorkersReady")[1] == "DevicesLent"


def test_an_outage_of_the_pool_does_not_bring_the_group_back() -> None:
    cluster = lend(serving())
    cluster.pool = replace(cluster.pool, problem="connection refused")
    for _ in range(3):
        cluster.reconcile()
        assert groups(cluster) == 0
    cluster.now_s += LOAN_S
    cluster.reconcile()
    assert groups(cluster) == 1


def test_groups_do_not_go_again_for_a_pod_after_one_that_has_failed() -> None:
    cluster = lend(serving())
    place(cluster)
    cluster.reconcile()
    cluster.objects["Job", job_of(cluster)]["status"] = {"failed": 1}
    wait(cluster)
    for _ in range(4):
        cluster.reconcile()
        assert groups(cluster) == 1
    assert condition(cluster, "WorkersReady")[1] != "DevicesLent"


def test_requests_that_need_the_slots_of_all_groups_keep_them() -> None:
    """The one loan of the Job is not used up for nothing."""
    cluster = serving(replicas=2)
    cluster.now_s = BORN_S + WAIT_S
    observed = cluster.observed
    decided = make_plan(observed)
    assert len(marks(decided)) == 1
    held = replace(decided.slots, held=frozenset(each.name for each in observed.groups))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("orca.operator.plan.plan.plan_slots_change", lambda *_, **__: held)
        assert not marks(make_plan(observed))


def test_other_groups_show_their_own_trouble_while_the_profile_measures() -> None:
    cluster = lend(serving(replicas=3), 2)
    place(cluster)
    bring_back(cluster)
    stage = cluster.names("StatefulSet", "stage")[0]
    cluster.make_unready(f"{stage}-0")
    state = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}
    crashing = {"name": "stage", "ready": False, "restartCount": 1, **state}
    cluster.objects["Pod", f"{stage}-0"]["status"]["containerStatuses"] = [crashing]
    assert condition(cluster, "WorkersReady")[1] == "Crashing"


@pytest.mark.parametrize("seed", range(tries(50)))
def test_an_operator_that_dies_anywhere_lends_one_group_and_comes_to_the_plan(seed: int) -> None:
    chance = random.Random(seed)
    cluster, carried_out = serving(replicas=2), 0
    cluster.now_s = BORN_S + WAIT_S
    for number in (*(chance.randint(0, 2) for _ in range(20)), 9, 9, 9, 9):
        carried_out += len(marks(cluster.reconcile(dies_after=number))[:number])
        assert groups(cluster) >= 1
        cluster.now_s += 1
    assert (carried_out, groups(cluster)) == (1, 1)
    place(cluster)
    cluster.settle()
    assert condition(cluster, "PlanReady")[:2] == ("True", "Planned")
    assert groups(cluster) == 2
