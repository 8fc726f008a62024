"""A resource is served by one operator, and another one leaves it alone until it is handed over."""

import logging
from collections.abc import Iterator

import pytest

from orca.operator.cluster.api_server import Cluster
from orca.operator.cluster.watching import is_news
from orca.operator.domain import names
from orca.operator.domain.resource import BadSpec, Json
from orca.operator.ownership import EVENT_EVERY_S, Owners
from orca.operator.plan.ownership import HANDOVER_S, Ownership, OwnerStep, explain, find_step
from support.operator.deployments import body
from support.operator.fake_api_server import FakeApiServer, fake_api_server

BLUE, GREEN = "blue/orca-operator", "green/orca-operator"
PATH = "/apis/orca-serving.io/v1alpha1/namespaces/ns/orcadeployments/shop"
DEPLOYMENT = "/apis/apps/v1/namespaces/blue/deployments/orca-operator"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/blue/leases/orca-operator"


@pytest.mark.parametrize(
    ("chosen", "owner", "identity", "step"),
    [
        (None, None, GREEN, OwnerStep.TAKE),
        (None, GREEN, GREEN, OwnerStep.SERVE),
        (None, BLUE, GREEN, OwnerStep.WAIT),
        (GREEN, None, GREEN, OwnerStep.TAKE),
        (GREEN, GREEN, GREEN, OwnerStep.SERVE),
        (GREEN, BLUE, GREEN, OwnerStep.WAIT),
        (BLUE, GREEN, GREEN, OwnerStep.RELEASE),
        (BLUE, None, GREEN, OwnerStep.LEAVE),
        (BLUE, BLUE, GREEN, OwnerStep.LEAVE),
        (None, None, None, OwnerStep.SERVE),
        (None, BLUE, None, OwnerStep.LEAVE),
        (BLUE, None, None, OwnerStep.LEAVE),
        (BLUE, BLUE, None, OwnerStep.LEAVE),
    ],
)
def test_the_status_and_the_annotation_decide(
    chosen: str | None, owner: str | None, identity: str | None, step: OwnerStep
) -> None:
    assert find_step(Ownership(owner, chosen), identity) is step


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A resource on a fake API server, and the time of its operators."""

    def __init__(self, fake: FakeApiServer, cluster: Cluster) -> None:
        self.fake = fake
        self.cluster = cluster
        self.clock = Clock()
        resource = body()
        resource["metadata"]["resourceVersion"] = "1"
        fake.objects[PATH] = resource
        self.serve(BLUE)

    def operator(self, identity: str | None) -> Owners:
        return Owners(identity, self.clock, lambda: 0.0)

    def serve(self, identity: str, *, lease: str = "1") -> None:
        """Let the Deployment and the Lease of an operator exist."""
        namespace, _, name = identity.partition("/")
        self.fake.objects[DEPLOYMENT.replace("blue", namespace)] = {"metadata": {"name": name}}
        self.fake.objects[LEASE.replace("blue", namespace)] = {"metadata": {"name": name, "resourceVersion": lease}}

    def read(self) -> Json:
        found = self.cluster.deployment("ns", "shop")
        assert found is not None
        return found

    def choose(self, identity: str) -> None:
        self.fake.objects[PATH]["metadata"]["annotations"] = {names.OPERATOR_ANNOTATION: identity}

    def is_served_by(self, owners: Owners) -> bool:
        """Let an operator reconcile once, and return whether it serves the resource."""
        return owners.settle(self.cluster, self.read()).body is not None

    @property
    def owner(self) -> str | None:
        found: str | None = self.read().get("status", {}).get("operator")
        return found

    def events(self, reason: str) -> list[Json]:
        posted = [each for method, path, each in self.fake.said if method == "POST" and path.endswith("/events")]
        return [each for each in posted if each is not None and each["reason"] == reason]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with fake_api_server() as (fake, cluster):
        yield Rig(fake, cluster)


def test_the_first_operator_takes_a_resource_and_serves_it_after_a_restart(rig: Rig) -> None:
    assert rig.is_served_by(rig.operator(BLUE))
    assert rig.owner == BLUE
    rig.fake.said.clear()
    assert rig.is_served_by(rig.operator(BLUE))
    assert [method for method, _, _ in rig.fake.said if method != "GET"] == []


def test_of_two_operators_that_read_the_same_version_one_takes_the_resource(rig: Rig) -> None:
    seen = rig.read()
    settled = [rig.operator(identity).settle(rig.cluster, seen) for identity in (BLUE, GREEN)]
    assert [each.body is not None for each in settled] == [True, False]
    assert settled[1].again_s is not None
    assert rig.owner == BLUE


def test_the_status_that_is_reconciled_has_no_owner_and_a_write_of_it_keeps_the_owner(rig: Rig) -> None:
    settled = rig.operator(BLUE).settle(rig.cluster, rig.read())
    assert settled.body is not None
    assert "operator" not in settled.body["status"]
    rig.cluster.write_status("ns", "shop", {"model": "m"})
    assert rig.read()["status"] == {"model": "m", "operator": BLUE}


def test_a_second_operator_writes_nothing_but_an_event_that_names_the_first_one(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.is_served_by(rig.operator(BLUE))
    rig.fake.said.clear()
    green = rig.operator(GREEN)
    with caplog.at_level(logging.WARNING, "orca.operator"):
        for _ in range(3):
            assert not rig.is_served_by(green)
    assert green.left == 1
    writes = [(method, path) for method, path, _ in rig.fake.said if method != "GET"]
    assert writes == [("POST", "/api/v1/namespaces/ns/events")]
    [event] = rig.events("ServedByAnother")
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", "uid-1")
    told = f"the operator {GREEN} leaves this resource alone, since the operator {BLUE} serves it"
    assert event["message"].startswith(told)
    assert f"annotation orca-serving.io/operator to {GREEN}" in event["message"]
    assert [each.getMessage() for each in caplog.records] == [event["message"]]


def test_the_event_is_recorded_again_before_the_first_one_is_forgotten(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    rig.is_served_by(green)
    rig.clock.now_s = EVENT_EVERY_S
    rig.is_served_by(green)
    assert len(rig.events("ServedByAnother")) == 2


def test_a_resource_that_is_gone_is_not_counted_as_one_of_others(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    rig.is_served_by(green)
    green.keep(frozenset({"uid-1"}))
    assert green.left == 1
    green.keep(frozenset())
    assert green.left == 0


def test_the_annotation_hands_a_resource_over(rig: Rig) -> None:
    blue, green = rig.operator(BLUE), rig.operator(GREEN)
    assert rig.is_served_by(blue)
    rig.choose(GREEN)
    assert not rig.is_served_by(green)
    assert not rig.is_served_by(blue)
    assert rig.owner is None
    assert rig.is_served_by(green)
    assert not rig.is_served_by(blue)
    assert (rig.owner, blue.left, green.left) == (GREEN, 1, 0)
    assert GREEN in rig.events("Released")[0]["message"]


def test_the_chosen_operator_takes_a_resource_that_the_other_one_does_not_release(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    rig.choose(GREEN)
    green = rig.operator(GREEN)
    assert not rig.is_served_by(green)
    rig.clock.now_s = HANDOVER_S - 1
    assert not rig.is_served_by(green)
    rig.clock.now_s = HANDOVER_S
    assert rig.is_served_by(green)
    assert rig.owner == GREEN
    assert BLUE in rig.events("TakenOver")[0]["message"]


def test_a_resource_whose_chosen_operator_serves_it_has_no_event(rig: Rig) -> None:
    rig.choose(BLUE)
    rig.is_served_by(rig.operator(BLUE))
    assert not rig.is_served_by(rig.operator(GREEN))
    assert rig.events("ServedByAnother") == []


def test_a_resource_for_which_somebody_chose_an_operator_that_does_not_come_has_an_event(rig: Rig) -> None:
    rig.choose("blue/mistyped")
    assert not rig.is_served_by(rig.operator(GREEN))
    assert "annotation orca-serving.io/operator names blue/mistyped" in rig.events("ServedByAnother")[0]["message"]


def test_a_resource_is_taken_a_minute_after_its_operator_was_uninstalled(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    assert not rig.is_served_by(green)
    del rig.fake.objects[DEPLOYMENT]
    again_s = green.settle(rig.cluster, rig.read()).again_s
    assert again_s is not None
    assert again_s < HANDOVER_S
    rig.clock.now_s = HANDOVER_S
    assert rig.is_served_by(green)
    assert rig.owner == GREEN


def test_an_operator_that_comes_back_in_time_keeps_its_resources(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    gone = rig.fake.objects.pop(DEPLOYMENT)
    assert not rig.is_served_by(green)
    rig.fake.objects[DEPLOYMENT] = gone
    rig.clock.now_s = HANDOVER_S
    assert not rig.is_served_by(green)
    del rig.fake.objects[DEPLOYMENT]
    assert not rig.is_served_by(green)


def test_an_operator_without_a_deployment_that_renews_its_lease_keeps_its_resources(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    del rig.fake.objects[DEPLOYMENT]
    for minute in range(1, 4):
        rig.fake.objects[LEASE]["metadata"]["resourceVersion"] = str(minute)
        rig.clock.now_s += HANDOVER_S
        assert not rig.is_served_by(green)
    rig.clock.now_s += HANDOVER_S
    assert rig.is_served_by(green)


def test_an_operator_that_cannot_see_the_other_one_leaves_its_resources_alone(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    rig.fake.refuses["GET", "deployments/orca-operator"] = 403, "forbidden"
    for _ in range(3):
        assert not rig.is_served_by(green)
        rig.clock.now_s += HANDOVER_S


def test_the_deployment_alone_decides_if_the_lease_cannot_be_read(rig: Rig) -> None:
    rig.is_served_by(rig.operator(BLUE))
    green = rig.operator(GREEN)
    del rig.fake.objects[DEPLOYMENT]
    rig.fake.refuses["GET", "leases/orca-operator"] = 403, "forbidden"
    assert not rig.is_served_by(green)
    rig.clock.now_s = HANDOVER_S
    assert rig.is_served_by(green)


def test_a_definition_that_is_older_than_the_operator_is_reported_as_such(rig: Rig) -> None:
    message = "failed to create typed patch object: .status.operator: field not declared in schema"
    rig.fake.refuses["PATCH", "shop/status"] = 500, message
    with pytest.raises(BadSpec, match="the CRD in this cluster and the operator are of different releases"):
        rig.is_served_by(rig.operator(BLUE))


def test_an_operator_without_a_lease_serves_what_nobody_serves_and_writes_no_owner(rig: Rig) -> None:
    nameless = rig.operator(None)
    assert rig.is_served_by(nameless)
    assert rig.owner is None
    assert rig.is_served_by(rig.operator(BLUE))
    assert not rig.is_served_by(nameless)
    assert explain(Ownership(BLUE, None), None) == (
        f"an operator without a Lease leaves this resource alone, since the operator {BLUE} serves it"
    )


@pytest.mark.parametrize(
    ("chosen", "owner", "is_reconciled"),
    [(None, BLUE, False), (BLUE, BLUE, False), (GREEN, BLUE, True), (GREEN, None, True)],
)
def test_a_changed_choice_is_reconciled_at_once(chosen: str | None, owner: str | None, is_reconciled: bool) -> None:
    annotations = {} if chosen is None else {names.OPERATOR_ANNOTATION: chosen}
    status = {"observedGeneration": 1, **({} if owner is None else {"operator": owner})}
    assert is_news({"generation": 1, "annotations": annotations}, status) == is_reconciled
