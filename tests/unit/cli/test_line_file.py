"""core.process.line_file: a full disk disturbs nobody who writes lines, and cuts none."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca.core.process.line_file import LineFile


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_written_before_the_file_is_closed(tmp_path: Path) -> None:
    with LineFile(tmp_path / "log") as file:
        file.write(b"one\n")
        file.write(b"two\n")
        assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_truncated_line_is_completed_when_there_is_space_and_later_lines_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LineFile(tmp_path / "log") as file:
        file.write(b"one\n")
        with room_for(6):
            for line in (b"two\n", b"three\n", b"four\n"):
                file.write(line)
            assert (tmp_path / "log").read_bytes() == b"one\ntw"
        file.write(b"five\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nfive\n"
    assert [record.message for record in caplog.records] == ["a file cannot be written", "a file is written again"]
    assert caplog.records[1].lost_lines == 2


def test_a_full_disk_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with LineFile(Path("/dev/full")) as file:
        for _ in range(3):
            file.write(b"line\n")
    [record] = caplog.records
    assert "No space left" in record.detail
