"""A model that has to be fetched: what waits for it, what is kept of others, and what the status says meanwhile."""

import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from orca.core.fetch_report import FetchProgress
from orca.operator.cluster import probes
from orca.operator.domain import names
from orca.operator.domain.actions import Action, Annotate, Apply, Delete
from orca.operator.domain.api_refusals import Refusal
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.plan import status
from orca.operator.plan.plan import ReconcilePlan
from support.operator.clusters import BORN, BORN_S, RELEASE, FakeCluster
from support.operator.deployments import deployment

ON_HUB = {"uri": "hf://org/model", "revision": "v1"}
NEWER = {"uri": "hf://org/model", "revision": "v2"}
NOW = "2026-01-01T00:00:10Z"


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**{"model": ON_HUB, **spec}))
    cluster.settle()
    return cluster


def change(cluster: FakeCluster, **spec: Any) -> FakeCluster:
    cluster.deployment = deployment(generation=cluster.deployment.generation + 1, **spec)
    return cluster


def claims(cluster: FakeCluster) -> list[str]:
    return cluster.names("PersistentVolumeClaim", "fetch")


def deleted(decided: ReconcilePlan) -> list[tuple[str, str]]:
    return [(action.kind, action.name) for action in decided.actions if isinstance(action, Delete)]


def test_no_pod_that_reads_a_model_starts_before_it_is_fetched() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    assert cluster.reconcile().actions == ()
    assert (cluster.names("StatefulSet"), cluster.names("Deployment"), claims(cluster)) == (["shop-pool"], [], [job])
    cluster.end_job(job, "Complete")
    cluster.settle()
    assert cluster.names("Deployment") == ["shop-gateway"]
    assert len(cluster.names("StatefulSet", "stage")) == 1


def test_a_second_reconcile_changes_nothing() -> None:
    assert settled().reconcile().actions == ()


def test_the_current_model_serves_unchanged_until_the_next_one_is_fetched() -> None:
    cluster = settled(replicas=2)
    before = {key: value for key, value in cluster.objects.items() if key[0] in ("StatefulSet", "Deployment", "Pod")}
    change(cluster, model=NEWER, replicas=2, gateway={"replicas": 5}, rollout={"maxUnavailable": 1}).reconcile()
    assert cluster.reconcile().actions == ()
    assert {key: cluster.objects[key] for key in before} == before
    old = cluster.names("StatefulSet", "stage")
    cluster.settle()
    assert not set(old) & set(cluster.names("StatefulSet", "stage"))
    assert cluster.objects["Deployment", "shop-gateway"]["spec"]["replicas"] == 5


def test_a_revert_during_a_fetch_needs_no_other_fetch() -> None:
    cluster = settled()
    [first] = cluster.names("Job")
    change(cluster, model=NEWER).reconcile()
    assert len(cluster.names("Job")) == 2
    change(cluster, model=ON_HUB).reconcile()
    assert (cluster.names("Job"), cluster.reconcile().actions) == ([first], ())


@pytest.mark.parametrize(("policy", "kept"), [("Keep", 2), ("Delete", 1)])
def test_the_volume_claim_of_an_unused_model_follows_the_deletion_policy(policy: str, kept: int) -> None:
    cluster = settled(deletionPolicy=policy)
    change(cluster, model=NEWER, deletionPolicy=policy).reconcile()
    assert len(claims(cluster)) == 2
    cluster.settle()
    assert (len(cluster.names("Job")), len(claims(cluster))) == (1, kept)


def test_suspend_removes_groups_and_gateways_also_during_a_fetch() -> None:
    cluster = settled()
    cluster.pool = PoolStatus(generation=int(BORN_S) + 1)
    change(cluster, model=NEWER, suspend=True)
    while cluster.reconcile().actions:
        pass
    assert cluster.names("StatefulSet") == ["shop-pool"]
    assert cluster.objects["Deployment", "shop-gateway"]["spec"]["replicas"] == 0


def test_gateways_still_get_a_model_replaced_during_suspension_to_read_its_answers() -> None:
    cluster = settled()
    [before] = claims(cluster)
    cluster.pool = PoolStatus(generation=int(BORN_S), revision="r1")
    change(cluster, model=NEWER, suspend=True, deletionPolicy="Delete").reconcile()
    for pod in cluster.names("Pod", "gateway"):
        del cluster.objects["Pod", pod]
    cluster.settle()
    change(cluster, model=NEWER).settle()
    assert before in json.dumps(cluster.objects["Deployment", "shop-gateway"])
    assert before in claims(cluster)


def test_a_running_fetch_is_replaced_when_its_spec_changes() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    change(cluster, model={**ON_HUB, "tokenSecret": {"name": "mine"}})
    [job] = cluster.names("Job")
    assert deleted(cluster.reconcile()) == [("Job", job)]
    cluster.reconcile()
    assert "mine" in json.dumps(cluster.objects["Job", job])


@pytest.mark.parametrize(
    "shape",
    [
        {"resources": {"limits": {"cpu": "1"}}},
        {"podPatch": {"spec": {"priorityClassName": "high"}}},
        {"podPatchRemove": ["/spec/securityContext/fsGroup"]},
    ],
)
def test_a_fetch_gets_another_shape_while_it_runs_and_keeps_it_after_its_success(shape: Json) -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    before = cluster.objects["Job", job]["spec"]
    change(cluster, model=ON_HUB, fetch=shape)
    assert deleted(cluster.reconcile()) == [("Job", job)]
    cluster.settle()
    assert cluster.objects["Job", job]["spec"] != before
    assert change(cluster, model=ON_HUB).reconcile().actions == ()


def test_a_successful_fetch_is_never_repeated() -> None:
    cluster = settled()
    change(cluster, model={**ON_HUB, "tokenSecret": {"name": "mine"}})
    assert cluster.reconcile().actions == ()


def test_a_model_is_still_there_after_its_finished_job_is_cleaned_up() -> None:
    cluster = settled()
    [job] = cluster.names("Job")
    del cluster.objects["Job", job]
    assert cluster.reconcile().actions == ()
    change(cluster, model=ON_HUB, replicas=2, gateway={"replicas": 3}).settle()
    assert len(cluster.names("StatefulSet", "stage")) == 2
    assert cluster.objects["Deployment", "shop-gateway"]["spec"]["replicas"] == 3
    assert (cluster.names("Job"), model_ready(cluster)["reason"]) == ([], "Fetched")


def test_a_model_that_was_fetched_before_there_were_marks_gets_its_mark() -> None:
    cluster = settled()
    [claim] = claims(cluster)
    metadata = cluster.objects["PersistentVolumeClaim", claim]["metadata"]
    del metadata["annotations"][names.FETCHED_ANNOTATION]
    [marked] = settled_again(cluster)
    assert isinstance(marked, Annotate)
    assert marked.kind == "PersistentVolumeClaim"
    assert model_ready(cluster)["reason"] == "Fetched"
    assert (marked.name, marked.uid) == (claim, metadata["uid"])
    assert json.loads(metadata["annotations"][names.FETCHED_ANNOTATION])["uri"] == ON_HUB["uri"]


def settled_again(cluster: FakeCluster) -> list[Action]:
    """Return all actions until there is nothing to do."""
    return [action for plan in cluster.settle() for action in plan.actions]


def test_a_mark_stays_when_its_claim_is_written_again() -> None:
    cluster = settled()
    [job] = cluster.names("Job")
    del cluster.objects["Job", job]
    change(cluster, model={**ON_HUB, "cache": {"sizeGiB": 60}}).settle()
    assert cluster.names("Job") == []


def test_a_claim_that_is_made_again_with_the_annotations_of_the_old_one_is_filled_again() -> None:
    cluster = settled()
    [claim] = claims(cluster)
    del cluster.objects["Job", claim]
    cluster.objects["PersistentVolumeClaim", claim]["metadata"]["uid"] = "another"
    cluster.reconcile()
    assert cluster.names("Job") == [claim]
    assert model_ready(cluster)["reason"] == "ModelLoading"


@pytest.mark.parametrize("mark", [None, "true", "{}", '{"uri": "hf://org/other"}'])
def test_a_claim_without_a_job_and_a_sound_mark_is_filled_again(mark: str | None) -> None:
    cluster = settled()
    [claim] = claims(cluster)
    del cluster.objects["Job", claim]
    marks = cluster.objects["PersistentVolumeClaim", claim]["metadata"]["annotations"]
    marks |= {names.FETCHED_ANNOTATION: mark}
    if mark is None:
        del marks[names.FETCHED_ANNOTATION]
    cluster.reconcile()
    assert cluster.names("Job") == [claim]


def test_a_claim_gets_no_mark_before_its_fetch_succeeds() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [claim] = claims(cluster)
    cluster.end_job(claim, "Failed")
    cluster.reconcile()
    assert names.FETCHED_ANNOTATION not in cluster.objects["PersistentVolumeClaim", claim]["metadata"]["annotations"]


def test_a_revert_to_a_model_that_is_still_in_its_volume_needs_no_fetch() -> None:
    cluster = settled()
    change(cluster, model=NEWER).settle()
    assert len(claims(cluster)) == 2
    made = [each for each in settled_again(change(cluster, model=ON_HUB)) if isinstance(each, Apply)]
    assert [each.manifest["kind"] for each in made if each.manifest["kind"] == "Job"] == []


def test_a_job_that_runs_beside_a_complete_model_goes() -> None:
    cluster = settled()
    [job] = cluster.names("Job")
    cluster.objects["Job", job]["status"] = {}
    assert deleted(cluster.reconcile()) == [("Job", job)]
    assert (cluster.names("Job"), cluster.reconcile().actions) == ([], ())


def test_a_mark_that_is_refused_is_no_fault_of_the_spec() -> None:
    cluster = settled()
    refused = Refusal(Annotate("PersistentVolumeClaim", "c", "uid", {}, "its model is complete"), "no")
    found = status.make_status(cluster.observe(at=NOW), cluster.reconcile(), {}, [refused])
    [accepted] = [each for each in found["conditions"] if each["type"] == "Accepted"]
    assert accepted["status"] == "True"


def test_a_failed_fetch_is_retried_after_a_while() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    cluster.end_job(job, "Failed", at=BORN)
    cluster.now_s = BORN_S + 60
    assert cluster.reconcile().actions == ()
    cluster.now_s = BORN_S + 121
    assert deleted(cluster.reconcile()) == [("Job", job)]


def test_a_deleted_volume_is_fetched_again() -> None:
    cluster = settled()
    [name] = claims(cluster)
    del cluster.objects["PersistentVolumeClaim", name]
    cluster.reconcile()
    cluster.objects["PersistentVolumeClaim", name]["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
    assert ("Job", name) in deleted(cluster.reconcile())


def test_a_volume_grows_with_the_spec_and_keeps_its_immutable_fields() -> None:
    cluster = settled(model={**ON_HUB, "cache": {"sizeGiB": 10}})
    [name] = claims(cluster)
    other = {"storageClassName": "slow", "accessMode": "ReadWriteMany"}
    for size, wanted in [(2048, "2048Gi"), (5, "2048Gi")]:
        change(cluster, model={**ON_HUB, "cache": {"sizeGiB": size, **other}}).reconcile()
        spec = cluster.objects["PersistentVolumeClaim", name]["spec"]
        assert spec == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": wanted}}}


def test_the_fetch_pod_of_a_lost_node_is_deleted_so_that_the_next_one_starts() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    cluster.add_pod(f"{job}-abcde", cluster.objects["Job", job]["spec"]["template"]["metadata"]["labels"])
    cluster.objects["Pod", f"{job}-abcde"]["metadata"]["deletionTimestamp"] = NOW
    cluster.lost_nodes = frozenset({"node-1"})
    assert deleted(cluster.reconcile()) == [("Pod", f"{job}-abcde")]


def fetching(figures: FetchProgress | None = None, **container: Any) -> Json:
    """The condition ModelReady while the pod of the fetch is in some state."""
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    [job] = cluster.names("Job")
    labels = cluster.objects["Job", job]["spec"]["template"]["metadata"]["labels"]
    cluster.add_pod(f"{job}-abcde", labels, is_ready=not container)
    state = {"name": "fetch", "ready": not container, "restartCount": 0, "state": container}
    cluster.objects["Pod", f"{job}-abcde"]["status"]["containerStatuses"] = [state]
    return model_ready(cluster, figures)


def model_ready(cluster: FakeCluster, figures: FetchProgress | None = None) -> Json:
    found = status.make_status(replace(cluster.observe(at=NOW), fetch=figures), cluster.reconcile(RELEASE), {})
    [condition] = [each for each in found["conditions"] if each["type"] == "ModelReady"]
    return dict(condition)


def test_a_fetch_reports_its_progress() -> None:
    found = fetching(FetchProgress(bytes_done=3_100_000_000, bytes_total=15_200_000_000))
    assert (found["status"], found["reason"]) == ("False", "ModelLoading")
    assert found["message"] == "3.10 of 15.20 GB (20%) of hf://org/model are fetched"


def test_a_rollout_to_another_model_begins_with_its_fetch() -> None:
    cluster = change(settled(), model=NEWER)
    cluster.reconcile()
    found = status.make_status(cluster.observe(at=NOW), cluster.reconcile(), {})
    said = {each["type"]: (each["status"], each["reason"]) for each in found["conditions"]}
    assert said["Progressing"] == ("True", "ModelLoading")
    assert said["Ready"] == ("False", "ModelLoading")
    assert (said["GatewayReady"][0], said["Degraded"][0]) == ("True", "False")


def test_a_fetch_with_an_error_reports_it_with_its_progress() -> None:
    found = fetching(FetchProgress(1, 4, "ModelUnreachable: a.json: connection refused"))
    assert found["reason"] == "ModelUnreachable"
    assert found["message"].startswith("a.json: connection refused; 0.00 of 0.00 GB (25%)")


@pytest.mark.parametrize("reason", ["ModelMissing", "ModelDenied", "ModelBroken", "NoSpace", "ModelUnreachable"])
def test_a_finished_fetch_reports_its_reason(reason: str) -> None:
    ended = {"exitCode": 1, "message": f'{{"log": 1}}\n{reason}: hf://org/model: so it is\n'}
    found = fetching(terminated=ended)
    assert (found["reason"], found["message"]) == (reason, "hf://org/model: so it is; the fetch tries again")


def test_a_fetch_without_its_image_reports_that() -> None:
    assert fetching(waiting={"reason": "ImagePullBackOff"})["reason"] == "ImagePull"


def test_a_fetch_that_failed_without_a_message_is_reported_as_crashing() -> None:
    cluster = FakeCluster(deployment(model=ON_HUB))
    cluster.reconcile()
    cluster.end_job(cluster.names("Job")[0], "Failed")
    found = model_ready(cluster)
    assert (found["reason"], found["message"]) == ("Crashing", "the fetch has failed: its pod has failed")


def test_a_fetched_model_and_a_model_on_a_volume_are_ready() -> None:
    assert model_ready(settled())["reason"] == "Fetched"
    cluster = FakeCluster(deployment())
    assert model_ready(cluster)["reason"] == "InPlace"


class _Progress(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"bytes_done": 1, "bytes_total": 2, "problem": null}' if self.path == "/progress" else b"?"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def pod(phase: str) -> Json:
    return {
        "metadata": {"name": "p", "labels": {names.ROLE_LABEL: "fetch"}},
        "status": {"phase": phase, "podIP": "127.0.0.1"},
    }


def test_the_progress_is_that_of_the_running_pod() -> None:
    with HTTPServer(("127.0.0.1", 0), _Progress) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        assert probes.poll_fetch([pod("Failed"), pod("Running")], server.server_port) == FetchProgress(1, 2, None)
        thread.join()


def test_a_pod_that_does_not_answer_has_no_progress() -> None:
    assert probes.poll_fetch([pod("Running")], 9) is None
    assert probes.poll_fetch([pod("Succeeded")]) is None
