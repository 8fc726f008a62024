"""A spec and the observed state become a plan of actions."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from orca.operator.domain import names
from orca.operator.domain.actions import Annotate, Apply, Delete
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.plan.children import drift
from orca.operator.plan.plan import ReconcilePlan
from support.operator.clusters import BORN_S, POOL_URL, RELEASE, FakeCluster
from support.operator.deployments import deployment


def settled(wanted: OrcaDeployment) -> FakeCluster:
    cluster = FakeCluster(wanted)
    cluster.settle()
    return cluster


def change(cluster: FakeCluster, **spec: object) -> FakeCluster:
    cluster.deployment = deployment(generation=cluster.deployment.generation + 1, **spec)
    return cluster


def applied(decided: ReconcilePlan) -> list[Json]:
    return [action.manifest for action in decided.actions if isinstance(action, Apply)]


def deleted(decided: ReconcilePlan) -> list[str]:
    return [action.name for action in decided.actions if isinstance(action, Delete)]


def test_a_five_line_resource_becomes_a_pool_a_gateway_and_a_group() -> None:
    cluster = settled(deployment())
    [group] = cluster.names("StatefulSet", "stage")
    assert cluster.names("StatefulSet") == [group, f"{group}-scheduler", "shop-pool"]
    assert cluster.names("Deployment") == ["shop-gateway"]
    assert cluster.names("Service") == ["shop", group, f"{group}-scheduler", "shop-pool"]


def test_a_second_reconcile_changes_nothing() -> None:
    assert settled(deployment(replicas=2)).reconcile().actions == ()


def test_replicas_are_added_and_removed_without_changing_the_others() -> None:
    cluster = settled(deployment(replicas=1))
    [first] = cluster.names("StatefulSet", "stage")
    change(cluster, replicas=3).settle()
    assert len(cluster.names("StatefulSet", "stage")) == 3
    change(cluster, replicas=1).settle()
    assert cluster.names("StatefulSet", "stage") == [first]
    change(cluster, replicas=0).settle()
    assert cluster.names("StatefulSet") == ["shop-pool"]
    assert cluster.names("Deployment") == ["shop-gateway"]


def test_a_removed_group_loses_its_scheduler_before_its_stages() -> None:
    cluster = settled(deployment(replicas=1))
    [group] = cluster.names("StatefulSet", "stage")
    first = change(cluster, replicas=0).reconcile()
    assert deleted(first) == [f"{group}-scheduler"]
    cluster.add_pod(f"{group}-scheduler-0", {names.GROUP_LABEL: group, names.ROLE_LABEL: "scheduler"})
    assert not deleted(cluster.reconcile())  # it still drains
    del cluster.objects["Pod", f"{group}-scheduler-0"]
    assert group in deleted(cluster.reconcile())


def test_another_parallelism_is_another_revision_and_is_rolled_out() -> None:
    cluster = settled(deployment())
    [old] = cluster.names("StatefulSet", "stage")
    plans = change(cluster, parallelism={"stages": 2}).settle()
    [new] = cluster.names("StatefulSet", "stage")
    assert new != old
    assert cluster.objects["StatefulSet", new]["spec"]["replicas"] == 2
    assert new in [each["metadata"]["name"] for each in applied(plans[0])]
    assert not deleted(plans[0])


def test_another_division_of_the_layers_is_rolled_out_like_another_number_of_stages() -> None:
    cluster = settled(deployment(parallelism={"stages": 2}))
    for layers in ([14, 10], [10, 14]):
        [old] = cluster.names("StatefulSet", "stage")
        plans = change(cluster, parallelism={"stages": 2, "stageLayers": layers}).settle()
        [new] = cluster.names("StatefulSet", "stage")
        assert new != old
        assert new in [each["metadata"]["name"] for each in applied(plans[0])]
        assert not deleted(plans[0])


def test_a_batch_size_changes_no_pod_and_reaches_all_schedulers_at_once() -> None:
    cluster = settled(deployment(replicas=2))
    decided = change(cluster, replicas=2, scheduler={"maxBatchSize": 4}).reconcile()
    assert [each["kind"] for each in applied(decided)] == ["ConfigMap"]
    nudged = [action for action in decided.actions if isinstance(action, Annotate)]
    assert {action.kind for action in nudged} == {"Pod"}
    assert [action.name for action in nudged] == cluster.names("Pod", "scheduler")
    assert cluster.reconcile().actions == ()


def test_a_policy_changes_schedulers_only_and_one_at_a_time() -> None:
    cluster = settled(deployment(replicas=2))
    before = cluster.names("StatefulSet", "stage")
    first = change(cluster, replicas=2, scheduler={"prefetch": 0}).reconcile()
    [changed] = applied(first)
    # Its pod is replaced: until it serves again the other one stays as it is.
    pod = f"{changed['metadata']['name']}-0"
    cluster.add_pod(pod, changed["spec"]["template"]["metadata"]["labels"], is_ready=False)
    assert not applied(cluster.reconcile())
    cluster.start()
    assert len(applied(cluster.reconcile())) == 1
    assert cluster.names("StatefulSet", "stage") == before


def test_a_group_that_cannot_serve_does_not_delay_an_edit_of_schedulers() -> None:
    cluster = settled(deployment(replicas=3))
    dead = cluster.names("StatefulSet", "stage")[0]
    cluster.make_unready(f"{dead}-0")
    cluster.make_unready(f"{dead}-scheduler-0")
    changed = applied(change(cluster, replicas=3, scheduler={"prefetch": 0}).reconcile())
    assert len(changed) == 2  # its own, and one of those that serve
    cluster.make_unready(f"{changed[1]['metadata']['name']}-0")
    assert not applied(cluster.reconcile())  # the last one goes on until the second serves again
    changed_pod = f"{changed[1]['metadata']['name']}-0"
    cluster.add_pod(changed_pod, cluster.objects["Pod", changed_pod]["metadata"]["labels"])
    assert len(applied(cluster.reconcile())) == 1


def test_an_edit_after_which_no_group_forms_stops_at_the_first() -> None:
    cluster = settled(deployment(replicas=3))
    [changed] = applied(change(cluster, replicas=3, scheduler={"prefetch": 0}).reconcile())
    cluster.make_unready(f"{changed['metadata']['name']}-0")
    cluster.now_s += 10_000
    assert not applied(cluster.reconcile())


def test_as_many_schedulers_change_at_a_time_as_groups_may_be_missing() -> None:
    rollout = {"maxUnavailable": 2}
    cluster = settled(deployment(replicas=3, rollout=rollout))
    decided = change(cluster, replicas=3, rollout=rollout, scheduler={"prefetch": 0}).reconcile()
    assert len(applied(decided)) == 2


def test_objects_that_the_spec_no_longer_needs_are_deleted() -> None:
    cluster = settled(deployment(gateway={"ingress": {"host": "shop.example"}}))
    assert cluster.names("Ingress") == ["shop"]
    change(cluster).settle()
    assert cluster.names("Ingress") == []


def test_volumes_are_kept_as_long_as_the_resource_exists() -> None:
    cluster = settled(deployment())
    external = {"external": {"urlSecret": {"name": "redis", "key": "url"}}}
    change(cluster, pool=external).settle()
    assert cluster.names("StatefulSet", "pool") == []
    assert cluster.names("PersistentVolumeClaim") == ["shop-pool"]


def test_fields_that_a_user_changed_are_written_again_and_added_fields_stay() -> None:
    cluster = settled(deployment())
    cluster.objects["Deployment", "shop-gateway"]["spec"]["replicas"] = 7
    cluster.objects["Service", "shop"]["spec"]["sessionAffinity"] = "ClientIP"
    [action] = cluster.reconcile().actions
    assert isinstance(action, Apply)
    assert action.reason == "somebody has changed spec.replicas"


@pytest.mark.parametrize("part", ["stage", "scheduler"])
@pytest.mark.parametrize(
    "edit",
    [
        {names.REVISION_LABEL: None},
        {names.MODEL_LABEL: None},
        {names.GENERATION_LABEL: "not"},
        {names.GROUP_LABEL: None, names.REVISION_LABEL: None, names.ROLE_LABEL: None, names.HASH_LABEL: None},
    ],
    ids=["revision lost", "model lost", "no number", "many lost"],
)
def test_edited_labels_do_not_delete_a_group(part: str, edit: dict[str, str | None]) -> None:
    cluster = settled(deployment(replicas=2))
    name, _ = cluster.names("StatefulSet", part)
    labels = cluster.objects["StatefulSet", name]["metadata"]["labels"]
    for label in edit.keys() & labels.keys():
        before = labels.pop(label)
        if edit[label] is not None:
            labels[label] = f"{edit[label]}-{before}"
    groups = cluster.names("StatefulSet")
    plans = cluster.settle()
    assert not [gone for decided in plans for gone in deleted(decided)]
    assert cluster.names("StatefulSet") == groups


def test_redis_restarts_when_its_users_have_another_password() -> None:
    cluster = settled(deployment())
    cluster.pool_secret = {"data": {"users.acl": "b3RoZXI="}}
    [changed] = applied(cluster.reconcile())
    assert changed["metadata"]["name"] == "shop-pool"
    assert cluster.reconcile().actions == ()


def test_the_parts_wait_for_the_secret_of_an_external_pool_and_are_kept_when_it_is_gone() -> None:
    cluster = FakeCluster(deployment(pool={"external": {"urlSecret": {"name": "redis"}}}))
    cluster.pool_secret = None
    cluster.reconcile()
    assert (cluster.names("StatefulSet"), cluster.names("Deployment")) == ([], [])
    cluster.pool_secret = {"data": {"url": POOL_URL, "password": ""}}
    cluster.settle()
    assert (len(cluster.names("StatefulSet")), cluster.names("Deployment")) == (2, ["shop-gateway"])
    cluster.pool_secret = None
    assert cluster.reconcile().actions == ()


def test_the_pools_volume_is_never_asked_to_shrink_or_to_change_its_class() -> None:
    cluster = settled(deployment())
    there = cluster.objects["PersistentVolumeClaim", "shop-pool"]["spec"]
    there["resources"] = {"requests": {"storage": "100Gi"}}
    there["storageClassName"] = "kept"
    change(cluster, pool={"managed": {"storageGiB": 9, "storageClassName": "other"}}).settle()
    spec = cluster.objects["PersistentVolumeClaim", "shop-pool"]["spec"]
    assert (spec["resources"]["requests"]["storage"], spec["storageClassName"]) == ("100Gi", "kept")


def test_the_owner_of_a_volume_follows_the_deletion_policy() -> None:
    cluster = settled(deployment())
    claim = ("PersistentVolumeClaim", "shop-pool")
    assert "ownerReferences" not in cluster.objects[claim]["metadata"]
    assert cluster.objects["Service", "shop"]["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    change(cluster, deletionPolicy="Delete").settle()
    assert cluster.objects[claim]["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_suspend_removes_groups_and_gateways_and_keeps_the_pool() -> None:
    cluster = settled(deployment(replicas=2))
    change(cluster, replicas=2, suspend=True).settle()
    assert cluster.names("StatefulSet") == ["shop-pool"]
    assert cluster.objects["Deployment", "shop-gateway"]["spec"]["replicas"] == 0


def test_a_new_image_rolls_groups_and_gateways() -> None:
    cluster = settled(deployment())
    [old] = cluster.names("StatefulSet", "stage")
    cluster.settle(replace(RELEASE, worker="worker:2"))
    [new] = cluster.names("StatefulSet", "stage")
    assert new != old


def generation(cluster: FakeCluster, group: str) -> int:
    return int(cluster.objects["StatefulSet", f"{group}-scheduler"]["metadata"]["labels"][names.GENERATION_LABEL])


def test_a_model_that_is_wanted_again_becomes_the_newest_again() -> None:
    cluster = settled(deployment())
    [first] = cluster.names("StatefulSet", "stage")
    before = generation(cluster, first)
    cluster.now_s += 10
    change(cluster, model={"uri": "pvc://models/other"}).reconcile()
    [other] = [name for name in cluster.names("StatefulSet", "stage") if name != first]
    newer = generation(cluster, other)
    assert newer > before
    change(cluster).reconcile()  # the revert comes while both are there
    newest = generation(cluster, first)
    assert newest > newer
    cluster.now_s += 10
    cluster.settle()
    assert generation(cluster, first) == newest


@pytest.mark.parametrize("problem", [None, "no answer"], ids=["at once", "when the pool answers"])
def test_another_model_comes_into_force_even_if_the_clock_went_back_and_no_group_is_left(
    problem: str | None,
) -> None:
    cluster = FakeCluster(deployment())
    in_force = int(cluster.now_s) + 1000
    cluster.pool = PoolStatus(problem=problem, generation=None if problem else in_force)
    cluster.reconcile()
    cluster.pool = PoolStatus(generation=in_force)
    cluster.reconcile()
    [group] = cluster.names("StatefulSet", "stage")
    assert generation(cluster, group) == in_force + 1
    cluster.now_s += 10
    cluster.settle()
    assert generation(cluster, group) == in_force + 1


def test_an_edit_of_other_fields_keeps_the_generation_of_the_model() -> None:
    cluster = settled(deployment())
    before = generation(cluster, cluster.names("StatefulSet", "stage")[0])
    cluster.now_s += 1000
    change(cluster, parallelism={"stages": 2}).settle()
    assert generation(cluster, cluster.names("StatefulSet", "stage")[0]) == before


def test_pods_of_a_lost_node_are_force_deleted_but_never_the_pools() -> None:
    cluster = settled(deployment())
    for kind, name in list(cluster.objects):
        if kind == "Pod":
            cluster.objects[kind, name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    assert not [action for action in cluster.reconcile().actions if action.name.startswith("shop-pool")]
    cluster.lost_nodes = frozenset({"node-1"})
    forced = [action for action in cluster.reconcile().actions if isinstance(action, Delete) and action.is_forced]
    assert sorted(action.name.rpartition("-")[0].partition("shop-")[2][:7] for action in forced)
    assert "shop-pool-0" not in [action.name for action in forced]
    assert len(forced) == 3


def test_without_the_right_to_read_nodes_a_pod_stuck_on_a_lost_node_is_force_deleted() -> None:
    cluster = settled(deployment())
    [stage] = cluster.names("Pod", "stage")
    pod = cluster.objects["Pod", stage]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    cluster.now_s = BORN_S + 121
    assert stage not in deleted(cluster.reconcile())  # nothing says that its node is lost
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    pod["status"]["conditions"].append(taken)
    cluster.now_s = BORN_S + 119
    assert stage not in deleted(cluster.reconcile())
    cluster.now_s = BORN_S + 121
    assert stage in deleted(cluster.reconcile())


def test_drift_names_the_path_and_ignores_fields_that_the_api_server_rewrites() -> None:
    wanted = {"spec": {"cpu": "1000m", "memory": "1Gi", "empty": {}, "list": [{"a": 1}]}}
    there = {"spec": {"cpu": "1", "memory": "1073741824", "list": [{"a": 1, "b": 2}]}, "status": {}}
    assert drift(wanted, there) is None
    assert drift({"cpu": "500000u", "device": "1500000000n"}, {"cpu": "500m", "device": "1500m"}) is None
    assert drift({"cpu": "500001u"}, {"cpu": "500m"}) == "cpu"
    assert drift({"spec": {"list": [{"a": 2}]}}, there) == "spec.list[0].a"
    assert drift({"spec": {"list": []}}, there) == "spec.list"


def gateway_with(change: Callable[[Json], None]) -> tuple[Json, Json]:
    """The Deployment of gateways as it was written, and as somebody has changed its pod's spec."""
    there = settled(deployment(gateway={"tolerations": [{"key": "a"}]})).objects["Deployment", "shop-gateway"]
    changed = copy.deepcopy(there)
    change(changed["spec"]["template"]["spec"])
    return there, changed


def add(field: str, item: Json, *, first: bool = False) -> Callable[[Json], None]:
    """Args: field: of the pod, or of its container if it has none of that name."""

    def change(pod: Json) -> None:
        items = (pod if field in pod or field == "initContainers" else pod["containers"][0]).setdefault(field, [])
        items.insert(0 if first else len(items), item)

    return change


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("tolerations", {"key": "kubernetes.io/arch", "operator": "Equal", "value": "amd64", "effect": "NoSchedule"}),
        ("env", {"name": "ADDED", "value": "1"}),
        ("ports", {"containerPort": 15090, "protocol": "TCP"}),
        ("volumes", {"name": "ca", "configMap": {"name": "ca"}}),
        ("volumeMounts", {"name": "temporary", "mountPath": "/added"}),
        ("containers", {"name": "proxy", "image": "i"}),
        ("initContainers", {"name": "init", "image": "i"}),
        ("topologySpreadConstraints", {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}),
    ],
)
def test_what_others_add_to_a_list_is_no_drift(field: str, item: Json, first: bool) -> None:
    assert drift(*gateway_with(add(field, item, first=first))) is None


def test_a_request_that_others_add_is_no_drift_and_one_that_they_change_is() -> None:
    wanted = {"resources": {"requests": {"cpu": "100m"}}}
    assert drift(wanted, {"resources": {"requests": {"cpu": "0.1", "ephemeral-storage": "1Gi"}, "limits": {}}}) is None
    assert drift(wanted, {"resources": {"requests": {"cpu": "250m"}}}) == "resources.requests.cpu"


def take(field: str) -> Callable[[Json], None]:
    def change(pod: Json) -> None:
        (pod if field in pod else pod["containers"][0])[field].pop(0)

    return change


@pytest.mark.parametrize("field", ["tolerations", "env", "ports", "volumes", "volumeMounts", "containers", "args"])
def test_an_item_that_is_taken_away_is_drift(field: str) -> None:
    assert field in str(drift(*gateway_with(take(field))))


def test_an_item_is_compared_with_the_one_of_its_key() -> None:
    def rename(pod: Json) -> None:
        pod["containers"][0]["image"] = "mirror/gateway:1"
        pod["containers"].insert(0, {"name": "proxy", "image": "i"})

    assert drift(*gateway_with(rename)) == "spec.template.spec.containers[gateway].image"


@pytest.mark.parametrize("field", ["env", "initContainers"])
def test_our_items_in_another_order_are_drift_where_the_order_counts(field: str) -> None:
    one, two, other = [{"name": name, "value": "1"} for name in ("ONE", "TWO", "OTHER")]
    wanted = {"spec": {field: [one, two]}}
    for there in ([one, two], [other, one, two], [one, other, two], [one, two, other]):
        assert drift(wanted, {"spec": {field: there}}) is None
    for there in ([two, one], [two, other, one]):
        assert drift(wanted, {"spec": {field: there}}) == f"spec.{field}"
    assert drift(wanted, {"spec": {field: [two, {**one, "value": "2"}]}}) == f"spec.{field}[ONE].value"


def test_the_order_of_volumes_does_not_count() -> None:
    one: Json = {"name": "one", "emptyDir": {}}
    two: Json = {"name": "two", "emptyDir": {}}
    assert drift({"volumes": [one, two]}, {"volumes": [two, one]}) is None


def test_lists_without_keys_are_compared_as_a_whole() -> None:
    peers = {"spec": {"ingress": [{"ports": [{"port": 1, "protocol": "TCP"}]}]}}
    more = {"spec": {"ingress": [{"ports": [{"port": 1, "protocol": "TCP"}, {"port": 2, "protocol": "TCP"}]}]}}
    assert drift(peers, more) == "spec.ingress[0].ports"
    assert drift({"args": ["a"]}, {"args": ["a", "--log-level=debug"]}) == "args"
    assert drift({"args": ["a", "b"]}, {"args": ["b", "a"]}) == "args[0]"


def test_the_ports_of_a_service_are_told_apart_by_number_and_protocol() -> None:
    wanted = {"spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}}
    other = {"name": "quic", "port": 80, "protocol": "UDP"}
    assert drift(wanted, {"spec": {"ports": [other, {"name": "http", "port": 80, "protocol": "TCP"}]}}) is None
    assert drift(wanted, {"spec": {"ports": [other]}}) == "spec.ports[80]"


def test_network_policies_are_created_and_deleted_with_the_operators_setting() -> None:
    cluster = settled(deployment())
    assert cluster.names("NetworkPolicy") == []
    cluster.settle(replace(RELEASE, has_network_policies=True))
    assert cluster.names("NetworkPolicy") == ["shop-gateway", "shop-pool", "shop-scheduler", "shop-stage"]
    cluster.settle()
    assert cluster.names("NetworkPolicy") == []


def test_policies_admit_older_groups_in_the_host_network_until_they_are_gone() -> None:
    cluster = FakeCluster(deployment(worker={"hostNetwork": True}))
    with_policies = replace(RELEASE, has_network_policies=True)
    cluster.settle(with_policies)
    before = cluster.objects["NetworkPolicy", "shop-scheduler"]["spec"]
    change(cluster, worker={"hostNetwork": False}).reconcile(with_policies)
    assert cluster.objects["NetworkPolicy", "shop-scheduler"]["spec"] == before
    cluster.settle(with_policies)
    assert cluster.objects["NetworkPolicy", "shop-scheduler"]["spec"] != before
