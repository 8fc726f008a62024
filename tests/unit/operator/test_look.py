"""One look at a resource, against an API server of paper."""

import time

import pytest

from orca.operator.domain import names
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.resource import Json
from orca.operator.plan.children import finish, is_ours
from orca.operator.reconcile import observe, reconcile
from support.operator.clusters import RELEASE
from support.operator.deployments import deployment
from support.operator.paper_api import paper_api

NOBODY: frozenset[str] = frozenset()


def test_no_secret_is_read_more_than_once_in_a_look() -> None:
    with paper_api() as (paper, cluster):
        first = observe(cluster, RELEASE, deployment(), NOBODY)
        paper.said.clear()
        second = observe(cluster, RELEASE, deployment(), NOBODY)
    assert [path for _, path, _ in paper.said if "secrets" in path] == ["/api/v1/namespaces/ns/secrets"]
    assert first.pool_secret is not None
    assert second.pool_secret == first.pool_secret


def test_the_secret_of_an_external_pool_is_read_by_its_name_and_may_be_missing() -> None:
    external = deployment(pool={"external": {"urlSecret": {"name": "redis"}}})
    with paper_api() as (paper, cluster):
        assert observe(cluster, RELEASE, external, NOBODY).pool_secret is None
        secret = {"metadata": {"name": "redis"}, "data": {"url": ""}}
        paper.objects["/api/v1/namespaces/ns/secrets/redis"] = secret
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
def test_only_what_belongs_to_the_resource_is_taken_for_its_own(kind: str, owners: list[Json], is_kept: bool) -> None:
    of = {"kind": kind, "metadata": {"name": "x", "labels": names.labels("shop", "stage"), "ownerReferences": owners}}
    assert is_ours(deployment(), of) == is_kept


def test_what_was_rendered_and_has_lost_its_owner_is_taken_up_again() -> None:
    """As `kubectl delete --cascade=orphan` leaves it: nothing may restart when the resource is made again."""
    rendered = finish(deployment(), {"kind": "Service", "metadata": {"name": "x", "labels": {}}})
    orphan = {**rendered, "metadata": {**rendered["metadata"], "ownerReferences": []}}
    assert is_ours(deployment(), orphan)


def test_what_bears_our_labels_and_is_not_ours_is_neither_deleted_nor_taken() -> None:
    labels = names.labels("shop", "gateway")
    his = [{"uid": "of-another", "controller": True}]
    services = "/api/v1/namespaces/ns/services"
    with paper_api() as (paper, cluster):
        for name in ("shop", "extra"):
            metadata = {"name": name, "uid": name, "labels": labels, "ownerReferences": his}
            paper.objects[f"{services}/{name}"] = {"metadata": metadata}
        reconcile(cluster, observe(cluster, RELEASE, deployment(), NOBODY), {}, Refusals(time.monotonic))
    assert [method for method, path, _ in paper.said if path.startswith(f"{services}/") and method == "DELETE"] == []
    assert paper.calls("PATCH", "services/shop") == 0


def without_ports(body: Json) -> Json:
    """As a webhook writes one of the Services over."""
    is_it = (body["kind"], body["metadata"].get("name")) == ("Service", "shop")
    return {**body, "spec": {**body["spec"], "ports": []}} if is_it else body


def test_what_an_admission_changes_again_is_an_event_and_not_written_over_and_over() -> None:
    with paper_api() as (paper, cluster):
        paper.admits = without_ports
        refusals = Refusals(time.monotonic)
        for _ in range(3):
            observed = observe(cluster, RELEASE, deployment(), NOBODY)
            reconcile(cluster, observed, {}, refusals)
    assert paper.calls("PATCH", "/services/shop") == 1
    [accepted] = [each for each in paper.status("shop")["conditions"] if each["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("True", "Valid")
    events = [body for _, path, body in paper.said if path.endswith("/events") and body is not None]
    [told] = [each for each in events if each["reason"] == "ChangedByOthers"]
    assert told["type"] == "Warning"
    assert "somebody changes spec.ports[80] of Service shop " in told["message"]


def test_keys_that_gateways_would_wait_for_are_missed() -> None:
    named = deployment(gateway={"apiKeysSecret": {"name": "team"}})
    with paper_api() as (paper, cluster):
        assert "no Secret team" in str(observe(cluster, RELEASE, named, NOBODY).keys_problem)
        secret = {"metadata": {"name": "team"}, "data": {"others": ""}}
        paper.objects["/api/v1/namespaces/ns/secrets/team"] = secret
        assert "no key keys" in str(observe(cluster, RELEASE, named, NOBODY).keys_problem)
        secret["data"]["keys"] = ""
        assert observe(cluster, RELEASE, named, NOBODY).keys_problem is None


def test_what_was_refused_is_told_in_each_look_and_not_asked_in_each() -> None:
    wanted, refusals = deployment(), Refusals(time.monotonic)
    with paper_api() as (paper, cluster):
        paper.refuses["PATCH", "services/shop"] = 403, "quota is used up"
        for _ in range(3):
            reconcile(cluster, observe(cluster, RELEASE, wanted, NOBODY), {}, refusals)
            status = paper.objects["/apis/orca-serving.io/v1alpha1/namespaces/ns/orcadeployments/shop/status"]["status"]
            [accepted] = [each for each in status["conditions"] if each["type"] == "Accepted"]
            assert (accepted["status"], "quota is used up" in accepted["message"]) == ("False", True)
    assert paper.calls("PATCH", "services/shop") == 1
    assert paper.calls("PATCH", "deployments/shop-gateway") == 1
