"""A change of the model, in a cluster and a pool of plain data: nothing is lost, and nothing is left unread."""

import copy
from typing import Any

import pytest

from orca.operator.domain import facts, names
from orca.operator.domain.model_references import ModelReference
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import GATEWAY_LEAVE_S, Json
from orca.operator.plan.model_change import MARGIN_S
from orca.operator.plan.plan import ReconcilePlan
from orca.operator.plan.status import make_status
from orca.operator.render.model import older_model_flag, wanted_model
from support.operator.changing_shop import ChangingShop
from support.operator.clusters import BORN, BORN_S, FakeCluster
from support.operator.deployments import deployment

A = {"uri": "pvc://models/a"}
B = {"uri": "pvc://models/b", "dtype": "bfloat16", "quantization": "int8", "servedName": "b, the newer"}
C = {"uri": "file:///opt/orca/models/c", "maxModelLen": 100}
FETCHED = {"uri": "hf://org/model"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "spec",
    [{"replicas": 1}, {"replicas": 2}, {"replicas": 2, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}],
    ids=["one", "two", "two-in-turn"],
)
def test_a_change_from_one_model_to_another_loses_nothing(seed: int, spec: Json) -> None:
    shop = ChangingShop(seed, model=A, **spec)
    shop.change(model=B, **spec)
    shop.settle()
    assert shop.lost == 0
    assert shop.known()[0][0].name == "b, the newer"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(24))
def test_a_change_to_a_third_model_or_back_in_the_middle_loses_nothing(seed: int) -> None:
    shop = ChangingShop(seed, model=A)
    for model in (B, C, A, B, A):
        shop.change(model=model)
        for _ in range(shop.chance.randrange(25)):
            shop.move()
            shop.reconcile()
    shop.settle()
    assert shop.lost == 0
    assert [each.folder for each in shop.known()[0]] == ["a"]


def begun(**spec: Any) -> ChangingShop:
    """Return a deployment that serves A and is edited to B, while a request of A runs."""
    shop = ChangingShop(model=A, **spec)
    shop.requests.clear()
    shop.call()
    shop.change(model=B, **spec)
    return shop


def condition(shop: ChangingShop, decided: ReconcilePlan, kind: str) -> tuple[str, str, str]:
    written = make_status(shop.cluster.observe(at=BORN), decided, {})
    [found] = [each for each in written["conditions"] if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_groups_of_the_new_model_are_created_when_all_gateways_have_it() -> None:
    shop = begun()
    decided = shop.reconcile()
    assert len(shop.digests()) == 1
    assert condition(shop, shop.reconcile(), "Progressing")[:2] == ("True", "GatewaysLearnModel")
    assert decided.change.waits_for_gateways
    shop.gateways()
    shop.reconcile()
    assert len(shop.digests()) == 2


def test_the_same_weights_with_another_dtype_are_another_model() -> None:
    shop = ChangingShop(model=A)
    shop.change(model=A | {"quantization": "int8"})
    assert shop.reconcile().change.waits_for_gateways
    shop.gateways()
    assert [each.quantization for each in shop.known()[0]] == ["int8", None]
    shop.reconcile()
    assert len(shop.digests()) == 2


def test_a_terminating_gateway_without_the_new_model_is_waited_for_while_it_may_get_calls() -> None:
    shop = begun()
    shop.reconcile()
    leaving = copy.deepcopy(shop.cluster.objects["Pod", "shop-gateway-0"])
    shop.gateways()
    marks = {"name": "leaving", "deletionTimestamp": "2026-01-01T00:05:10Z", "deletionGracePeriodSeconds": 310}
    shop.cluster.objects["Pod", "leaving"] = {**leaving, "metadata": leaving["metadata"] | marks}
    shop.cluster.now_s = BORN_S + GATEWAY_LEAVE_S + 0.9
    assert shop.reconcile().change.waits_for_gateways
    shop.cluster.now_s = BORN_S + GATEWAY_LEAVE_S + 1
    assert not shop.reconcile().change.waits_for_gateways


def test_the_old_group_is_kept_for_its_requests_and_the_status_counts_them() -> None:
    shop = begun(drainSeconds=30)
    for happens in (shop.gateways, shop.group, shop.reconcile, shop.reconcile):
        shop.reconcile()
        happens()
    assert len(shop.digests()) == 2
    said = "1 requests of the old model run on, for 30 s at most"
    assert condition(shop, shop.reconcile(), "Progressing") == ("True", "OldModelDrains", said)
    assert condition(shop, shop.reconcile(), "Ready")[:2] == ("True", "OldModelDrains")
    shop.end()
    shop.reconcile()
    assert len(shop.digests()) == 1


def test_the_old_group_that_can_hold_the_largest_request_is_kept() -> None:
    cluster = FakeCluster(deployment(model=A, replicas=2, scheduler={"kvSlots": 4096}))
    cluster.settle()
    smaller, larger = cluster.names("StatefulSet", "scheduler")
    annotations = cluster.objects["StatefulSet", smaller]["metadata"]["annotations"]
    # As while a lower kvSlots waits for a request that only the other can hold.
    annotations[names.SLOTS_ANNOTATION] = "1024"
    cluster.pool = PoolStatus(generation=int(BORN_S) + 1)
    cluster.deployment = deployment(model=B, replicas=2, scheduler={"kvSlots": 1024}, generation=2)
    assert cluster.reconcile().change.kept == {larger.removesuffix("-scheduler")}


def test_gateways_lose_the_old_model_when_its_last_record_is_forgotten() -> None:
    shop = begun()
    for happens in (shop.gateways, shop.group, shop.end, shop.reconcile, shop.linger, shop.reconcile, shop.gateways):
        shop.reconcile()
        happens()
    assert len(shop.digests()) == 1
    assert [each.folder for each in shop.known()[0]] == ["b", "a"]
    shop.retention()
    shop.reconcile()
    shop.gateways()
    assert [each.folder for each in shop.known()[0]] == ["b"]


def test_the_old_group_is_kept_for_a_limited_time_while_the_pool_does_not_answer() -> None:
    shop = begun(drainSeconds=30)
    for happens in (shop.gateways, shop.group):
        shop.reconcile()
        happens()
    shop.pool_problem = "no answer"
    shop.cluster.now_s = BORN_S + 30 + MARGIN_S
    shop.reconcile()
    assert len(shop.digests()) == 2
    shop.cluster.now_s += 1
    shop.reconcile()
    assert len(shop.digests()) == 1


def test_without_room_for_both_models_the_old_one_is_removed_first() -> None:
    shop = begun(rollout={"maxSurge": 0, "maxUnavailable": 1})
    shop.reconcile()
    shop.gateways()
    decided = shop.reconcile()
    assert shop.digests() == []
    assert "the old model goes first" in condition(shop, decided, "Progressing")[2]
    shop.cluster.now_s += 1
    assert "the old model goes first" in condition(shop, shop.reconcile(), "Progressing")[2]


def test_a_new_group_that_finds_no_node_replaces_the_old_one_after_a_while() -> None:
    shop = begun()
    shop.reconcile()
    shop.gateways()
    shop.reconcile()
    [new] = [
        name for name in shop.cluster.names("StatefulSet", "stage") if ("Pod", f"{name}-0") not in shop.cluster.objects
    ]
    shop.cluster.now_s += shop.cluster.deployment.spec.startup_seconds + 1
    assert shop.reconcile().is_squeezed
    assert shop.cluster.names("StatefulSet", "scheduler") == [f"{new}-scheduler"]


def test_a_first_model_waits_for_no_gateway() -> None:
    cluster = FakeCluster(deployment(model=A))
    assert not cluster.reconcile().change.waits_for_gateways
    assert len(cluster.names("StatefulSet", "stage")) == 1


def test_gateways_do_not_get_a_model_that_never_served_so_its_volume_cannot_block_their_start() -> None:
    cluster = FakeCluster(deployment(model={"uri": "pvc://mistyped"}))
    cluster.pool = PoolStatus(generation=None)
    cluster.reconcile()
    cluster.deployment = deployment(model=A, generation=2)
    decided = cluster.reconcile()
    assert (decided.change.older, decided.change.waits_for_gateways) == ((), False)


def test_a_wanted_model_with_which_no_gateway_started_is_dropped_by_the_next_edit() -> None:
    shop = begun()
    shop.reconcile()
    shop.change(model=C)
    assert [each.folder for each in shop.reconcile().change.older] == ["a"]


def test_a_change_back_to_a_model_that_gateways_have_waits_for_nothing() -> None:
    shop = begun()
    for happens in (shop.gateways, shop.reconcile):
        shop.reconcile()
        happens()
    shop.change(model=A)
    decided = shop.reconcile()
    assert not decided.change.waits_for_gateways
    assert [each.folder for each in decided.change.older] == ["b"]


def drains(**spec: Any) -> ChangingShop:
    """B is in force, and A has a request left."""
    shop = begun(**spec)
    for happens in (shop.gateways, shop.group, shop.reconcile):
        shop.reconcile()
        happens()
    assert len(shop.digests()) == 2
    return shop


def test_a_change_back_to_a_draining_model_keeps_the_current_one_until_the_other_is_in_force() -> None:
    shop = drains(drainSeconds=30)
    shop.cluster.now_s += 86_400  # A has been ready since long ago
    shop.call()
    shop.change(model=A, drainSeconds=30)
    shop.reconcile()
    assert len(shop.digests(formed=True)) == 2
    shop.settle()
    assert shop.lost == 0


def test_gateways_started_from_zero_still_get_the_older_models() -> None:
    shop = drains()
    shop.end()
    shop.reconcile()
    shop.reconcile()
    del shop.cluster.objects["Pod", "shop-gateway-0"]
    shop.cluster.objects["Deployment", "shop-gateway"]["status"]["availableReplicas"] = 0
    assert [each.folder for each in shop.reconcile().change.older] == ["a"]


def test_a_model_keeps_its_name_for_clients_while_no_gateway_runs() -> None:
    shop = ChangingShop(model={**A, "servedName": "austen"})
    shop.call()
    del shop.cluster.objects["Pod", "shop-gateway-0"]
    shop.cluster.objects["Deployment", "shop-gateway"]["status"]["availableReplicas"] = 0
    shop.change(model=B)
    assert [each.name for each in shop.reconcile().change.older] == ["austen"]


def test_an_evicted_gateway_is_not_waited_for() -> None:
    shop = begun()
    shop.reconcile()
    evicted = copy.deepcopy(shop.cluster.objects["Pod", "shop-gateway-0"])
    evicted["metadata"]["name"] = "evicted"
    evicted["status"] = {"phase": "Failed", "reason": "Evicted"}
    shop.gateways()
    shop.cluster.objects["Pod", "evicted"] = evicted
    assert not shop.reconcile().change.waits_for_gateways


def test_a_change_back_from_a_model_that_never_formed_restarts_nothing() -> None:
    shop = begun()
    for happens in (shop.gateways, shop.reconcile):
        shop.reconcile()
        happens()
    before = [each["metadata"]["labels"][names.GENERATION_LABEL] for each in shop.schedulers()]
    assert len(before) == 2
    shop.change(model=A)
    shop.late_share = 0.0
    shop.settle()
    assert [each["metadata"]["labels"][names.GENERATION_LABEL] for each in shop.schedulers()] == [min(before)]


def given_up() -> tuple[ChangingShop, str]:
    """B is given up before it came into force. Returns: also the name of its scheduler, which was told to end."""
    shop = begun()
    for happens in (shop.gateways, shop.reconcile):
        shop.reconcile()
        happens()
    shop.change(model=A)
    shop.reconcile()
    [scheduler] = shop.ending
    return shop, scheduler


def test_an_abandoned_model_is_removed_after_its_scheduler_ended_if_the_pool_does_not_know_it() -> None:
    shop, scheduler = given_up()
    shop.late_share = 0.0
    for _ in range(3):
        assert not shop.reconcile().actions, "its scheduler still runs"
    shop.linger()
    shop.reconcile()
    assert ("StatefulSet", scheduler) not in shop.cluster.objects


def test_an_abandoned_model_that_comes_into_force_serves_its_accepted_requests() -> None:
    shop, scheduler = given_up()
    shop.late_share = 1.0
    shop.linger()
    shop.call()
    shop.reconcile()
    assert shop.cluster.objects["StatefulSet", scheduler]["spec"]["replicas"] == 1
    shop.settle()
    assert shop.lost == 0
    assert [each.folder for each in shop.known()[0]] == ["a"]


def test_the_volume_of_a_fetched_model_stays_while_a_gateway_reads_it() -> None:
    spec = {"deletionPolicy": "Delete"}
    shop = ChangingShop(model=FETCHED, **spec)
    shop.call()
    shop.change(model=B, **spec)
    for happens in (shop.gateways, shop.group, shop.end, shop.reconcile, shop.reconcile):
        shop.reconcile()
        happens()
    assert len(shop.digests()) == 1
    assert len(shop.cluster.names("PersistentVolumeClaim")) == 2
    shop.requests.clear()
    shop.settle()
    shop.reconcile()
    assert shop.cluster.names("PersistentVolumeClaim") == ["shop-pool"]


@pytest.mark.parametrize("model", [A, B, C, FETCHED, {"uri": "pvc://whole"}])
def test_a_gateways_flags_are_read_back_as_its_own_model_and_other_models(model: Json) -> None:
    cluster = FakeCluster(deployment(model=model))
    cluster.reconcile()
    cluster.settle()
    own = wanted_model(cluster.deployment)
    [found] = given(cluster)
    assert found == own
    cluster.pool = PoolStatus(generation=int(BORN_S))
    cluster.deployment = deployment(model={"uri": "pvc://new/c,d"}, generation=2)
    cluster.reconcile()
    assert given(cluster) == [wanted_model(cluster.deployment), own]


def given(cluster: FakeCluster) -> list[ModelReference]:
    return facts.models(cluster.objects["Deployment", "shop-gateway"]["spec"]["template"]["metadata"])


def test_a_model_without_a_claim_needs_no_volume() -> None:
    model = ModelReference(claim=None, folder="/opt/c", dtype="float32")
    assert older_model_flag(model) == "/opt/c?dtype=float32"
