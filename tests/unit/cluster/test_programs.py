"""The table of programs agrees with the modules that pin them."""

import re
from pathlib import Path

import pytest

from cluster.programs.go_programs import ETCD, KUBERNETES, PROGRAMS, Program

MODULES = {
    "kubernetes": "k8s.io/kubernetes",
    "etcd": "go.etcd.io/etcd/server/v3",
    "coredns": "github.com/coredns/coredns",
    "traefik": "github.com/traefik/traefik/v3",
    "local-path-provisioner": "github.com/rancher/local-path-provisioner",
    "helm": "helm.sh/helm/v3",
    "kubeconform": "github.com/yannh/kubeconform",
    "versitygw": "github.com/versity/versitygw",
}


@pytest.mark.parametrize("name", MODULES)
def test_the_version_in_the_table_is_the_one_that_is_pinned(name: str) -> None:
    module = (PROGRAMS[name].source / "go.mod").read_text()
    [pinned] = re.findall(rf"^(?:require)?\s+{re.escape(MODULES[name])} v(\S+)", module, re.MULTILINE)
    assert pinned == PROGRAMS[name].version


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_program_has_its_main_or_names_the_tool_it_is(program: Program) -> None:
    module = (program.source / "go.mod").read_text()
    has_main = (program.source / "main.go").exists()
    assert has_main == (program.package == ".")
    assert has_main or f"tool {program.package}" in module


def test_kubernetes_says_its_version_and_has_all_its_names() -> None:
    command = KUBERNETES.build_command(Path("/target"))
    assert (
        f"-X k8s.io/component-base/version.gitVersion=v{KUBERNETES.version}" in command[command.index("-ldflags") + 1]
    )
    source = (KUBERNETES.source / "main.go").read_text()
    assert all(f'"{name}":' in source for name in KUBERNETES.links)


def test_another_way_to_build_is_another_folder() -> None:
    assert Program("etcd", ETCD.version, stamps=(("a", "b"),)).folder != ETCD.folder
