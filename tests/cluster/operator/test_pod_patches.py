"""The user's patches of pods, beside a real API server: it merges as the operator does, and keeps what is left out."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from orca.operator.domain.pod_patches.list_keys import MERGE_KEYS, name_of
from orca.operator.domain.pod_patches.pod_patch import merged
from orca.operator.domain.resource import Json
from support.operator.api_server import ApiServer
from support.operator.shop import WITHIN_S, Shop
from support.waiting import wait_until

NAMESPACE = "patches"
BASE: Json = {
    "volumes": [{"name": "t", "emptyDir": {}}],
    "imagePullSecrets": [{"name": "a"}],
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"a": "b"}},
        }
    ],
    "securityContext": {"runAsUser": 1, "sysctls": [{"name": "net.ipv4.ip_local_port_range", "value": "1024 65535"}]},
    "containers": [
        {
            "name": "main",
            "image": "i:1",
            "args": ["a", "b"],
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
            "ports": [{"name": "http", "containerPort": 80, "protocol": "TCP"}],
            "resources": {"limits": {"cpu": "1"}},
            "volumeMounts": [{"name": "t", "mountPath": "/tmp"}],
        }
    ],
}


def main(**fields: Any) -> Json:
    return {"containers": [{"name": "main", **fields}]}


@pytest.fixture(scope="module")
def workloads(server: ApiServer) -> Iterator[client.AppsV1Api]:
    client.CoreV1Api(server.api()).create_namespace({"metadata": {"name": NAMESPACE}})
    apps = client.AppsV1Api(server.api())
    template = {"metadata": {"labels": {"a": "b"}}, "spec": BASE}
    spec = {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}, "template": template}
    apps.create_namespaced_deployment(NAMESPACE, {"metadata": {"name": "one"}, "spec": spec})
    yield apps
    apps.delete_namespaced_deployment("one", NAMESPACE)


def pod_spec(apps: client.AppsV1Api, patch: Json | None = None) -> Json:
    """Return the pod spec of the Deployment, as the API server would make it of a strategic merge patch."""
    body = {"spec": {"template": {"spec": patch or {}}}}
    found = apps.patch_namespaced_deployment("one", NAMESPACE, body, dry_run="All")
    text = client.ApiClient().sanitize_for_serialization(found)
    return dict(json.loads(json.dumps(text))["spec"]["template"]["spec"])


def by_name(value: Any) -> Any:
    """Return a value with the items of lists in the order of their keys: the API server puts new ones first."""
    if isinstance(value, dict):
        fields = {name: by_name(each) for name, each in value.items()}
        return {
            name: sorted(each, key=lambda item: (name_of(item, name), json.dumps(item)))
            if name in MERGE_KEYS and isinstance(each, list)
            else each
            for name, each in fields.items()
        }
    return [by_name(each) for each in value] if isinstance(value, list) else value


def without_defaults(theirs: Any, ours: Any) -> Any:
    """Leave out fields that the API server fills in, such as those of new containers. The items of lists stay."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return {name: without_defaults(each, ours[name]) for name, each in theirs.items() if name in ours}
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return [without_defaults(*both) for both in zip(theirs, ours, strict=True)]
    return theirs


@pytest.mark.parametrize(
    "patch",
    [
        {"priorityClassName": "system-node-critical"},
        {"securityContext": {"fsGroup": 2}},
        {"securityContext": {"runAsUser": None}},
        {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}},
        {"imagePullSecrets": [{"name": "b"}]},
        {"hostAliases": [{"ip": "10.0.0.2", "hostnames": ["b"]}, {"ip": "10.0.0.1", "hostnames": ["c"]}]},
        {
            "topologySpreadConstraints": [
                {"maxSkew": 2, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
            ]
        },
        {"volumes": [{"name": "u", "emptyDir": {}}], **main(volumeMounts=[{"name": "u", "mountPath": "/tmp"}])},
        main(volumeMounts=[{"name": "t", "mountPath": "/a"}, {"name": "t", "mountPath": "/b", "readOnly": True}]),
        main(env=[{"name": "A", "value": "2"}, {"name": "C", "value": "3"}]),
        main(args=["c"], image="i:2"),
        main(resources={"limits": {"memory": "1Gi"}}),
        main(ports=[{"containerPort": 80, "protocol": "TCP", "hostPort": 8080}]),
        {"containers": [{"name": "side", "image": "s:1"}], "initContainers": [{"name": "first", "image": "f:1"}]},
    ],
)
def test_a_patch_is_merged_as_the_api_server_merges_it(workloads: client.AppsV1Api, patch: Json) -> None:
    ours = by_name(merged(pod_spec(workloads), patch))
    assert without_defaults(by_name(pod_spec(workloads, patch)), ours) == ours


@pytest.mark.usefixtures("operator")
def test_a_field_is_left_out_by_a_merge_patch_which_drops_null(shop: Shop) -> None:
    def users() -> list[Any]:
        found = shop.apps.list_namespaced_deployment(shop.namespace).items
        return [each.spec.template.spec.security_context.run_as_user for each in found]

    shop.create(model={"uri": "file:///m"})
    wait_until(lambda: users() == [65532], WITHIN_S, lambda: str(shop.status()))
    shop.edit(gateway={"podPatch": {"spec": {"securityContext": {"runAsUser": None}}}})
    assert shop.spec()["gateway"]["podPatch"] == {"spec": {"securityContext": {}}}
    shop.edit(gateway={"podPatchRemove": ["/spec/securityContext/runAsUser"]})
    wait_until(lambda: users() == [None], WITHIN_S, lambda: str(shop.status()))
    shop.edit(gateway={"podPatchRemove": None})
    wait_until(lambda: users() == [65532], WITHIN_S, lambda: str(shop.status()))
