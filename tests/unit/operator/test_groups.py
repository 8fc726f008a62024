"""Groups that find no nodes, or whose containers end again and again: they give way and come back."""

import json
from datetime import UTC, datetime

import pytest

from orca.operator.domain import group_pauses, names
from orca.operator.domain.group_pauses import Pause
from orca.operator.domain.resource import Json
from orca.operator.plan import status
from support.operator.clusters import BORN_S, FakeCluster
from support.operator.deployments import deployment

NOW = "2026-01-01T00:00:10Z"


def cluster_of(**spec: object) -> FakeCluster:
    """A group whose second stage finds no node."""
    spec = {"parallelism": {"stages": 2}, "startupSeconds": 60, **spec}
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    unplace(cluster, f"{group_of(cluster)}-1")
    return cluster


def group_of(cluster: FakeCluster) -> str:
    return cluster.names("StatefulSet", "stage")[0]


def unplace(cluster: FakeCluster, pod: str) -> None:
    """It is made again, finds no node from now on, and its group does not serve."""
    scheduler = f"{pod.rpartition('-')[0]}-scheduler-0"
    cluster.make_unready(scheduler)
    cluster.make_unready(pod, node=None)
    since = datetime.fromtimestamp(cluster.now_s, UTC).isoformat()
    told = {"type": "PodScheduled", "status": "False", "lastTransitionTime": since}
    cluster.objects["Pod", pod]["status"]["conditions"].append(told)


def replicas(cluster: FakeCluster, group: str) -> tuple[int, int]:
    """Return the replicas of stages and scheduler."""
    sets = (group, f"{group}-scheduler")
    stages, scheduler = (cluster.objects["StatefulSet", name]["spec"]["replicas"] for name in sets)
    return stages, scheduler


def pass_time(cluster: FakeCluster, seconds: float) -> None:
    cluster.now_s += seconds
    cluster.reconcile()


def test_a_group_without_nodes_is_overdue_after_its_startup_time() -> None:
    cluster = FakeCluster(deployment(replicas=2, startupSeconds=60))
    cluster.reconcile()
    assert not cluster.reconcile().groups[0].is_overdue
    cluster.now_s = BORN_S + 62
    [group] = cluster.reconcile().groups
    assert (group.is_placed, group.is_overdue) == (False, True)


def test_a_pod_rescheduled_long_after_its_group_gets_the_full_startup_time() -> None:
    cluster = cluster_of()
    cluster.now_s += 10_000
    group = group_of(cluster)
    unplace(cluster, f"{group}-1")
    pass_time(cluster, 59)
    assert not cluster.reconcile().groups[0].is_overdue
    assert replicas(cluster, group) == (2, 1)
    pass_time(cluster, 2)
    assert replicas(cluster, group) == (0, 0)


def test_a_paused_group_comes_back_and_each_pause_is_longer() -> None:
    cluster = cluster_of()
    group = group_of(cluster)
    waits = []
    for _ in range(3):
        pass_time(cluster, 61)
        assert replicas(cluster, group) == (0, 0)
        began_s = cluster.now_s
        while replicas(cluster, group) == (0, 0):
            pass_time(cluster, 1)
        waits.append(cluster.now_s - began_s)
        assert replicas(cluster, group) == (2, 1)
        unplace(cluster, f"{group}-1")
    assert 30 <= waits[0] <= 61
    assert 60 <= waits[1] <= 121
    assert 120 <= waits[2] <= 241


def test_a_pause_that_begins_in_the_future_is_over() -> None:
    pause = Pause(times=1, begun_s=int(BORN_S), reason="NoCapacity")
    for now_s, is_on in ((BORN_S, True), (BORN_S + 29, True), (BORN_S - 3600, False)):
        assert group_pauses.next_pause(pause, "g", is_ready=False, problem=None, now_s=now_s).is_on == is_on


def test_a_group_with_a_problem_is_paused_even_if_its_scheduler_is_still_ready() -> None:
    found = group_pauses.next_pause(Pause(), "g", is_ready=True, problem="NoCapacity", now_s=BORN_S)
    assert (found.is_on, found.times) == (True, 1)


def test_a_group_that_serves_again_loses_its_record_of_pauses() -> None:
    cluster = cluster_of()
    pass_time(cluster, 61)
    pass_time(cluster, 61)
    stages = cluster.objects["StatefulSet", group_of(cluster)]
    assert group_pauses.read(stages).times == 1
    for kind, name in list(cluster.objects):
        if kind == "Pod" and name.startswith(group_of(cluster)):
            del cluster.objects[kind, name]
    cluster.settle()
    assert group_pauses.read(cluster.objects["StatefulSet", group_of(cluster)]) == Pause()
    assert cluster.reconcile().actions == ()


def test_a_group_is_not_paused_while_another_group_leaves() -> None:
    cluster = cluster_of(replicas=2)
    pass_time(cluster, 61)  # meanwhile nobody leaves
    assert replicas(cluster, group_of(cluster)) == (0, 0)
    other = cluster_of(replicas=2)
    other.now_s += 61
    leaving = other.names("StatefulSet", "stage")[1]
    other.objects["StatefulSet", leaving]["metadata"]["deletionTimestamp"] = NOW
    other.reconcile()
    assert replicas(other, group_of(other)) == (2, 1)


def test_a_pod_that_a_user_removed_from_its_group_does_not_prevent_a_pause() -> None:
    cluster = cluster_of()
    cluster.add_pod("quarantined", {names.ROLE_LABEL: "stage", names.DEPLOYMENT_LABEL: "shop"})
    pass_time(cluster, 61)
    assert replicas(cluster, group_of(cluster)) == (0, 0)


def test_a_group_gets_a_new_startup_time_after_another_group_has_made_room() -> None:
    """The old one's pods end after it is gone, and a node is found a moment later than that."""
    cluster = FakeCluster(deployment(startupSeconds=60))
    cluster.settle()
    old = group_of(cluster)
    ending = cluster.objects["Pod", f"{old}-0"]
    cluster.deployment = deployment(generation=2, startupSeconds=60, parallelism={"stages": 2})
    cluster.reconcile()
    [new] = [name for name in cluster.names("StatefulSet", "stage") if name != old]
    pass_time(cluster, 62)
    cluster.reconcile()
    cluster.reconcile()
    assert ("StatefulSet", old) not in cluster.objects
    cluster.objects["Pod", f"{old}-0"] = ending | {"metadata": ending["metadata"] | {"deletionTimestamp": NOW}}
    pass_time(cluster, 100)
    del cluster.objects["Pod", f"{old}-0"]
    pass_time(cluster, 59)
    assert replicas(cluster, new) == (2, 1)
    pass_time(cluster, 2)
    assert replicas(cluster, new) == (0, 0)


def test_a_paused_group_of_an_old_revision_comes_back_while_another_is_wanted() -> None:
    cluster = cluster_of()
    group = group_of(cluster)
    pass_time(cluster, 61)
    assert replicas(cluster, group) == (0, 0)
    model = {"uri": "hf://org/slow"}
    cluster.deployment = deployment(generation=2, startupSeconds=60, parallelism={"stages": 2}, model=model)
    pass_time(cluster, 61)
    assert replicas(cluster, group) == (2, 1)
    assert not group_pauses.read(cluster.objects["StatefulSet", group]).is_on


@pytest.mark.parametrize("count", [None, "", "two", "-1", "0", "1e3", "65", "9" * 5000])
def test_a_paused_group_with_an_unknown_number_of_stages_stays_paused_and_the_wanted_one_is_created(
    count: str | None,
) -> None:
    cluster = cluster_of()
    group = group_of(cluster)
    pass_time(cluster, 61)
    annotations = cluster.objects["StatefulSet", group]["metadata"]["annotations"]
    del annotations[names.STAGES_ANNOTATION]
    if count is not None:
        annotations[names.STAGES_ANNOTATION] = count
    cluster.deployment = deployment(generation=2, startupSeconds=60, parallelism={"stages": 3})
    pass_time(cluster, 3600)
    assert replicas(cluster, group)[0] == 0
    assert len([kind for kind, _ in cluster.objects if kind == "StatefulSet"]) > 2


@pytest.mark.parametrize(
    "written",
    [
        *("x", "[]", "3", '{"later": 1}', '{"times": "2"}', '{"times": null}', '{"times": -1}', '{"reason": "Bored"}'),
        *(
            '{"cause": 5}',
            '{"reason": []}',
            '{"begun_s": ""}',
            '{"begun_s": 1e400}',
            f'{{"room_s": {10**400}}}',
            "[" * 100_000,
        ),
    ],
    ids=lambda written: written[:20],
)
def test_a_pause_annotation_that_the_operator_did_not_write_is_ignored(written: str) -> None:
    assert group_pauses.read({"metadata": {"annotations": {names.PAUSE_ANNOTATION: written}}}) == Pause()


def test_a_paused_group_is_reported_with_the_time_of_its_return() -> None:
    cluster = cluster_of()
    pass_time(cluster, 61)
    found = status.make_status(cluster.observe(at=NOW), cluster.reconcile(), {})
    [told] = [each for each in found["conditions"] if each["type"] == "WorkersReady"]
    assert (told["status"], told["reason"]) == ("False", "NoCapacity")
    assert "has given way once" in told["message"]


def crash(cluster: FakeCluster, pod: str, restarts: int, **state: Json) -> None:
    scheduler = f"{group_of(cluster)}-scheduler-0"
    cluster.make_unready(scheduler)
    cluster.make_unready(pod)
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "c", "ready": False, "restartCount": restarts, "state": waiting, **state}
    cluster.objects["Pod", pod]["status"]["containerStatuses"] = [container]


@pytest.mark.parametrize("pod", ["-0", "-scheduler-0"])
def test_a_group_whose_container_crashes_repeatedly_is_paused_once(pod: str) -> None:
    cluster = FakeCluster(deployment())
    cluster.settle()
    group = group_of(cluster)
    crash(cluster, f"{group}{pod}", restarts=9)
    cluster.reconcile()
    assert replicas(cluster, group) == (1, 1)
    crash(cluster, f"{group}{pod}", restarts=10)
    cluster.reconcile()
    assert replicas(cluster, group) == (0, 0)
    crash(cluster, f"{group}{pod}", restarts=0)
    pass_time(cluster, 61)
    assert replicas(cluster, group) == (1, 1)
    assert cluster.reconcile().actions == ()


def test_a_group_that_has_given_way_is_reported_with_what_its_container_said_last() -> None:
    cluster = FakeCluster(deployment())
    cluster.settle()
    group = group_of(cluster)
    ended = {"terminated": {"exitCode": 2, "message": "a\nsetting --layers: '2,2' adds up to 4\n"}}
    crash(cluster, f"{group}-0", restarts=10, lastState=ended)
    cluster.reconcile()
    assert replicas(cluster, group) == (0, 0)
    cluster.start()  # the pods are gone
    assert not cluster.observed.children.pods(names.STAGE)
    found = status.make_status(cluster.observed, cluster.reconcile(), {})
    [message] = [each["message"] for each in found["conditions"] if each["type"] == "WorkersReady"]
    said = f"(pod {group}-0, container c: setting --layers: '2,2' adds up to 4)"
    assert f"has given way once, since one of its containers kept crashing {said}; it comes back at" in message


def test_a_pause_without_a_cause_is_written_as_releases_before_read_it() -> None:
    [written] = Pause(times=1, begun_s=5, reason="NoCapacity").annotations.values()
    assert json.loads(written) == {"times": 1, "begun_s": 5, "reason": "NoCapacity", "room_s": None}


def test_a_new_group_that_crashes_does_not_remove_the_old_one() -> None:
    cluster = FakeCluster(deployment())
    cluster.settle()
    [old] = cluster.names("StatefulSet", "stage")
    cluster.deployment = deployment(generation=2, parallelism={"stages": 2})
    cluster.reconcile()
    [new] = [name for name in cluster.names("StatefulSet", "stage") if name != old]
    for stage in range(2):
        template = cluster.objects["StatefulSet", new]["spec"]["template"]
        cluster.add_pod(f"{new}-{stage}", template["metadata"]["labels"])
    waiting = {"name": "c", "ready": False, "restartCount": 10, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    cluster.objects["Pod", f"{new}-0"]["status"]["containerStatuses"] = [waiting]
    for _ in range(3):
        pass_time(cluster, 5)
    assert replicas(cluster, new) == (0, 0)
    assert replicas(cluster, old) == (1, 1)
