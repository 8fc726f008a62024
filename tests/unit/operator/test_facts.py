"""The operator writes its labels and annotations again after a user has removed or edited them."""

import json
from typing import Any

import pytest

from orca.operator.domain import facts, names
from orca.operator.domain.actions import Apply, Delete
from orca.operator.domain.model_references import ModelReference, read_model
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json
from orca.operator.plan.plan import ReconcilePlan
from orca.operator.plan.status import make_status
from support.operator.changing_shop import ChangingShop
from support.operator.clusters import BORN_S, FakeCluster
from support.operator.deployments import deployment
from support.operator.slots_shop import SlotsShop

MODEL = ModelReference(claim="c", folder="a/b", dtype="float32", name="n, m", max_model_len=5)
GARBAGE = [
    "",
    "x",
    "-1",
    "1e3",
    "[]",
    "{}",
    "null",
    '[{"folder": 1}]',
    '[{"folder": "f", "dtype": "?"}]',
    "9" * 5000,
    "[" * 100_000,
]


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def metadata_of(cluster: FakeCluster, kind: str, role: str, *, is_template: bool) -> Json:
    [name] = cluster.names(kind, role)
    child = cluster.objects[kind, name]
    found: Json = child["spec"]["template"]["metadata"] if is_template else child["metadata"]
    return found


def edit(marks: Json, key: str, value: str | None) -> None:
    marks.pop(key, None)
    if value is not None:
        marks[key] = value


def written(decided: ReconcilePlan) -> list[str]:
    assert all(isinstance(action, Apply) for action in decided.actions), decided.actions
    return [action.manifest["metadata"]["name"] for action in decided.actions if isinstance(action, Apply)]


def test_a_stateful_set_with_a_foreign_group_name_is_no_group_and_is_deleted() -> None:
    """The set looks like a user's copy of one of the operator's, without an owner."""
    cluster = settled()
    [stages] = cluster.names("StatefulSet", "stage")
    copy = json.loads(json.dumps(cluster.objects["StatefulSet", stages]).replace(stages, "copy"))
    cluster.objects["StatefulSet", "copy"] = copy
    decided = cluster.reconcile()
    assert [(each.kind, each.name) for each in decided.actions if isinstance(each, Delete)] == [("StatefulSet", "copy")]
    assert len(decided.groups) == 1


@pytest.mark.parametrize("value", [None, *GARBAGE], ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(
    ("kind", "role", "annotation"),
    [
        ("StatefulSet", "stage", names.STAGES_ANNOTATION),
        ("StatefulSet", "stage", names.MODELS_ANNOTATION),
        ("StatefulSet", "scheduler", names.SLOTS_ANNOTATION),
        ("Deployment", "gateway", names.MODELS_ANNOTATION),
    ],
)
def test_only_an_annotation_that_was_removed_or_edited_is_written_again(
    kind: str, role: str, annotation: str, value: str | None
) -> None:
    cluster = settled(scheduler={"kvSlots": 1024})
    edit(metadata_of(cluster, kind, role, is_template=kind == "Deployment")["annotations"], annotation, value)
    decided = cluster.reconcile()
    assert written(decided) == cluster.names(kind, role)
    assert make_status(cluster.observed, decided, {})["groups"]["ready"] == 1
    assert cluster.reconcile().actions == ()


@pytest.mark.parametrize("value", [None, "x", "-1", "0000"])
@pytest.mark.parametrize(
    ("role", "label"),
    [
        ("stage", names.REVISION_LABEL),
        ("scheduler", names.REVISION_LABEL),
        ("scheduler", names.MODEL_LABEL),
        ("scheduler", names.GENERATION_LABEL),
    ],
)
def test_a_label_that_was_removed_or_edited_is_written_again_and_no_group_is_deleted(
    role: str, label: str, value: str | None
) -> None:
    cluster = settled(model={"uri": "pvc://models/a"})
    cluster.pool = PoolStatus(generation=int(BORN_S) + 1)
    for is_template in (False, True):
        edit(metadata_of(cluster, "StatefulSet", role, is_template=is_template)["labels"], label, value)
    before = cluster.names("StatefulSet")
    assert written(cluster.reconcile()) == cluster.names("StatefulSet", role)
    cluster.settle()
    assert cluster.names("StatefulSet") == before
    for is_template in (False, True):
        assert metadata_of(cluster, "StatefulSet", role, is_template=is_template)["labels"].get(label) not in (
            None,
            "x",
        )


def test_a_group_with_unknown_slots_is_repaired_even_if_waiting_requests_may_need_it() -> None:
    shop = SlotsShop(scheduler={"kvSlots": 1024})
    shop.needs = [3000]
    [scheduler] = shop.schedulers()
    del scheduler["metadata"]["annotations"][names.SLOTS_ANNOTATION]
    assert written(shop.reconcile()) == [scheduler["metadata"]["name"]]
    assert [facts.slots(each) for each in shop.schedulers()] == [1024]


def test_old_groups_with_known_slots_are_kept_before_those_with_unknown_slots() -> None:
    cluster = settled(model={"uri": "pvc://models/a"}, replicas=2, scheduler={"kvSlots": 1024})
    known, unknown = cluster.names("StatefulSet", "scheduler")
    del cluster.objects["StatefulSet", unknown]["metadata"]["annotations"][names.SLOTS_ANNOTATION]
    cluster.pool = PoolStatus(generation=int(BORN_S) + 1)
    cluster.deployment = deployment(model={"uri": "pvc://models/b"}, replicas=2, generation=2)
    assert cluster.reconcile().change.kept == {known.removesuffix("-scheduler")}


def test_gateways_keep_an_old_model_while_a_group_may_still_serve_it() -> None:
    cluster = settled(model={"uri": "pvc://models/a"})
    [old] = cluster.names("StatefulSet", "stage")
    cluster.pool = PoolStatus(generation=int(BORN_S) + 1)
    cluster.deployment = deployment(model={"uri": "pvc://models/b"}, generation=2)
    cluster.reconcile()
    cluster.pool = PoolStatus(generation=int(BORN_S) + 2)
    del cluster.objects["StatefulSet", old]["metadata"]["annotations"][names.MODELS_ANNOTATION]
    assert [each.folder for each in cluster.reconcile().change.older] == ["a"]


def test_gateway_pods_without_the_annotation_do_not_delay_a_model_change() -> None:
    shop = ChangingShop(model={"uri": "pvc://models/a"})
    shop.call()
    shop.change(model={"uri": "pvc://models/b"})
    shop.reconcile()
    shop.gateways()
    shop.cluster.objects["Pod", "shop-gateway-0"]["metadata"]["annotations"].clear()
    assert not shop.reconcile().change.waits_for_gateways


@pytest.mark.parametrize("seed", range(6))
def test_a_model_change_completes_whatever_a_user_removes_or_edits_meanwhile(seed: int) -> None:
    shop = ChangingShop(seed, model={"uri": "pvc://models/a"})
    for model in ("b", "c", "a"):
        shop.change(model={"uri": f"pvc://models/{model}"})
        for _ in range(shop.chance.randrange(20)):
            shop.move()
            spoil(shop)
            shop.reconcile()
    shop.settle()
    assert [each.folder for each in shop.known()[0]] == ["a"]


def spoil(shop: ChangingShop) -> None:
    """One mark of our own, but for those by which selectors find pods, and the shop what its pods run."""
    kept = (names.ROLE_LABEL, names.GROUP_LABEL, names.DEPLOYMENT_LABEL, names.MODEL_LABEL, names.GENERATION_LABEL)
    children = [each for key, each in sorted(shop.cluster.objects.items()) if key[0] in ("StatefulSet", "Deployment")]
    child = shop.chance.choice(children)
    metadata = shop.chance.choice([child["metadata"], child["spec"]["template"]["metadata"]])
    marks = metadata.get(shop.chance.choice(["labels", "annotations", "annotations"])) or {}
    ours = [key for key in sorted(marks) if key.startswith("orca-serving.io/") and key not in kept]
    if ours:
        edit(marks, shop.chance.choice(ours), shop.chance.choice([None, *GARBAGE]))


def test_facts_are_read_as_they_were_written() -> None:
    annotations = facts.stages_annotations(3, MODEL)
    assert facts.stage_count({"metadata": {"annotations": annotations}}) == 3
    assert facts.models({"annotations": annotations}) == [MODEL]
    for slots in (None, 4096):
        assert facts.slots({"metadata": {"annotations": facts.slots_annotations(slots)}}) == slots


@pytest.mark.parametrize(
    "value", [*map(str, range(2)), "true", '"c"', '[{"folder": "f", "dtype": "float32", "more": 1}]']
)
def test_annotations_of_models_that_the_operator_did_not_write_count_as_unknown(value: str) -> None:
    assert facts.models({"annotations": {names.MODELS_ANNOTATION: value}}) == []


@pytest.mark.parametrize("name", ["claim", "folder", "dtype", "quantization", "name", "max_model_len"])
def test_a_model_with_a_field_of_another_type_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a model"):
        read_model({**MODEL.as_json(), name: True})
    assert read_model(json.loads(json.dumps(MODEL.as_json()))) == MODEL
