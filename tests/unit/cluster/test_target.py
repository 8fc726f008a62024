"""The scenarios run on a local or a named cluster, and do not harm a named one."""

from typing import Any

import pytest

from cluster.kubernetes.kubectl import ContextKubectl, Kubectl
from cluster.machine.errors import ClusterError
from foreign_cluster import DEFINITION, check_not_installed, delete_definition
from orca.core.domain.errors import SettingError
from target import OURS, choose_target, read_settings

THEIRS = {
    "ORCA_E2E_CONTEXT": "somebodys",
    "ORCA_E2E_REGISTRY": "registry.example.com/orca",
    "ORCA_E2E_TAG": "7",
    "ORCA_E2E_INGRESS_CLASS": "nginx",
    "ORCA_E2E_INGRESS_ADDRESS": "203.0.113.7:8080",
}


class PaperKubectl(Kubectl):
    """Answers by the first words of a call, and with nothing to others."""

    def __init__(self, is_answering: dict[str, str]) -> None:
        self.is_answering = is_answering
        self.said: list[str] = []

    def __call__(self, *words: str, **_: Any) -> str:
        self.said.append(" ".join(words))
        return next((text for begin, text in self.is_answering.items() if self.said[-1].startswith(begin)), "")

    def _command(self) -> tuple[str, ...]:
        raise NotImplementedError


@pytest.mark.parametrize("environment", [{}, {"KUBECONFIG": "/somewhere"}, {"ORCA_E2E_FIGURES": "/tmp/figures"}])
def test_without_a_name_the_local_cluster_is_used(environment: dict[str, str]) -> None:
    assert choose_target(read_settings(environment), "1a2b") == OURS
    assert OURS.is_own


def test_a_named_cluster_gets_an_operator_in_a_namespace_of_this_run() -> None:
    target = choose_target(read_settings(THEIRS), "1a2b")
    assert not target.is_own
    assert (target.context, target.registry, target.tag) == ("somebodys", "registry.example.com/orca", "7")
    assert (target.ingress_class, target.ingress_address) == ("nginx", "203.0.113.7:8080")
    assert target.operator_namespace == "orca-e2e-1a2b"


@pytest.mark.parametrize("missing", sorted(THEIRS.keys() - {"ORCA_E2E_CONTEXT"}))
def test_a_missing_setting_of_a_named_cluster_is_reported_by_its_variable(missing: str) -> None:
    with pytest.raises(SettingError, match=f"setting {missing}: '' is not given: .+"):
        read_settings({name: value for name, value in THEIRS.items() if name != missing})


def test_cluster_settings_without_a_named_cluster_are_refused() -> None:
    with pytest.raises(SettingError, match="ORCA_E2E_TAG: '7' is not of use without ORCA_E2E_CONTEXT"):
        read_settings({"ORCA_E2E_TAG": "7"})


@pytest.mark.parametrize(
    ("name", "value"), [("ORCA_E2E_INGRESS_ADDRESS", "http://here/"), ("ORCA_E2E_CONTEXTS", "somebodys")]
)
def test_a_wrong_value_or_name_is_reported(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=name):
        read_settings(THEIRS | {name: value})


def test_kubectl_gets_the_context_in_every_call() -> None:
    assert ContextKubectl("somebodys")._command() == ("kubectl", "--context=somebodys")


def test_a_cluster_where_orca_is_installed_is_not_changed() -> None:
    check_not_installed(None)
    annotations = {"meta.helm.sh/release-name": "theirs", "meta.helm.sh/release-namespace": "serving"}
    with pytest.raises(ClusterError, match="of release theirs in namespace serving"):
        check_not_installed({"metadata": {"annotations": annotations}})
    with pytest.raises(ClusterError, match="of an unknown owner"):
        check_not_installed({"metadata": {}})


def test_the_definition_is_deleted_unless_another_resource_uses_it() -> None:
    there = {"get customresourcedefinition": f"customresourcedefinition/{DEFINITION}"}
    unused = PaperKubectl(there)
    delete_definition(unused)
    assert unused.said[-1].startswith(f"delete customresourcedefinition {DEFINITION}")
    used = PaperKubectl({**there, f"get {DEFINITION} --all-namespaces": "orcadeployment.orca-serving.io/theirs"})
    with pytest.raises(ClusterError, match=r"used by .*/theirs$"):
        delete_definition(used)
    assert not [said for said in used.said if said.startswith("delete")]


def test_a_definition_that_was_never_installed_needs_no_delete() -> None:
    kubectl = PaperKubectl({})
    delete_definition(kubectl)
    assert len(kubectl.said) == 1
