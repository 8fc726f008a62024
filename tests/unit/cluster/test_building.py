"""Images of Orca: what is built, by whom, and how it reaches the nodes."""

import re
import stat
from pathlib import Path

import pytest

from cluster.images.building import BUILDAH, CHECKOUT, CONTAINERFILE, DOCKER, ROLES

TEXT = (CHECKOUT / CONTAINERFILE).read_text()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name, which is all that there is; the test writes what it does."""
    script = tmp_path / "docker"
    script.touch(mode=stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    return script


def stages() -> list[str]:
    return re.findall(r"^FROM \S+ AS (\S+)$", TEXT, re.MULTILINE)


def test_each_role_is_a_target_that_runs_as_the_user_without_rights() -> None:
    bodies = dict(zip(stages(), re.split(r"^FROM .*$", TEXT, flags=re.MULTILINE)[1:], strict=True))
    assert set(ROLES) <= bodies.keys()
    assert [role for role in ROLES if "USER 65532:65532" not in bodies[role]] == []


def test_each_role_of_the_product_installs_its_own_lock() -> None:
    locks = set(re.findall(r"COPY \.lock/(\w+)\.txt /opt", TEXT))
    assert locks == set(ROLES) - {"pool"}
    assert all((CHECKOUT / ".lock" / f"{lock}.txt").exists() for lock in locks)


def test_the_base_is_the_public_python_image_unless_another_is_named() -> None:
    assert re.findall(r"^ARG BASE=(\S+)$", TEXT, re.MULTILINE) == ["docker.io/library/python:3.12-slim-bookworm"]


def test_an_image_is_exported_as_a_stream_under_its_name() -> None:
    assert BUILDAH.export_command("localhost/orca-pool:dev")[-1] == "docker-archive:/dev/stdout:localhost/orca-pool:dev"
    assert DOCKER.export_command("localhost/orca-pool:dev") == ["docker", "save", "localhost/orca-pool:dev"]
