"""One reconcile of a resource, against a fake API server."""

import time
from dataclasses import replace

import pytest

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain import names
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.keys import plan_key, profile_key
from orca.operator.plan.children import finish, is_ours
from orca.operator.plan.slo.making import results_to_read
from orca.operator.reconcile import observe, reconcile
from support.operator.clusters import RELEASE
from support.operator.deployments import deployment
from support.operator.fake_api_server import FakeApiServer, fake_api_server
from support.operator.planned_files import SUMMARY, plan_body, profile_body

NOBODY: frozenset[str] = frozenset()


def test_no_secret_is_read_more_than_once_in_a_reconcile() -> None:
    with fake_api_server() as (fake, cluster):
        first = observe(cluster, RELEASE, deployment(), NOBODY)
        fake.said.clear()
        second = observe(cluster, RELEASE, deployment(), NOBODY)
    assert [path for _, path, _ in fake.said if "secrets" in path] == ["/api/v1/namespaces/ns/secrets"]
    assert first.pool_secret is not None
    assert second.pool_secret == first.pool_secret


def test_the_secret_of_an_external_pool_is_read_by_its_name_and_may_be_missing() -> None:
    external = deployment(pool={"external": {"urlSecret": {"name": "redis"}}})
    with fake_api_server() as (fake, cluster):
        assert observe(cluster, RELEASE, external, NOBODY).pool_secret is None
        secret = {"metadata": {"name": "redis"}, "data": {"url": ""}}
        fake.objects["/api/v1/namespaces/ns/secrets/redis"] = secret
        assert observe(cluster, RELEASE, external, NOBODY).pool_secret == secret


@pytest.mark.parametrize(
    ("kind", "owners", "is_kept"),
    [
        ("StatefulSet", [{"uid": "uid-1", "controller": True}], True),
        ("StatefulSet", [{"uid": "of-another", "controller": True}], False),
        ("StatefulSet", [{"uid": "uid-1"}], False),
        ("StatefulSet", [], False),
        ("Pod", [{"uid": "of-a-set", "controller": True}], True),
        ("Secret", [], True),
        ("Secret", [{"uid": "of-another", "controller": True}], False),
    ],
)
def test_only_objects_owned_by_the_resource_are_its_children(kind: str, owners: list[Json], is_kept: bool) -> None:
    of = {"kind": kind, "metadata": {"name": "x", "labels": names.labels("shop", "stage"), "ownerReferences": owners}}
    assert is_ours(deployment(), of) == is_kept


def test_a_rendered_object_that_lost_its_owner_reference_is_adopted_again() -> None:
    """`kubectl delete --cascade=orphan` leaves such objects: nothing may restart when the resource is created again."""
    rendered = finish(deployment(), {"kind": "Service", "metadata": {"name": "x", "labels": {}}})
    orphan = {**rendered, "metadata": {**rendered["metadata"], "ownerReferences": []}}
    assert is_ours(deployment(), orphan)


def test_an_object_with_the_operators_labels_and_another_owner_is_neither_deleted_nor_adopted() -> None:
    labels = names.labels("shop", "gateway")
    his = [{"uid": "of-another", "controller": True}]
    services = "/api/v1/namespaces/ns/services"
    with fake_api_server() as (fake, cluster):
        for name in ("shop", "extra"):
            metadata = {"name": name, "uid": name, "labels": labels, "ownerReferences": his}
            fake.objects[f"{services}/{name}"] = {"metadata": metadata}
        reconcile(cluster, observe(cluster, RELEASE, deployment(), NOBODY), {}, Refusals(time.monotonic))
    assert [method for method, path, _ in fake.said if path.startswith(f"{services}/") and method == "DELETE"] == []
    assert fake.calls("PATCH", "services/shop") == 0


def fetched(fake: FakeApiServer, cluster: Cluster) -> str:
    """Reconcile until a model is fetched. Returns: the name of its Job and claim."""
    reconcile_hub_model(cluster)
    [job] = [path for path in fake.objects if "/jobs/" in path]
    done = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    fake.objects[job] |= {"status": {"conditions": [done]}}
    reconcile_hub_model(cluster)
    return job.rpartition("/")[2]


def reconcile_hub_model(cluster: Cluster) -> None:
    observed = observe(cluster, RELEASE, deployment(model={"uri": "hf://org/model"}), NOBODY)
    reconcile(cluster, observed, {}, Refusals(time.monotonic))


def test_a_claim_is_marked_by_a_write_that_touches_nothing_else_and_needs_its_job_no_more() -> None:
    with fake_api_server() as (fake, cluster):
        name = fetched(fake, cluster)
        claim = fake.objects[f"/api/v1/namespaces/ns/persistentvolumeclaims/{name}"]
        writes = [body for _, path, body in fake.said if path.endswith(f"persistentvolumeclaims/{name}") and body]
        metadata = writes[-1]["metadata"]
        assert (writes[-1].keys(), metadata["uid"]) == ({"apiVersion", "kind", "metadata"}, claim["metadata"]["uid"])
        assert list(metadata["annotations"]) == [names.FETCHED_ANNOTATION]
        del fake.objects[f"/apis/batch/v1/namespaces/ns/jobs/{name}"]
        reconcile_hub_model(cluster)
        assert not any("/jobs/" in path for path in fake.objects)
        assert fake.calls("PATCH", f"persistentvolumeclaims/{name}") == len(writes)


@pytest.mark.parametrize("status", [404, 409])
def test_a_claim_that_goes_before_its_mark_is_no_refusal(status: int) -> None:
    with fake_api_server() as (fake, cluster):
        reconcile_hub_model(cluster)
        fake.refuses["PATCH", "uid-of-another"] = status, "it is another one"
        cluster.annotate("PersistentVolumeClaim", "ns", "uid-of-another", "uid", {"a": "b"})


def without_ports(body: Json) -> Json:
    """Change one of the Services as a webhook does."""
    is_it = (body["kind"], body["metadata"].get("name")) == ("Service", "shop")
    return {**body, "spec": {**body["spec"], "ports": []}} if is_it else body


def test_a_field_that_admission_changes_back_is_an_event_and_not_written_repeatedly() -> None:
    with fake_api_server() as (fake, cluster):
        fake.admits = without_ports
        refusals = Refusals(time.monotonic)
        for _ in range(3):
            observed = observe(cluster, RELEASE, deployment(), NOBODY)
            reconcile(cluster, observed, {}, refusals)
    assert fake.calls("PATCH", "/services/shop") == 1
    [accepted] = [each for each in fake.status("shop")["conditions"] if each["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("True", "Valid")
    events = [body for _, path, body in fake.said if path.endswith("/events") and body is not None]
    [told] = [each for each in events if each["reason"] == "ChangedByOthers"]
    assert told["type"] == "Warning"
    assert "somebody changes spec.ports[80] of Service shop " in told["message"]


def test_a_plan_is_written_once_and_each_change_of_it_is_an_event() -> None:
    wanted = deployment(slo={"latencyMs": 8000, "devices": 4, "workload": {"lengths": "8/8"}})
    profile = names.profile("shop", profile_key(wanted, RELEASE.worker))
    plan = names.plan("shop", plan_key(wanted, RELEASE.worker))
    results = {profile: profile_body(), plan: plan_body(shortfall="no schedule meets the goal")}
    with fake_api_server() as (fake, cluster):
        before: Json = {}
        for _ in range(4):
            observed = observe(cluster, RELEASE, wanted, NOBODY)
            answered = replace(
                observed, pool=PoolStatus(results={key: results[key] for key in results_to_read(observed)})
            )
            reconcile(cluster, answered, before, Refusals(time.monotonic))
            before = fake.status("shop")
    for name in results:
        assert fake.calls("PATCH", f"configmaps/{name}") == 1
    assert before["plan"]["summary"] == SUMMARY
    events = [body for _, path, body in fake.said if path.endswith("/events") and body is not None]
    wanted_events = {"Profiling", "Planning", "PlanChanged", "Planned", "Infeasible"}
    assert [(each["reason"], each["type"]) for each in events if each["reason"] in wanted_events] == [
        ("Profiling", "Normal"),
        ("Planning", "Normal"),
        ("PlanChanged", "Normal"),
        ("Planned", "Normal"),
        ("Infeasible", "Warning"),
    ]


def test_a_missing_secret_of_api_keys_is_reported() -> None:
    named = deployment(gateway={"apiKeysSecret": {"name": "team"}})
    with fake_api_server() as (fake, cluster):
        assert "no Secret team" in str(observe(cluster, RELEASE, named, NOBODY).keys_problem)
        secret = {"metadata": {"name": "team"}, "data": {"others": ""}}
        fake.objects["/api/v1/namespaces/ns/secrets/team"] = secret
        assert "no key keys" in str(observe(cluster, RELEASE, named, NOBODY).keys_problem)
        secret["data"]["keys"] = ""
        assert observe(cluster, RELEASE, named, NOBODY).keys_problem is None


def test_a_refused_action_is_reported_in_each_reconcile_and_not_tried_in_each() -> None:
    wanted, refusals = deployment(), Refusals(time.monotonic)
    with fake_api_server() as (fake, cluster):
        fake.refuses["PATCH", "services/shop"] = 403, "quota is used up"
        for _ in range(3):
            reconcile(cluster, observe(cluster, RELEASE, wanted, NOBODY), {}, refusals)
            status = fake.objects["/apis/orca-serving.io/v1alpha1/namespaces/ns/orcadeployments/shop/status"]["status"]
            [accepted] = [each for each in status["conditions"] if each["type"] == "Accepted"]
            assert (accepted["status"], "quota is used up" in accepted["message"]) == ("False", True)
    assert fake.calls("PATCH", "services/shop") == 1
    assert fake.calls("PATCH", "deployments/shop-gateway") == 1


def test_gateways_keep_their_number_while_it_cannot_be_handed_over_to_an_autoscaler() -> None:
    """The next apply leaves the number out. Before somebody else has it, it would become 1."""
    wanted, refusals, path = deployment(gateway={"replicas": 3}), Refusals(time.monotonic), "deployments/shop-gateway"
    with fake_api_server() as (fake, cluster):
        reconcile(cluster, observe(cluster, RELEASE, wanted, NOBODY), {}, refusals)
        fields = {"manager": names.MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        fake.objects[f"/apis/apps/v1/namespaces/ns/{path}"]["metadata"]["managedFields"] = [fields]
        wanted = deployment(generation=2, gateway={"autoscaled": True})
        written = fake.calls("PATCH", path)
        fake.refuses["PATCH", path] = 403, "a policy refuses it"
        for _ in range(2):
            reconcile(cluster, observe(cluster, RELEASE, wanted, NOBODY), {}, refusals)
        assert fake.calls("PATCH", path) == written + 1
        [accepted] = [each for each in fake.status("shop")["conditions"] if each["type"] == "Accepted"]
        assert (accepted["status"], "a policy refuses it" in accepted["message"]) == ("False", True)
        fake.refuses.clear()
        reconcile(cluster, observe(cluster, RELEASE, wanted, NOBODY), {}, Refusals(time.monotonic))
        handed, applied = [body["spec"] for _, end, body in fake.said if end.endswith(path) and body is not None][-2:]
    assert handed == {"replicas": 3}
    assert "replicas" not in applied
