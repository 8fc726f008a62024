"""The user's patch of a pod: what it adds, what it takes away, and what it may not touch."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orca.operator.domain.pod_patches.pod_patch import merged, pointer_to, segments, without
from orca.operator.domain.resource import BadSpec, Json
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment

ON_HUB = {"uri": "hf://org/model"}
ROLES = (("worker", "stage"), ("scheduler", "scheduler"), ("gateway", "gateway"), ("pool", "redis"), ("fetch", "fetch"))
"""Fields of the spec, and the operator's container in their pods."""


def pod(role: str, patch: Json | None = None, remove: list[str] | None = None, **fields: Any) -> Json:
    """Return the pod template of a role. Args: fields: of the role, beside the patch."""
    patched = fields | ({} if patch is None else {"podPatch": patch}) | ({"podPatchRemove": remove} if remove else {})
    cluster = FakeCluster(deployment(model=ON_HUB, **{role: patched}))
    cluster.settle()
    label = {"worker": "stage"}.get(role, role)
    [found] = [
        each["spec"]["template"]
        for (kind, _), each in cluster.objects.items()
        if kind in ("StatefulSet", "Deployment", "Job") and each["metadata"]["labels"]["orca-serving.io/role"] == label
    ]
    return dict(found)


def main(role: str, **container: Any) -> Json:
    """Return a patch of the operator's container."""
    return {"spec": {"containers": [{"name": dict(ROLES)[role], **container}]}}


def mounts(template: Json) -> Json:
    """Return the mounts of the first container, by their paths."""
    return {each["mountPath"]: each for each in template["spec"]["containers"][0]["volumeMounts"]}


def test_a_patch_is_applied_last_and_finds_containers_and_variables_by_name() -> None:
    patch = main("gateway", env=[{"name": "A", "value": "1"}, {"name": "ORCA_GATEWAY_POOL", "value": "mine"}])
    gateway = pod("gateway", {"spec": {**patch["spec"], "priorityClassName": "x"}})["spec"]
    assert gateway["priorityClassName"] == "x"
    variables = {each["name"]: each["value"] for each in gateway["containers"][0]["env"]}
    assert (variables["A"], variables["ORCA_GATEWAY_POOL"]) == ("1", "mine")
    assert gateway["containers"][0]["image"] == "gateway:1"


def test_two_mounts_of_one_volume_are_both_there_and_the_operators_stay() -> None:
    extra = [
        {"name": "certificates", "mountPath": "/etc/ssl/ca.pem", "subPath": "ca.pem"},
        {"name": "certificates", "mountPath": "/etc/pip.conf", "subPath": "pip.conf"},
    ]
    before = mounts(pod("worker"))
    assert mounts(pod("worker", main("worker", volumeMounts=extra))) == before | {
        each["mountPath"]: each for each in extra
    }


def test_a_mount_of_an_operators_volume_elsewhere_does_not_move_the_operators() -> None:
    found = mounts(pod("gateway", main("gateway", volumeMounts=[{"name": "temporary", "mountPath": "/var/cache"}])))
    assert (found["/tmp"]["name"], found["/var/cache"]["name"]) == ("temporary", "temporary")


def test_a_mount_at_a_path_of_the_operators_replaces_it() -> None:
    found = mounts(pod("gateway", main("gateway", volumeMounts=[{"name": "scratch", "mountPath": "/tmp"}])))
    assert found["/tmp"]["name"] == "scratch"


@pytest.mark.parametrize(
    ("field", "base", "patch", "result"),
    [
        ("env", [{"name": "A", "value": "1"}], [{"name": "A", "value": "2"}], [{"name": "A", "value": "2"}]),
        ("volumeDevices", [{"name": "d", "devicePath": "/a"}], [{"name": "d", "devicePath": "/b"}], None),
        ("ports", [{"name": "a", "containerPort": 1}], [{"name": "b", "containerPort": 2}], None),
        ("ports", [{"containerPort": 1, "protocol": "TCP"}], [{"containerPort": 1, "protocol": "UDP"}], None),
        (
            "ports",
            [{"containerPort": 1, "protocol": "TCP"}],
            [{"containerPort": 1, "hostPort": 9}],
            [{"containerPort": 1, "protocol": "TCP", "hostPort": 9}],
        ),
        ("imagePullSecrets", [{"name": "a"}], [{"name": "b"}], None),
        ("hostAliases", [{"ip": "10.0.0.1"}], [{"ip": "10.0.0.2"}], None),
        (
            "topologySpreadConstraints",
            [{"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway"}],
            [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            None,
        ),
        ("tolerations", [{"key": "a", "operator": "Exists"}], [{"key": "a", "operator": "Equal", "value": "b"}], None),
        (
            "tolerations",
            [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}],
            [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
            [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
        ),
        ("tolerations", [{"key": "a", "operator": "Exists"}], [], [{"key": "a", "operator": "Exists"}]),
        # Lists without keys are replaced, though their items have names.
        ("sysctls", [{"name": "a", "value": "1"}], [{"name": "b", "value": "2"}], [{"name": "b", "value": "2"}]),
        ("args", ["a", "b"], ["c"], ["c"]),
    ],
)
def test_a_list_is_merged_as_the_api_server_merges_it(
    field: str, base: list[Any], patch: list[Any], result: list[Any] | None
) -> None:
    """Args: result: None if the items of both are there."""
    assert merged({field: base}, {field: patch}) == {field: [*base, *patch] if result is None else result}


def test_a_patch_merges_maps_and_replaces_other_values_and_null_removes() -> None:
    base = {"a": 1, "b": 2, "map": {"x": 1, "y": 2}}
    assert merged(base, {"a": None, "b": 3, "map": {"y": None, "z": 3}}) == {"b": 3, "map": {"x": 1, "z": 3}}


@pytest.mark.parametrize("role", ["worker", "scheduler", "gateway", "fetch"])
def test_tolerations_come_beside_those_for_lost_nodes(role: str) -> None:
    mine = {"key": "dedicated", "operator": "Exists"}
    before = pod(role)["spec"]["tolerations"]
    assert [each["tolerationSeconds"] for each in before] == [10, 10]
    assert pod(role, {"spec": {"tolerations": [mine]}})["spec"]["tolerations"] == [*before, mine]


@pytest.mark.parametrize("role", [role for role, _ in ROLES])
def test_users_and_groups_can_be_left_to_the_cluster(role: str) -> None:
    fields = ("runAsUser", "runAsGroup", "fsGroup")
    found = pod(role, remove=[f"/spec/securityContext/{field}" for field in fields])["spec"]["securityContext"]
    assert not set(fields) & found.keys()
    assert found["runAsNonRoot"] is True


def test_a_device_can_be_another_than_a_whole_gpu() -> None:
    limits = "/spec/containers/stage/resources/limits"
    slices = {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}
    found = pod("worker", main("worker", **slices), [f"{limits}/nvidia.com~1gpu"], device="cuda")
    assert found["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": 1}


def test_a_fetch_gets_proxies_certificates_annotations_and_a_place_like_any_pod() -> None:
    spec = {
        "nodeSelector": {"zone": "a"},
        "priorityClassName": "high",
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "containers": [
            {
                "name": "fetch",
                "env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
                "volumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs"}],
                "securityContext": {"runAsUser": 1000},
            }
        ],
    }
    metadata = {"annotations": {"sidecar.istio.io/inject": "false"}}
    resources = {"limits": {"cpu": "2", "memory": "2Gi"}}
    found = pod("fetch", {"metadata": metadata, "spec": spec}, resources=resources)
    [container] = found["spec"]["containers"]
    assert found["metadata"]["annotations"] == metadata["annotations"]
    assert found["spec"]["nodeSelector"] == {"zone": "a"}
    assert found["spec"]["priorityClassName"] == "high"
    assert {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"} in container["env"]
    assert mounts(found).keys() == {"/tmp", "/models", "/etc/ssl/certs"}
    assert container["securityContext"]["runAsUser"] == 1000
    assert container["resources"] == resources


def test_a_fetch_asks_for_little_unless_the_spec_says_otherwise() -> None:
    [container] = pod("fetch")["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}


EXAMPLES = re.findall(r"```yaml\n(.*?)```", (Path(__file__).parents[3] / "docs/how-to/pods.md").read_text(), re.S)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_page_about_pods_have_the_effect_that_it_describes(example: str) -> None:
    spec = yaml.safe_load(example)["spec"]
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    text = json.dumps([each["spec"] for (kind, _), each in cluster.objects.items() if kind != "Pod" and "spec" in each])
    for role in spec.values():
        for removed in role.get("podPatchRemove", []) if isinstance(role, dict) else ():
            assert f'"{segments(removed)[-1]}":' not in text
        for container in role.get("podPatch", {}).get("spec", {}).get("containers", []):
            assert all(json.dumps(variable) in text for variable in container["env"])


def test_what_is_left_out_can_be_given_again_as_a_whole() -> None:
    mine = [{"key": "a", "operator": "Exists"}]
    assert pod("gateway", {"spec": {"tolerations": mine}}, ["/spec/tolerations"])["spec"]["tolerations"] == mine


def test_a_patch_of_null_still_removes() -> None:
    found = pod("gateway", {"spec": {"securityContext": {"runAsUser": None}}})["spec"]["securityContext"]
    assert "runAsUser" not in found


@pytest.mark.parametrize(
    ("base", "pointer", "left"),
    [
        ({"a": {"b": 1, "c": 2}}, "/a/b", {"a": {"c": 2}}),
        ({"a": {"b": 1}}, "/a/b", {"a": {}}),
        ({"a": {"b": 1}}, "/a", {}),
        ({"env": [{"name": "A"}, {"name": "B"}]}, "/env/A", {"env": [{"name": "B"}]}),
        ({"volumeMounts": [{"name": "t", "mountPath": "/tmp"}]}, "/volumeMounts/~1tmp", {"volumeMounts": []}),
        ({"ports": [{"containerPort": 80}, {"containerPort": 81}]}, "/ports/80", {"ports": [{"containerPort": 81}]}),
        (
            {"tolerations": [{"operator": "Exists"}, {"key": "a"}]},
            "/tolerations/a",
            {"tolerations": [{"operator": "Exists"}]},
        ),
        ({"drop": ["ALL", "SYS"]}, "/drop/ALL", {"drop": ["SYS"]}),
        ({"env": [{"name": "A", "value": "1"}]}, "/env/A/value", {"env": [{"name": "A"}]}),
        # What is not there, and what is named by its place.
        ({"a": {"b": 1}}, "/c", {"a": {"b": 1}}),
        ({"a": {"b": 1}}, "/a/b/c", {"a": {"b": 1}}),
        ({"env": [{"name": "A"}]}, "/env/0", {"env": [{"name": "A"}]}),
        ({"rules": [{"name": "A"}]}, "/rules/A", {"rules": [{"name": "A"}]}),
    ],
)
def test_a_pointer_names_a_field_or_an_item_by_its_key(base: Json, pointer: str, left: Json) -> None:
    assert without(base, [pointer]) == left


def test_a_pointer_is_read_as_rfc_6901_writes_it() -> None:
    assert segments("/a~1b/c~0d/~01") == ["a/b", "c~d", "~1"]
    assert pointer_to(segments("/a~1b/c~0d/~01")) == "/a~1b/c~0d/~01"


@pytest.mark.parametrize(("role", "container"), ROLES)
def test_the_arguments_of_every_container_are_the_operators(role: str, container: str) -> None:
    patch = {"spec": {"containers": [{"name": container, "args": ["x"]}]}}
    with pytest.raises(BadSpec, match=f"{role}.podPatch: only the operator sets args of the container {container}"):
        deployment(**{role: {"podPatch": patch}})


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (main("gateway", env=[{"value": "1"}]), r"spec.containers\[gateway\].env: every item needs name"),
        (main("gateway", ports=[{"name": "http"}]), "ports: every item needs containerPort, by which it is merged"),
        (main("gateway", volumeMounts=["/tmp"]), "volumeMounts: '/tmp' is not an object"),
        (main("gateway", volumeMounts=[{"mountPath": "/a"}] * 2), "there are two items with the mountPath '/a'"),
        ({"spec": {"containers": [{"image": "i"}]}}, "spec.containers: every item needs name"),
        ({"spec": {"containers": [{"name": None}]}}, "spec.containers: every item needs name"),
        ({"spec": {"volumes": [{"name": {"a": "b"}}]}}, "spec.volumes: {'a': 'b'} is neither a text nor a number"),
        ({"spec": {"tolerations": [{"key": []}]}}, "spec.tolerations: .* is neither a text nor a number"),
        ({"spec": {"securityContext": {"$patch": "delete"}}}, r"securityContext: the directive \$patch is not known"),
        ({"spec": {"containers": None}}, "null removes /spec/containers, which the operator needs"),
        (main("gateway", image=None), "null removes /spec/containers/gateway/image, which the operator needs"),
        ({"metadata": {"labels": None}}, "null removes /metadata/labels, which the operator needs"),
    ],
)
def test_a_patch_that_cannot_be_merged_is_refused_with_a_reason(patch: Json, reason: str) -> None:
    with pytest.raises(BadSpec, match=f"^gateway.podPatch.*{reason}"):
        deployment(gateway={"podPatch": patch})


@pytest.mark.parametrize(
    ("pointer", "reason"),
    [
        ("/metadata/labels", "the operator needs /metadata/labels"),
        ("/metadata/annotations/orca-serving.io~1models", "the operator needs /metadata/annotations/orca-serving.io~1"),
        ("/spec/containers", "the operator needs /spec/containers"),
        ("/spec/containers/gateway", "the operator needs /spec/containers/gateway"),
        ("/spec/containers/gateway/args", "the operator needs /spec/containers/gateway/args"),
        # In a list of words, the word names the item.
        ("/spec/containers/gateway/args/--port", "the operator needs /spec/containers/gateway/args/--port"),
        ("/spec/containers/gateway/command/x", "the operator needs /spec/containers/gateway/command/x"),
        ("/spec/containers/gateway/ports/8000", "the operator needs /spec/containers/gateway/ports/8000"),
        ("/spec/containers/gateway/env/ORCA_GATEWAY_POOL", "the operator needs /spec/containers/gateway/env/ORCA_"),
        ("/spec/containers/stage/resources", "the operator's container is gateway, not stage"),
        ("/spec/containers/0/resources", "the operator's container is gateway"),
        ("/spec/volumes", "the operator needs /spec/volumes"),
        ("/spec/terminationGracePeriodSeconds", "no terminationGracePeriodSeconds means Kubernetes' default of 30 s"),
    ],
)
def test_what_the_operator_needs_cannot_be_left_out(pointer: str, reason: str) -> None:
    with pytest.raises(BadSpec, match=f"^gateway.podPatchRemove: {reason}"):
        deployment(gateway={"podPatchRemove": [pointer]})


MOUNTS = "/spec/containers/redis/volumeMounts"


@pytest.mark.parametrize(
    "changed",
    [
        {"podPatch": {"spec": {"volumes": [{"name": "data", "emptyDir": {}, "persistentVolumeClaim": None}]}}},
        *(
            {"podPatch": main("pool", volumeMounts=[{"name": "temporary", "mountPath": path}])}
            for path in ("/data", "/data/", "//data", "/tmp/../data", "/data/appendonlydir")
        ),
        {"podPatchRemove": ["/spec/volumes/data"]},
        {"podPatchRemove": [f"{MOUNTS}/~1data"]},
        {"podPatchRemove": [f"{MOUNTS}/~1data/name"]},
    ],
)
def test_no_other_storage_comes_in_the_place_of_the_volume_of_the_pool(changed: Json) -> None:
    """Redis would start empty: the requests that it had accepted would be lost without a word."""
    with pytest.raises(BadSpec, match=r"^pool\.podPatch(Remove)?: only the operator sets the volume data"):
        deployment(pool=changed)


def test_the_pool_may_have_other_volumes() -> None:
    patch = main("pool", volumeMounts=[{"name": "temporary", "mountPath": path} for path in ("/database", "/var/data")])
    before = mounts(pod("pool"))
    assert mounts(pod("pool", patch)).keys() == {*before, "/database", "/var/data"}
    assert mounts(pod("pool", remove=[f"{MOUNTS}/~1tmp"])).keys() == before.keys() - {"/tmp"}


def test_a_toleration_may_be_there_twice_as_in_any_pod() -> None:
    mine = {"key": "dedicated", "operator": "Exists"}
    assert pod("gateway", {"spec": {"tolerations": [mine, mine]}})["spec"]["tolerations"][2:] == [mine]


def test_a_grace_period_that_is_left_out_and_given_again_is_what_it_is() -> None:
    field = "terminationGracePeriodSeconds"
    assert pod("gateway", {"spec": {field: 400}}, [f"/spec/{field}"])["spec"][field] == 400


def test_a_patch_may_bring_containers_with_fields_of_their_own() -> None:
    sidecar = {"name": "proxy", "image": "p:1", "args": ["x"], "restartPolicy": "Always", "env": []}
    found = pod("gateway", {"spec": {"initContainers": [sidecar]}})["spec"]
    assert (found["initContainers"], len(found["containers"])) == ([sidecar], 1)
