"""What a status says of what was seen."""

from typing import Any

from clusters import FakeCluster
from deployments import deployment

from orca.operator import status, troubles
from orca.operator.observed import PoolLook
from orca.operator.resource import Json

NOW, LATER = "2026-01-01T00:00:10Z", "2026-01-01T00:00:20Z"


def cluster_of(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def told(cluster: FakeCluster, before: Json | None = None, now: str = NOW) -> Json:
    return status.status(cluster.deployment, cluster.observed, cluster.look(), before or {}, now)


def condition(found: Json, kind: str) -> tuple[str, str]:
    [each] = [each for each in found["conditions"] if each["type"] == kind]
    return each["status"], each["reason"]


def test_all_is_well() -> None:
    found = told(cluster_of(replicas=2))
    assert condition(found, "Ready") == ("True", "Serving")
    assert condition(found, "Progressing") == ("False", "Complete")
    assert found["groups"] == {"total": 2, "ready": 2, "desired": 2, "updated": 2, "summary": "2/2"}


def test_no_replicas_is_a_service_that_holds_what_it_accepts() -> None:
    assert condition(told(cluster_of(replicas=0)), "Ready") == ("True", "Holding")


def test_a_group_that_forms_is_on_its_way_and_not_degraded() -> None:
    cluster = cluster_of()
    scheduler = cluster.names("Pod", "scheduler")[0]
    cluster.add_pod(scheduler, cluster.objects["Pod", scheduler]["metadata"]["labels"], is_ready=False)
    found = told(cluster)
    assert condition(found, "SchedulerReady") == ("False", "GroupForming")
    assert condition(found, "Ready") == ("False", "GroupForming")
    assert condition(found, "Degraded")[0] == "False"


def test_a_rollout_is_ready_only_when_the_wanted_revision_serves() -> None:
    cluster = cluster_of()
    cluster.deployment = deployment(generation=2, parallelism={"stages": 2})
    cluster.look()
    found = told(cluster)
    assert condition(found, "Ready")[0] == "False"
    assert condition(found, "Progressing") == ("True", "RollingOut")
    assert found["currentRevision"] != found["updateRevision"]
    cluster.settle()
    found = told(cluster)
    assert condition(found, "Ready") == ("True", "Serving")
    assert found["currentRevision"] == found["updateRevision"]


def test_a_pool_that_does_not_answer_is_said_with_its_reason() -> None:
    cluster = cluster_of()
    cluster.pool = PoolLook(problem="connection refused")
    found = told(cluster)
    assert condition(found, "PoolReady") == ("False", "PoolUnreachable")
    assert condition(found, "Degraded") == ("True", "PoolUnreachable")
    assert "requests" not in found


def test_counts_of_the_pool_are_shown() -> None:
    cluster = cluster_of()
    cluster.pool = PoolLook(queued=3, running=2, oldest_wait_ms=4999)
    assert told(cluster)["requests"] == {"queued": 3, "running": 2, "oldestWaitSeconds": 4}


def test_times_change_only_with_the_condition() -> None:
    cluster = cluster_of()
    first = told(cluster)
    cluster.pool = PoolLook(problem="away")
    second = told(cluster, first, LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert (times["PoolReady"], times["Ready"], times["GatewayReady"]) == (LATER, LATER, NOW)


def test_what_the_api_server_refuses_is_told_beside_what_was_seen() -> None:
    cluster = cluster_of()
    found = status.status(cluster.deployment, cluster.observed, cluster.look(), {}, NOW, refusal="quota is used up")
    assert condition(found, "Accepted") == ("False", "Refused")
    assert condition(found, "Ready") == ("False", "Refused")
    assert condition(found, "GatewayReady") == ("True", "Serving")


def test_a_refused_spec_is_neither_accepted_nor_ready() -> None:
    found = status.refused(3, "BadSpec", "no", {}, NOW)
    assert condition(found, "Accepted") == ("False", "BadSpec")
    assert condition(found, "Ready") == ("False", "BadSpec")


def pod(**status: Any) -> Json:
    return {"metadata": {"name": "p"}, "spec": {}, "status": status}


def container(restarts: int = 1, **of: Any) -> Json:
    return pod(containerStatuses=[{"name": "c", "ready": False, "restartCount": restarts, **of}])


def reason(of: Json) -> str | None:
    trouble = troubles.of_pod(of)
    return None if trouble is None else trouble.reason


def test_each_trouble_has_its_word() -> None:
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


def test_a_trouble_names_pod_and_container_and_the_last_words() -> None:
    ended = {"exitCode": 2, "message": "first\nsetting slots: 0 is not 1 or more\n"}
    trouble = troubles.of_pod(container(lastState={"terminated": ended}))
    assert trouble is not None
    assert trouble.message == "pod p, container c: setting slots: 0 is not 1 or more"


def test_what_needs_a_person_is_said_before_what_may_pass() -> None:
    crash = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}
    found = troubles.worst([container(**crash), container(state={"waiting": {"reason": "ErrImagePull"}}), pod()])
    assert found is not None
    assert found.reason == "ImagePull"
