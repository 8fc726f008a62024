"""The status reports what was observed."""

from dataclasses import replace
from typing import Any

import pytest

from orca.operator.domain import problems
from orca.operator.domain.api_refusals import Refusal
from orca.operator.domain.objects import seconds
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.plan import status
from orca.operator.plan.plan import ReconcilePlan, make_plan
from orca.pool.length_bins import PERIOD_MS
from orca.pool.order.deadline_counts import DeadlineCounts, PeriodDeadlines
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

NOW, LATER = "2026-01-01T00:00:10Z", "2026-01-01T00:00:20Z"


def cluster_of(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def told(cluster: FakeCluster, before: Json | None = None, now: str = NOW) -> Json:
    return status.make_status(cluster.observe(at=now), cluster.reconcile(), before or {})


def plan(cluster: FakeCluster) -> ReconcilePlan:
    """Return the plan of a reconcile without applying it."""
    return make_plan(cluster.observed)


def condition(found: Json, kind: str) -> tuple[str, str]:
    [each] = [each for each in found["conditions"] if each["type"] == kind]
    return each["status"], each["reason"]


def test_a_healthy_deployment_has_all_conditions_true() -> None:
    found = told(cluster_of(replicas=2))
    assert condition(found, "Ready") == ("True", "Serving")
    assert condition(found, "Progressing") == ("False", "Complete")
    assert found["groups"] == {"total": 2, "ready": 2, "desired": 2, "updated": 2, "summary": "2/2"}


def test_without_replicas_the_service_accepts_and_keeps_requests() -> None:
    assert condition(told(cluster_of(replicas=0)), "Ready") == ("True", "Holding")


def forming(**spec: object) -> FakeCluster:
    """Return a cluster whose only group has served, and forms again."""
    cluster = cluster_of(**spec)
    [scheduler] = cluster.names("Pod", "scheduler")
    cluster.make_unready(scheduler)
    return cluster


def test_a_forming_group_is_progressing_and_not_degraded() -> None:
    cluster = forming()
    found = told(cluster)
    assert condition(found, "SchedulerReady") == ("False", "GroupForming")
    assert condition(found, "Ready") == ("False", "GroupForming")
    assert condition(found, "Degraded")[0] == "False"


def test_a_group_that_does_not_form_in_its_startup_time_is_degraded() -> None:
    cluster = forming(startupSeconds=30)
    assert condition(told(cluster, now="2026-01-01T00:00:30Z"), "Degraded")[0] == "False"
    assert condition(told(cluster, now="2026-01-01T00:00:31Z"), "Degraded") == ("True", "GroupForming")


def test_a_group_that_may_wait_for_a_schema_number_says_so() -> None:
    cluster = forming()
    for older, generation, says in ((2, None, True), (None, None, False), (2, 2**40, True)):
        cluster.pool = PoolStatus(older_schema=older, generation=generation)
        [message] = [each["message"] for each in told(cluster)["conditions"] if each["type"] == "SchedulerReady"]
        assert ("Schema 2 of the release before is in force" in message) is says


def test_a_rollout_is_ready_only_when_the_wanted_revision_serves() -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, parallelism={"stages": 2})
    cluster.reconcile()
    found = told(cluster)
    assert condition(found, "Ready")[0] == "False"
    assert condition(found, "Progressing") == ("True", "RollingOut")
    assert found["currentRevision"] != found["updateRevision"]
    cluster.settle()
    found = told(cluster)
    assert condition(found, "Ready") == ("True", "Serving")
    assert found["currentRevision"] == found["updateRevision"]


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        ({"scheduler": {"prefetch": 0}}, "SchedulerReady"),
        ({"scheduler": {"maxBatchSize": 4}}, "SchedulerReady"),
        ({"gateway": {"replicas": 2}}, "GatewayReady"),
        ({"pool": {"managed": {"memoryMiB": 256}}}, "PoolReady"),
    ],
)
def test_an_edit_is_not_ready_before_it_is_in_force(edit: Json, part: str) -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, **edit)
    found = told(cluster)
    assert (condition(found, part), condition(found, "Ready")[0]) == (("False", "Applying"), "False")
    assert condition(found, "Degraded")[0] == "False"
    assert status.is_on_the_way(found)
    cluster.settle()
    assert condition(told(cluster), "Ready") == ("True", "Serving")


def test_a_change_that_its_controller_has_not_observed_is_not_complete() -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, gateway={"replicas": 2}, scheduler={"prefetch": 0})
    cluster.reconcile()  # it writes; the pods of before still serve
    found = told(cluster)
    assert condition(found, "GatewayReady") == ("False", "GatewaysChanging")
    assert condition(found, "SchedulerReady") == ("False", "SchedulersChanging")


def test_a_scheduler_that_waits_for_its_update_is_not_up_to_date() -> None:
    cluster = cluster_of()
    [scheduler] = cluster.names("StatefulSet", "scheduler")
    waits = replace(cluster.reconcile(), held=frozenset({("StatefulSet", scheduler)}))
    found = status.make_status(cluster.observe(at=NOW), waits, {})
    assert condition(found, "SchedulerReady") == ("False", "SchedulersChanging")


def status_without_keys(cluster: FakeCluster) -> Json:
    """Return the status of a cluster whose gateways need a missing Secret."""
    cluster.deployment = deployment(generation=2, gateway={"apiKeysSecret": {"name": "team"}})
    cluster.reconcile()
    problem = replace(cluster.observe(at=NOW), keys_problem="there is no Secret team")
    return status.make_status(problem, cluster.reconcile(), {})


def test_a_missing_secret_of_api_keys_is_reported_as_what_new_gateways_wait_for() -> None:
    cluster = cluster_of()
    found = status_without_keys(cluster)
    assert condition(found, "GatewayReady") == ("False", "SecretMissing")
    assert condition(found, "Degraded") == ("True", "SecretMissing")


def test_ready_names_broken_parts_before_progressing_ones() -> None:
    cluster = forming()
    found = status_without_keys(cluster)
    assert condition(found, "SchedulerReady") == ("False", "GroupForming")
    assert condition(found, "Ready") == ("False", "SecretMissing")


def test_gateways_that_cannot_be_replaced_are_not_ready_with_a_reason() -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, images={"gateway": "gateway:2"})
    cluster.reconcile()
    gateway = cluster.objects["Deployment", "shop-gateway"]
    gateway["status"] = {"observedGeneration": 2, "replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}
    cluster.add_pod("shop-gateway-1", gateway["spec"]["template"]["metadata"]["labels"], is_ready=False)
    waiting = {"name": "gateway", "ready": False, "state": {"waiting": {"reason": "ErrImagePull"}}}
    cluster.objects["Pod", "shop-gateway-1"]["status"]["containerStatuses"] = [waiting]
    found = told(cluster)
    assert condition(found, "Ready") == condition(found, "GatewayReady") == ("False", "ImagePull")
    assert condition(found, "Degraded") == ("True", "ImagePull")


def test_a_field_that_another_writer_changes_back_does_not_affect_readiness() -> None:
    cluster = cluster_of()
    cluster.objects["Service", "shop"]["spec"]["selector"] = {"app": "his"}
    assert condition(told(cluster), "Ready") == ("True", "Serving")


def test_a_pool_that_does_not_answer_is_reported_with_the_reason() -> None:
    cluster = cluster_of()
    cluster.pool = PoolStatus(problem="connection refused")
    found = told(cluster)
    assert condition(found, "PoolReady") == ("False", "PoolUnreachable")
    assert condition(found, "Degraded") == ("True", "PoolUnreachable")
    assert "requests" not in found


def test_the_scale_subresource_finds_one_pod_with_load_in_each_group() -> None:
    cluster = cluster_of(replicas=2, parallelism={"stages": 2})
    for key, pod in cluster.objects.items():
        if key[0] == "Pod":
            pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] = key[1].rpartition("-")[2]
    wanted = dict(part.split("=") for part in told(cluster)["selector"].split(","))
    pods = [each for each in cluster.objects.values() if wanted.items() <= each["metadata"]["labels"].items()]
    assert sorted(each["metadata"]["name"] for each in pods) == [
        f"{name}-0" for name in cluster.names("StatefulSet", "stage")
    ]
    assert len(pods) == told(cluster)["groups"]["total"] == 2


def test_counts_of_the_pool_are_shown() -> None:
    cluster = cluster_of()
    cluster.pool = PoolStatus(queued=3, running=2, oldest_wait_ms=4999)
    assert told(cluster)["requests"] == {"queued": 3, "running": 2, "oldestWaitSeconds": 4}


def counted(in_time: int, late: int, *, age: int = 0) -> DeadlineCounts:
    """Return the counts of a pool in its eleventh period. Args: age: in periods."""
    period = PeriodDeadlines(period=10 - age, in_time=in_time, late=late)
    return DeadlineCounts(awake_ms=10 * PERIOD_MS + 1, periods=(period,))


def test_the_share_of_requests_in_time_is_that_of_the_last_hour() -> None:
    cluster = cluster_of()
    cluster.pool = PoolStatus(deadlines=counted(199, 1, age=5))
    assert told(cluster)["deadlines"] == {"inTimePercent": 99, "requests": 200, "windowMinutes": 60}
    for nothing in (None, counted(199, 1, age=6), DeadlineCounts(awake_ms=1, periods=())):
        cluster.pool = PoolStatus(deadlines=nothing)
        assert "deadlines" not in told(cluster)


@pytest.mark.parametrize(
    ("order", "older", "reason"),
    [("Deadline", 2, "ClaimsByArrival"), ("Deadline", None, "Formed"), ("Arrival", 2, "Formed")],
)
def test_an_order_that_an_older_schema_keeps_from_its_effect_is_reported(
    order: str, older: int | None, reason: str
) -> None:
    cluster = cluster_of(scheduler={"order": order})
    cluster.pool = PoolStatus(older_schema=older)
    found = told(cluster)
    assert condition(found, "SchedulerReady") == ("True", reason)
    assert condition(found, "Ready") == ("True", "Serving")
    [message] = [each["message"] for each in found["conditions"] if each["type"] == "SchedulerReady"]
    says = "claims go by arrival and not by order Deadline: schema 2 of the release before is in force in the pool"
    assert (says in message) == (reason == "ClaimsByArrival")


def test_times_change_only_with_the_condition() -> None:
    cluster = cluster_of()
    first = told(cluster)
    cluster.pool = PoolStatus(problem="away")
    second = told(cluster, first, LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert (times["PoolReady"], times["Ready"], times["GatewayReady"]) == (LATER, LATER, NOW)


def test_refusals_of_the_api_server_are_reported_with_the_observed_state() -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, gateway={"ingress": {}})
    decided, seen = plan(cluster), cluster.observe(at=NOW)
    refusals = [Refusal(decided.actions[0], "quota is used up")]
    found = status.make_status(seen, decided, {}, refusals)
    assert condition(found, "Accepted") == ("False", "Refused")
    assert condition(found, "Ready") == ("False", "Refused")
    assert condition(found, "GatewayReady") == ("False", "RouteStarting")


def test_a_volume_that_cannot_grow_is_reported_and_running_parts_continue() -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, pool={"managed": {"storageGiB": 20}})
    decided, seen = plan(cluster), cluster.observe(at=NOW)
    refusals = [Refusal(decided.actions[0], "its class does not let it")]
    found = status.make_status(seen, decided, {}, refusals)
    assert condition(found, "PoolReady") == ("True", "VolumeCannotGrow")
    assert condition(found, "Degraded") == ("True", "VolumeCannotGrow")
    assert condition(found, "Ready") == ("True", "Serving")


def test_a_refused_spec_is_neither_accepted_nor_ready() -> None:
    found = status.refused_status(3, "BadSpec", "no", {}, seconds(NOW))
    assert condition(found, "Accepted") == ("False", "BadSpec")
    assert condition(found, "Ready") == ("False", "BadSpec")


def test_a_refused_spec_keeps_the_other_conditions() -> None:
    before = told(cluster_of(replicas=2))
    found = status.refused_status(2, "BadSpec", "no", before, seconds(LATER))
    kept = ("selector", "groups", "currentRevision", "updateRevision", "url")
    assert {name: found[name] for name in kept} == {name: before[name] for name in kept}
    observed = {each["type"]: each["observedGeneration"] for each in found["conditions"]}
    assert (observed["Accepted"], observed["Ready"], observed["PoolReady"]) == (2, 2, 1)


def pod(**status: Any) -> Json:
    return {"metadata": {"name": "p"}, "spec": {}, "status": status}


def container(restarts: int = 1, **of: Any) -> Json:
    return pod(containerStatuses=[{"name": "c", "ready": False, "restartCount": restarts, **of}])


def reason(of: Json) -> str | None:
    trouble = problems.of_pod(of)
    return None if trouble is None else trouble.reason


def test_each_problem_has_its_reason() -> None:
    unplaced = pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}])
    assert reason(unplaced) == "NoCapacity"
    assert reason(container(state={"waiting": {"reason": "ImagePullBackOff"}})) == "ImagePull"
    assert reason(container(state={"waiting": {"reason": "CreateContainerConfigError"}})) == "BadConfiguration"
    assert reason(container(lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}})) == "OutOfMemory"
    assert reason(container(lastState={"terminated": {"exitCode": 2}})) == "BadConfiguration"
    crash = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}
    assert reason(container(**crash)) == "Crashing"
    assert reason(container(state={"running": {}})) is None
    assert reason(pod()) is None


def test_a_problem_names_pod_container_and_the_last_log_lines() -> None:
    ended = {"exitCode": 2, "message": "first\nsetting slots: 0 is not 1 or more\n"}
    trouble = problems.of_pod(container(lastState={"terminated": ended}))
    assert trouble is not None
    assert trouble.message == "pod p, container c: setting slots: 0 is not 1 or more"


def test_layers_that_do_not_add_up_are_reported_while_the_groups_of_before_serve() -> None:
    cluster = cluster_of(parallelism={"stages": 2})
    layers = {"stages": 2, "stageLayers": [2, 2]}
    cluster.deployment = deployment(generation=2, parallelism=layers)
    new = make_plan(cluster.observed).revision
    cluster.reconcile()
    # The last line of the log, with which a stage ends (test_stage_layers.py).
    line = "the model cannot be served: setting --layers: '2,2' adds up to 4: divide the model's 3 layers over 2 stages"
    for stage in range(2):
        name = f"shop-{new}-0-{stage}"
        labels = cluster.objects["StatefulSet", f"shop-{new}-0"]["spec"]["template"]["metadata"]["labels"]
        cluster.add_pod(name, labels, is_ready=False)
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        ended = {"terminated": {"exitCode": 2, "message": f'{{"level":"error","message":"{line}"}}'}}
        container = {"name": "stage", "ready": False, "restartCount": 2, "state": waiting, "lastState": ended}
        cluster.objects["Pod", name]["status"]["containerStatuses"] = [container]
    found = told(cluster)
    for kind in ("WorkersReady", "Ready"):
        assert condition(found, kind) == ("False", "BadConfiguration")
        [message] = [each["message"] for each in found["conditions"] if each["type"] == kind]
        assert line in message
        assert message.startswith(f"pod shop-{new}-0-0, container stage: ")
    assert condition(found, "Degraded") == ("True", "BadConfiguration")
    assert (found["groups"]["ready"], found["groups"]["updated"]) == (1, 1)


def told_of_gateway(node: str, mode: str) -> tuple[str, str]:
    """GatewayReady while a gateway waits on a node and a stage runs on node-1, both with the model's volume."""
    cluster = cluster_of(model={"uri": "hf://org/model", "cache": {"accessMode": mode}})
    for name, is_up, on in [(cluster.names("Pod", "stage")[0], True, "node-1"), ("shop-gateway-0", False, node)]:
        owner = ("Deployment", "shop-gateway") if not is_up else ("StatefulSet", name.removesuffix("-0"))
        template = cluster.objects[owner]["spec"]["template"]
        cluster.add_pod(name, template["metadata"]["labels"], is_ready=is_up, node=on)
        pod, state = cluster.objects["Pod", name], "running" if is_up else "waiting"
        pod["spec"]["volumes"] = template["spec"]["volumes"]
        pod["status"]["containerStatuses"] = [{"name": "c", "ready": is_up, "restartCount": 0, "state": {state: {}}}]
    return condition(told(cluster), "GatewayReady")


def test_a_pod_that_waits_for_a_volume_on_another_node_says_so() -> None:
    assert told_of_gateway("node-2", "ReadWriteOnce") == ("False", "VolumeElsewhere")
    assert told_of_gateway("node-1", "ReadWriteOnce") == ("False", "GatewayStarting")
    assert told_of_gateway("node-2", "ReadWriteMany") == ("False", "GatewayStarting")


def test_problems_that_need_a_user_are_reported_before_transient_ones() -> None:
    crash = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}
    found = problems.worst([container(**crash), container(state={"waiting": {"reason": "ErrImagePull"}}), pod()])
    assert found is not None
    assert found.reason == "ImagePull"


def test_the_problem_of_a_terminating_pod_is_no_longer_reported() -> None:
    ended = {"exitCode": 2, "message": "no such model", "reason": "Error"}
    containers = [{"name": "gateway", "ready": False, "restartCount": 1, "state": {"terminated": ended}}]
    pod: Json = {"metadata": {"name": "p"}, "status": {"containerStatuses": containers}}
    assert problems.worst([pod]) is not None
    pod["metadata"]["deletionTimestamp"] = NOW
    assert problems.worst([pod]) is None
