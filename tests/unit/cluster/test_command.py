"""The command, as far as it goes without a cluster."""

import os
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.machine.debian import COMMANDS, install, missing_packages
from cluster.machine.errors import ClusterError


@pytest.fixture
def state(tmp_path: Path) -> list[str]:
    return ["--state", str(tmp_path / "state")]


@pytest.mark.parametrize("words", [["status"], ["kubeconfig"], ["load", "image"], ["exec", "--", "true"]])
def test_without_a_cluster_a_message_says_so(
    words: list[str], state: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*state, *words]) == 1
    assert capsys.readouterr().err.startswith("cluster: no cluster was started below ")


def test_a_cluster_cannot_start_without_its_programs(
    state: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.__main__.check_machine", lambda _: None)
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path))
    assert main([*state, "can-start"]) == 1
    assert capsys.readouterr().err.startswith("cluster: not in the cache yet: kubernetes, etcd, ")
    assert main([*state, "can-start", "--once-built"]) == 0


def test_only_programs_of_the_table_are_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["binaries", "minikube"])
    assert "invalid choice: 'minikube'" in capsys.readouterr().err


def test_a_missing_command_is_reported_with_its_package() -> None:
    commands = {"sh": "dash", "no-such-command": "its-package"}
    assert "its-package" in missing_packages(commands)
    assert "dash" not in missing_packages(commands)


def test_without_the_right_to_install_the_missing_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"not root, .*: apt-get install containerd runc"):
        install(["containerd", "runc"], lambda _line: None)


def test_nothing_is_installed_where_nothing_is_missing() -> None:
    install([], lambda line: pytest.fail(line))


def test_every_command_has_a_package() -> None:
    assert all(COMMANDS.values())
