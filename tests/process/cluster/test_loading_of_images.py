"""A stream from one command to several: all get all of it, and a failure of any is told."""

from pathlib import Path

import pytest

from cluster.images.loading import stream
from cluster.machine.errors import ClusterError

MANY_BYTES = ["head", "--bytes=5000000", "/dev/zero"]


def writing(path: Path) -> list[str]:
    return ["dd", "status=none", f"of={path}"]


def test_each_target_gets_the_whole_stream(tmp_path: Path) -> None:
    stream(MANY_BYTES, [writing(tmp_path / "one"), writing(tmp_path / "other")])
    assert [(tmp_path / name).stat().st_size for name in ("one", "other")] == [5000000, 5000000]


def test_a_failed_source_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no such image"):
        stream(["sh", "-c", "echo no such image >&2; exit 1"], [writing(tmp_path / "one")])


def test_a_failed_target_ends_the_stream_and_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="disk is full"):
        stream(MANY_BYTES, [["sh", "-c", "echo disk is full >&2; exit 1"], writing(tmp_path / "other")])


def test_the_source_gets_its_own_variables(tmp_path: Path) -> None:
    stream(["printenv", "DRIVER"], [writing(tmp_path / "one")], environment={"DRIVER": "overlay"})
    assert (tmp_path / "one").read_text() == "overlay\n"
