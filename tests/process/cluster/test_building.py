"""Images are built by the program that is there."""

import stat
from pathlib import Path

import pytest

from cluster.images.building import BUILDAH, CONTAINERFILE, DOCKER, find_builder, orca_image


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name, which is all that there is; the test writes what it does."""
    script = tmp_path / "docker"
    script.touch(mode=stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    return script


def test_docker_builds_if_its_daemon_answers(docker: Path) -> None:
    docker.write_text("#!/bin/sh\nexit 0\n")
    assert find_builder() == DOCKER


def test_buildah_builds_if_docker_has_no_daemon(docker: Path) -> None:
    docker.write_text("#!/bin/sh\nexit 1\n")
    assert find_builder() == BUILDAH


def test_both_build_the_same_target_and_only_buildah_needs_a_base() -> None:
    image = orca_image("gateway", "dev")
    one, other = (builder.build_command("gateway", image) for builder in (DOCKER, BUILDAH))
    assert one[-7:] == other[-7:] == ["--file", CONTAINERFILE, "--target", "gateway", "--tag", image, "."]
    assert "BASE=localhost/orca-base:bookworm" in other
    assert not any(word.startswith("BASE=") for word in one)
