"""The operator's rights: named verbs on named kinds, and in single namespaces nothing beyond them."""

from typing import Any

import pytest

from orca.operator.cluster.api_server import KINDS
from orca.operator.cluster.watching import CHILDREN
from support.chart.rendering import Manifest, kinds, needs_helm, render

pytestmark = needs_helm

TWO = {"namespaces": ["a", "b"]}
LEASE_ROLE = "orca-operator-lease"


def grants(role: Manifest) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of each right."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def of_kind(kind: str, values: dict[str, Any]) -> list[Manifest]:
    """But for those of the Lease."""
    return [each for each in render(values) if each["kind"] == kind and each["metadata"]["name"] != LEASE_ROLE]


def cluster_role(name: str, values: dict[str, Any] | None = None) -> Manifest:
    [found] = [each for each in render(values) if each["kind"] == "ClusterRole" and each["metadata"]["name"] == name]
    return found


def of_lease(kind: str) -> Manifest:
    [found] = [each for each in render({}) if each["kind"] == kind and each["metadata"]["name"] == LEASE_ROLE]
    return found


def test_no_right_is_a_wildcard() -> None:
    for role in (*of_kind("ClusterRole", {}), of_lease("Role"), *of_kind("Role", TWO)):
        assert not [grant for grant in grants(role) if "*" in grant]


def test_no_right_is_given_twice() -> None:
    rules = cluster_role("orca-operator")["rules"]
    count = sum(len(rule["resources"]) * len(rule["verbs"]) for rule in rules)
    assert count == len(grants(cluster_role("orca-operator")))


def test_what_the_operator_lists_and_watches_is_granted() -> None:
    listed = {(kind.api.removeprefix("apis/").removeprefix("api/v1"), kind.plural) for kind in KINDS.values()}
    wanted = {(api.rpartition("/")[0], plural, "list") for api, plural in listed}
    wanted |= {(api, plural, verb) for api, _, plural in CHILDREN for verb in ("list", "watch")}
    assert wanted <= grants(cluster_role("orca-operator"))


def test_the_resource_is_read_and_only_its_status_written() -> None:
    ours = {
        (resource, verb)
        for group, resource, verb in grants(cluster_role("orca-operator"))
        if group == "orca-serving.io"
    }
    reads = {("orcadeployments", verb) for verb in ("get", "list", "watch")}
    assert ours == reads | {("orcadeployments/status", "patch")}


@pytest.mark.parametrize("forbidden", ["pods/exec", "roles", "rolebindings", "clusterroles", "pods/log"])
def test_the_operator_may_neither_grant_rights_nor_exec_into_pods(forbidden: str) -> None:
    assert forbidden not in {resource for _, resource, _ in grants(cluster_role("orca-operator"))}


def test_the_operator_may_patch_and_not_update() -> None:
    assert {verb for _, _, verb in grants(cluster_role("orca-operator"))} == {
        "get",
        "list",
        "watch",
        "create",
        "patch",
        "delete",
    }


def test_named_namespaces_get_a_role_each_and_the_cluster_none() -> None:
    assert not {"ClusterRole", "ClusterRoleBinding"} & set(kinds(TWO))
    for kind in ("Role", "RoleBinding"):
        assert [each["metadata"]["namespace"] for each in of_kind(kind, TWO)] == ["a", "b"]


def test_only_the_lease_of_the_release_can_be_read_or_written() -> None:
    role = of_lease("Role")
    assert role["metadata"]["namespace"] == "system"
    make, keep = role["rules"]
    assert (make["verbs"], "resourceNames" in make) == (["create"], False)
    assert (keep["verbs"], keep["resourceNames"]) == (["get", "update"], ["orca-operator"])
    assert {(group, resource) for group, resource, _ in grants(role)} == {("coordination.k8s.io", "leases")}
    binding = of_lease("RoleBinding")
    assert binding["roleRef"]["name"] == LEASE_ROLE
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "orca-operator", "namespace": "system"}]


def test_bindings_name_their_role_and_the_account_of_the_release() -> None:
    [role, _] = of_kind("Role", TWO)
    for binding in of_kind("RoleBinding", TWO):
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "orca-operator", "namespace": "system"}]


def test_a_namespaced_role_lacks_only_the_cluster_scoped_rights() -> None:
    [role, _] = of_kind("Role", TWO)
    more = grants(cluster_role("orca-operator")) - grants(role)
    assert {resource for _, resource, _ in more} == {"nodes", "customresourcedefinitions", "leases"}
    assert {verb for _, _, verb in more} == {"get", "list", "watch"}
    assert grants(role) < grants(cluster_role("orca-operator"))


def test_no_rights_are_created_if_the_user_provides_them() -> None:
    found = kinds(TWO | {"rbac": {"create": False}})
    assert not {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & set(found)


AGGREGATE = "rbac.authorization.k8s.io/aggregate-to-"


@pytest.mark.parametrize(
    ("name", "roles", "verbs"),
    [
        ("view", {"view"}, {"get", "list", "watch"}),
        (
            "edit",
            {"edit", "admin"},
            {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"},
        ),
    ],
)
def test_people_get_rights_on_resources_by_their_role_in_a_namespace(
    name: str, roles: set[str], verbs: set[str]
) -> None:
    role = cluster_role(f"orca-operator-{name}")
    marks = {key for key, value in role["metadata"]["labels"].items() if key.startswith(AGGREGATE) and value == "true"}
    assert marks == {f"{AGGREGATE}{each}" for each in roles}
    given = {
        verb for group, resource, verb in grants(role) if (group, resource) == ("orca-serving.io", "orcadeployments")
    }
    assert given == verbs
    more = {(resource, verb) for _, resource, verb in grants(role) if resource != "orcadeployments"}
    assert ("orcadeployments/status", "get") in more
    # Only the operator writes the status.
    assert {verb for resource, verb in more if resource == "orcadeployments/status"} == {"get"}


@pytest.mark.parametrize("values", [{"rbac": {"aggregate": False}}, {"rbac": {"create": False}}, TWO])
def test_people_get_no_rights_if_the_chart_may_grant_none(values: dict[str, Any]) -> None:
    assert not [each for each in render(values) if f"{AGGREGATE}view" in each["metadata"].get("labels", {})]
