"""Groups and gateways prefer other nodes than those of other groups and gateways."""

from typing import Any

import pytest

from orca.operator.domain.actions import Apply
from orca.operator.domain.resource import Json
from orca.operator.render import group
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

ZONE = {"topologyKey": "topology.kubernetes.io/zone"}
OFF = {"topologyKey": ""}


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return cluster


def stage_pods(cluster: FakeCluster) -> dict[str, Json]:
    """Pod specs by group."""
    names = cluster.names("StatefulSet", "stage")
    return {name: cluster.objects["StatefulSet", name]["spec"]["template"]["spec"] for name in names}


def terms(pod: Json) -> list[Json]:
    anti_affinity = pod.get("affinity", {}).get("podAntiAffinity", {})
    assert anti_affinity.keys() <= {"preferredDuringSchedulingIgnoredDuringExecution"}
    return [
        each["podAffinityTerm"] for each in anti_affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    ]


def test_a_stage_prefers_nodes_without_stages_of_other_groups_and_ignores_those_of_its_own() -> None:
    for name, pod in stage_pods(settled(replicas=2, parallelism={"stages": 2})).items():
        [term] = terms(pod)
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"] == {
            "matchLabels": {"orca-serving.io/deployment": "shop", "orca-serving.io/role": "stage"},
            "matchExpressions": [{"key": "orca-serving.io/group", "operator": "NotIn", "values": [name]}],
        }


def test_the_label_of_the_nodes_is_a_choice_for_groups_and_gateways_and_may_be_none() -> None:
    def keys(**spec: Any) -> tuple[list[str], list[str]]:
        cluster = settled(**spec)
        [pod] = stage_pods(cluster).values()
        gateway = cluster.objects["Deployment", "shop-gateway"]["spec"]["template"]["spec"]
        constraints = gateway.get("topologySpreadConstraints", ())
        return [each["topologyKey"] for each in terms(pod)], [each["topologyKey"] for each in constraints]

    assert keys() == (["kubernetes.io/hostname"],) * 2
    assert keys(spread=ZONE) == ([ZONE["topologyKey"]],) * 2
    assert keys(spread=OFF) == ([], [])


@pytest.mark.parametrize(("mode", "count"), [("ReadWriteOnce", 0), ("ReadWriteMany", 1)])
def test_groups_stay_together_where_their_volume_must_be_on_one_node(mode: str, count: int) -> None:
    [pod] = stage_pods(settled(model={"uri": "hf://org/model", "cache": {"accessMode": mode}})).values()
    assert len(terms(pod)) == count


def test_a_change_of_the_spread_makes_no_new_groups() -> None:
    images = [group.revision(deployment(spread=spread), "worker:1") for spread in ({}, ZONE, OFF)]
    assert len(set(images)) == 1


def test_groups_that_run_get_the_preference_for_their_next_pods_and_stay() -> None:
    """This is what an upgrade to a release with this preference does."""
    cluster = settled(spread=OFF, replicas=2)
    before = {key: each for key, each in cluster.objects.items() if key[0] == "Pod" and "gateway" not in key[1]}
    cluster.deployment = deployment(generation=2, replicas=2)
    plans = cluster.settle()
    assert all(isinstance(action, Apply) for plan in plans for action in plan.actions)
    assert all(cluster.objects[key] is each for key, each in before.items())
    stateful_sets = [cluster.objects["StatefulSet", name]["spec"] for name in cluster.names("StatefulSet", "stage")]
    assert [each["updateStrategy"] for each in stateful_sets] == [{"type": "OnDelete"}] * 2
    assert all(terms(pod) for pod in stage_pods(cluster).values())


def test_an_affinity_of_the_user_stands_beside_the_preference() -> None:
    patch = {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}}}
    [pod] = stage_pods(settled(worker={"podPatch": patch})).values()
    assert pod["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
