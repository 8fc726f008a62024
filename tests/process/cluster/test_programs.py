"""The programs of a cluster are built by a compiler."""

import os
import stat
from pathlib import Path

import pytest

from cluster.machine.errors import ClusterError
from cluster.programs import go_programs
from cluster.programs.go_programs import ETCD, KUBERNETES, build_programs


@pytest.fixture
def go_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the compiler: a script that a test writes. It needs no disk, however full."""
    script = tmp_path / "bin" / "go"
    script.parent.mkdir()
    script.touch(mode=stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(go_programs, "check_space", lambda *_, **__: None)
    return script


VERSION = 'if [ "$1" = env ]; then echo go1.26.8; exit; fi\n'


def test_a_program_is_built_once_and_has_its_links(go_that: Path) -> None:
    go_that.write_text(f'#!/bin/sh\n{VERSION}while [ "$1" != -o ]; do shift; done; echo built > "$2"\n')
    told: list[str] = []
    build_programs([KUBERNETES], told.append)
    build_programs([KUBERNETES], told.append)
    assert (KUBERNETES.folder / "kubectl").read_text() == "built\n"
    assert [line.split()[0] for line in told] == ["building", "built"]


def test_the_error_has_the_output_of_the_compiler(go_that: Path) -> None:
    go_that.write_text(f"#!/bin/sh\n{VERSION}echo main.go:3: no such package >&2; exit 1\n")
    with pytest.raises(ClusterError, match=r"ended with status 1\nmain.go:3: no such package"):
        build_programs([ETCD], lambda _line: None)
    assert not ETCD.folder.exists()


def test_the_go_cache_of_a_build_is_deleted_after_it(go_that: Path, tmp_path: Path) -> None:
    keep = 'mkdir -p "$GOCACHE" "$GOMODCACHE"\n'
    go_that.write_text(f'#!/bin/sh\n{VERSION}{keep}while [ "$1" != -o ]; do shift; done; echo built > "$2"\n')
    build_programs([ETCD], lambda _line: None)
    assert ETCD.path.exists()
    assert not (tmp_path / "cache" / "go-caches").exists()
