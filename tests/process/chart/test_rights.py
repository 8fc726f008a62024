"""The operator's rights: named verbs on named kinds, and in single namespaces nothing beyond them."""

from typing import Any

import pytest

from orca.operator.cluster.api_server import KINDS
from orca.operator.cluster.watching import CHILDREN
from support.chart.rendering import Manifest, kinds, needs_helm, render, the

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


def of_lease(kind: str) -> Manifest:
    [found] = [each for each in render({}) if each["kind"] == kind and each["metadata"]["name"] == LEASE_ROLE]
    return found


def test_no_right_is_a_wildcard() -> None:
    for role in (the("ClusterRole"), of_lease("Role"), *of_kind("Role", TWO)):
        assert not [grant for grant in grants(role) if "*" in grant]


def test_no_right_is_given_twice() -> None:
    rules = the("ClusterRole")["rules"]
    count = sum(len(rule["resources"]) * len(rule["verbs"]) for rule in rules)
    assert count == len(grants(the("ClusterRole")))


def test_what_the_operator_lists_and_watches_is_granted() -> None:
    listed = {(kind.api.removeprefix("apis/").removeprefix("api/v1"), kind.plural) for kind in KINDS.values()}
    wanted = {(api.rpartition("/")[0], plural, "list") for api, plural in listed}
    wanted |= {(api, plural, verb) for api, _, plural in CHILDREN for verb in ("list", "watch")}
    assert wanted <= grants(the("ClusterRole"))


def test_the_resource_is_read_and_only_its_status_written() -> None:
    ours = {(resource, verb) for group, resource, verb in grants(the("ClusterRole")) if group == "orca-serving.io"}
    reads = {("orcadeployments", verb) for verb in ("get", "list", "watch")}
    assert ours == reads | {("orcadeployments/status", "patch")}


@pytest.mark.parametrize("forbidden", ["pods/exec", "roles", "rolebindings", "clusterroles", "pods/log"])
def test_the_operator_may_neither_grant_rights_nor_exec_into_pods(forbidden: str) -> None:
    assert forbidden not in {resource for _, resource, _ in grants(the("ClusterRole"))}


def test_the_operator_may_patch_and_not_update() -> None:
    assert {verb for _, _, verb in grants(the("ClusterRole"))} == {"get", "list", "watch", "create", "patch", "delete"}


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
    more = grants(the("ClusterRole")) - grants(role)
    assert {resource for _, resource, _ in more} == {"nodes", "customresourcedefinitions", "leases"}
    assert {verb for _, _, verb in more} == {"get", "list", "watch"}
    assert grants(role) < grants(the("ClusterRole"))


def test_no_rights_are_created_if_the_user_provides_them() -> None:
    found = kinds(TWO | {"rbac": {"create": False}})
    assert not {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & set(found)
