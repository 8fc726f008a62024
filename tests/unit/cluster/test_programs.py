"""The table of programs agrees with the modules that pin them."""

import os
import re
import stat
from pathlib import Path

import pytest

from cluster.machine.errors import ClusterError
from cluster.programs.go_programs import ETCD, KUBERNETES, PROGRAMS, Program, build_programs

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


@pytest.fixture
def go_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the compiler: a script that a test writes."""
    script = tmp_path / "bin" / "go"
    script.parent.mkdir()
    script.touch(mode=stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    return script


VERSION = 'if [ "$1" = env ]; then echo go1.26.8; exit; fi\n'


def test_a_program_is_built_once_and_has_its_links(go_that: Path) -> None:
    go_that.write_text(f'#!/bin/sh\n{VERSION}while [ "$1" != -o ]; do shift; done; echo built > "$2"\n')
    told: list[str] = []
    build_programs([KUBERNETES], told.append)
    build_programs([KUBERNETES], told.append)
    assert (KUBERNETES.folder / "kubectl").read_text() == "built\n"
    assert [line.split()[0] for line in told] == ["building", "built"]


def test_what_the_compiler_said_is_in_the_refusal(go_that: Path) -> None:
    go_that.write_text(f"#!/bin/sh\n{VERSION}echo main.go:3: no such package >&2; exit 1\n")
    with pytest.raises(ClusterError, match=r"ended with status 1\nmain.go:3: no such package"):
        build_programs([ETCD], lambda _line: None)
    assert not ETCD.folder.exists()


def test_what_go_kept_for_a_build_goes_with_it(go_that: Path, tmp_path: Path) -> None:
    keep = 'mkdir -p "$GOCACHE" "$GOMODCACHE"\n'
    go_that.write_text(f'#!/bin/sh\n{VERSION}{keep}while [ "$1" != -o ]; do shift; done; echo built > "$2"\n')
    build_programs([ETCD], lambda _line: None)
    assert ETCD.path.exists()
    assert not (tmp_path / "cache" / "go-caches").exists()
