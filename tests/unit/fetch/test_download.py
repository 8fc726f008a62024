"""The download by itself, from a source that is told how to fail; and what it reports."""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orca.cli.fetch import errors
from orca.cli.fetch.download import fetch
from orca.cli.fetch.errors import FetchError, ModelBroken, ModelMissing, NoSpace, error_of_status
from orca.cli.fetch.progress import ProgressCounter
from orca.cli.fetch.source import Digest, ModelListing, RemoteFile, md5_of_parts, sha256
from orca.cli.main import main
from orca.core.fetch_report import (
    PERMANENT_EXIT,
    REASONS,
    FetchProgress,
    format_reason,
    progress_body,
    read_progress,
    read_reason,
)
from support.fetch.fetching import model_files


class FakeSource:
    """Holds a model; `error` is raised instead of the weights' second half."""

    def __init__(self, identity: str = "one", error: Exception | None = None) -> None:
        self.identity = identity
        self.error = error
        self.reads: list[tuple[str, int]] = []
        self.has_digests = True

    def listing(self) -> ModelListing:
        files = model_files().items()
        return ModelListing(self.identity, tuple(RemoteFile(name, len(of), self._digest(of)) for name, of in files))

    @contextmanager
    def read(self, file: RemoteFile, from_byte: int) -> Iterator[Iterator[bytes]]:
        self.reads.append((file.name, from_byte))
        yield self._pieces(model_files()[file.name], from_byte, file.name == "model.safetensors")

    def _pieces(self, content: bytes, from_byte: int, may_fail: bool) -> Iterator[bytes]:
        half = len(content) // 2
        if self.error is None or not may_fail:
            yield content[from_byte:]
            return
        yield content[from_byte:half]
        raise self.error

    def _digest(self, content: bytes) -> Digest | None:
        return sha256(hashlib.sha256(content).hexdigest()) if self.has_digests else None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_the_partial_download_and_the_next_start_continues(tmp_path: Path, number: int) -> None:
    source = FakeSource(error=OSError(number, "full"))
    with pytest.raises(NoSpace):
        fetch(source, tmp_path / "model", ProgressCounter(), tries=1)
    source.error = None
    assert fetch(source, tmp_path / "model", ProgressCounter(), tries=1)
    half = len(model_files()["model.safetensors"]) // 2
    assert [begun for name, begun in source.reads if name == "model.safetensors"] == [0, half]


def test_another_identity_starts_from_scratch_and_deletes_the_old_files(tmp_path: Path) -> None:
    with pytest.raises(NoSpace):
        fetch(FakeSource("old", OSError(errno.ENOSPC, "full")), tmp_path / "model", ProgressCounter(), tries=1)
    assert fetch(FakeSource("new"), tmp_path / "model", ProgressCounter(), tries=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_an_error_of_the_machine_is_not_attributed_to_the_model(tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        fetch(FakeSource(error=PermissionError(errno.EPERM, "no")), tmp_path / "model", ProgressCounter(), tries=1)


@pytest.mark.parametrize("into", ["/proc/model", "/dev/null/model"])
def test_a_folder_that_cannot_be_created_is_a_mistake_of_the_caller(
    into: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "--uri", "hf://a/b", "--into", into]) == PERMANENT_EXIT
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"orca fetch: setting into: {into} cannot be made: ")


def test_a_file_without_a_digest_is_checked_by_its_size(tmp_path: Path) -> None:
    source = FakeSource()
    source.has_digests = False
    assert fetch(source, tmp_path / "model", ProgressCounter(), tries=1)


def test_a_folder_without_configuration_is_broken(tmp_path: Path) -> None:
    source = FakeSource()
    source.listing = lambda: ModelListing("one", (RemoteFile("model.safetensors", 1, None),))  # type: ignore[method-assign]
    with pytest.raises(ModelBroken, match=r"no config\.json"):
        fetch(source, tmp_path / "model", ProgressCounter(), tries=1)


def test_progress_counts_bytes_of_earlier_starts(tmp_path: Path) -> None:
    total = sum(map(len, model_files().values()))
    with pytest.raises(NoSpace):
        fetch(FakeSource(error=OSError(errno.ENOSPC, "full")), tmp_path / "model", ProgressCounter(), tries=1)
    progress = ProgressCounter()
    fetch(FakeSource(), tmp_path / "model", progress, tries=1)
    assert progress.figures == FetchProgress(total, total, None)


@pytest.mark.parametrize("pieces", [1, 3, 7, 100])
def test_the_tag_of_an_object_in_parts_does_not_depend_on_how_it_is_read(pieces: int) -> None:
    content, part = bytes(range(100)), 30
    parts = [hashlib.md5(content[at : at + part]).digest() for at in range(0, 100, part)]
    hasher = md5_of_parts(part, "").hasher()
    for at in range(0, 100, pieces):
        hasher.update(content[at : at + pieces])
    assert hasher.hexdigest() == f"{hashlib.md5(b''.join(parts)).hexdigest()}-4"


def test_every_status_has_its_reason() -> None:
    reasons = {status: error_of_status(status, "x").reason for status in (401, 403, 404, 410, 416, 429, 500, 503)}
    assert {status for status, reason in reasons.items() if reason == "ModelDenied"} == {401, 403}
    assert {status for status, reason in reasons.items() if reason == "ModelMissing"} == {404, 410}
    assert reasons[429] == reasons[503] == "ModelUnreachable"


def test_the_error_names_are_the_reasons_that_the_operator_reads() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FetchError)]
    assert {kind.__name__ for kind in kinds} - {"FetchError"} == set(REASONS)


def test_a_report_is_read_as_it_was_written() -> None:
    figures = FetchProgress(1, 2, format_reason("NoSpace", "full"))
    assert read_progress(progress_body(figures)) == figures
    said = f"a line of a log: INFO\n{format_reason(ModelMissing('gone').reason, 'a: b')}\n"
    assert read_reason(said) == ("ModelMissing", "a: b")
    assert read_reason("Traceback: so") is None
    assert read_reason("") is None


@pytest.mark.parametrize("page", ["[]", '{"bytes_done": "1"}', '{"bytes_done": 1, "bytes_total": 1, "problem": 2}'])
def test_an_invalid_report_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"is not a JSON object|is not the progress"):
        read_progress(page.encode())
