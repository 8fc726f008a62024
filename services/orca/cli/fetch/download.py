"""Downloads a model's files into a folder that appears only when it is whole.

    INTO                        the model, made by one rename at the very end
    .NAME.IDENTITY/             the unfinished model beside it: NAME is the folder's name, IDENTITY the revision's
        model.safetensors       verified against its digest, and synced
        other.safetensors.part  the first part of a file; the next start resumes after it

A kill at any moment leaves one of these states. Another identity, such as a branch that has moved on, starts from
scratch.
"""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from orca.cli.fetch.errors import ModelBroken, ModelUnreachable, NoSpace
from orca.cli.fetch.progress import ProgressCounter
from orca.cli.fetch.source import Hasher, RemoteFile, Source
from orca.cli.model_folder import is_fetched
from orca.cli.whole_folder import lock, publish
from orca.core.domain.errors import ModelError, SettingError
from orca.core.domain.model import load_model_info, read_config
from orca.core.domain.tokenizer_folder import check_tokenizer
from orca.core.fetch_report import format_reason

log = logging.getLogger(__name__)

FILES_AT_ONCE = 4
"""Files to download at the same time; one stream seldom fills the network link."""
RETRY_DELAY_S = 1.0
"""Delay before the second try of a file; it doubles with each further try."""
READ_BYTES = 1 << 20
PART = ".part"
PATH_ERRORS = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of making a file at a path where it can never work; other errors may pass."""


def fetch(source: Source, into: Path, progress: ProgressCounter, *, tries: int) -> bool:
    """Make sure that the folder `into` holds the model.

    Args: tries: number of tries of one file, without a new byte between them, before it is given up.
    Returns: whether anything was fetched; False when the folder was there already.
    Raises: FetchError; what was fetched stays for the next call. SettingError when the folder cannot be made at `into`.
    """
    with _full_disk_as_no_space(into), _lock(into):
        if into.exists():
            return False
        listing = source.listing()
        files = _served_files(listing.files)
        unfinished = into.with_name(f".{into.name}.{listing.identity}")
        _remove_others(unfinished, into)
        unfinished.mkdir(exist_ok=True)
        done, total = sum(_bytes_on_disk(unfinished, file) for file in files), sum(file.size_bytes for file in files)
        progress.begin(done=done, total=total)
        _check_space(unfinished, total - done)
        _Download(source, unfinished, progress, tries).run(files)
        _check_model(unfinished)
        publish(unfinished, into)
    return True


class _Download:
    """The download of all files of one model."""

    def __init__(self, source: Source, folder: Path, progress: ProgressCounter, tries: int) -> None:
        self._source = source
        self._folder = folder
        self._progress = progress
        self._tries = tries
        self._has_failed = threading.Event()  # one file has failed, so the others can stop

    def run(self, files: Sequence[RemoteFile]) -> None:
        """Download the configuration first: it may show that the weights are not worth fetching."""
        missing = [file for file in files if not (self._folder / file.name).exists()]
        for file in missing:
            if file.name == "config.json":
                self._download(file)
        _check_configuration(self._folder)
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="fetch") as threads:
            others = sorted((file for file in missing if file.name != "config.json"), key=lambda file: file.size_bytes)
            for _ in threads.map(self._download_or_stop_all, others):
                pass

    def _download_or_stop_all(self, file: RemoteFile) -> None:
        try:
            self._download(file)
        except BaseException:
            self._has_failed.set()
            raise

    def _download(self, file: RemoteFile) -> None:
        """Resume an earlier try until the file is complete and matches its digest."""
        part = self._folder / (file.name + PART)
        fruitless = 0
        while not self._has_failed.is_set():
            before = _size(part)
            try:
                self._resume(file, part)
                break
            except ModelUnreachable as error:
                fruitless = 1 if _size(part) > before else fruitless + 1
                self._progress.fail(format_reason(error.reason, str(error)))
                log.warning("try again: %s", error, extra={"file": file.name, "bytes_done": _size(part)})
                if fruitless >= self._tries:
                    raise
                self._has_failed.wait(RETRY_DELAY_S * 2 ** (fruitless - 1))

    def _resume(self, file: RemoteFile, part: Path) -> None:
        resumed = _size(part)
        hasher = None if file.digest is None else file.digest.hasher()
        if hasher is not None:
            _add_file(hasher, part)
        with part.open("ab") as written:
            if resumed < file.size_bytes:
                self._receive(file, resumed, written, hasher)
            written.flush()
            os.fsync(written.fileno())
        if self._has_failed.is_set():
            return
        if _size(part) < file.size_bytes:
            raise ModelUnreachable(f"{file.name} ended after {_size(part)} of {file.size_bytes} bytes")
        is_right = hasher is None or file.digest is None or hasher.hexdigest() == file.digest.expected
        if _size(part) == file.size_bytes and is_right:
            part.rename(self._folder / file.name)
        else:
            self._discard(file, part, is_resumed=resumed > 0)

    def _receive(self, file: RemoteFile, from_byte: int, written: IO[bytes], hasher: Hasher | None) -> None:
        with self._source.read(file, from_byte) as pieces:
            for piece in pieces:
                if self._has_failed.is_set():
                    return
                written.write(piece)
                if hasher is not None:
                    hasher.update(piece)
                self._progress.add(len(piece))

    def _discard(self, file: RemoteFile, part: Path, *, is_resumed: bool) -> None:
        """Delete a file that does not match its digest.

        Raises: ModelUnreachable when the file was resumed, so that it is tried again: a node that lost power may have
            damaged the first part. ModelBroken otherwise.
        """
        self._progress.add(-_size(part))
        part.unlink()
        if is_resumed:
            raise ModelUnreachable(f"the stored part of {file.name} was damaged; it is fetched again from its start")
        raise ModelBroken(f"{file.name} does not match its size and digest; it was changed in transit or at its source")


def _served_files(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the files that a server needs. Raises: ModelBroken when they are no model."""
    wanted = [file for file in files if is_fetched(file.name)]
    if not any(file.name == "config.json" for file in wanted):
        raise ModelBroken("there is no config.json; a folder in Hugging Face layout is needed")
    if not any(file.name.endswith(".safetensors") for file in wanted):
        pickled = sorted(file.name for file in files if file.name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        has = f"only pickled weights ({pickled[0]}), which can run code" if pickled else "no weights"
        raise ModelBroken(f"there are {has}; *.safetensors files are needed")
    return wanted


def _check_configuration(folder: Path) -> None:
    try:
        read_config(folder)
    except ModelError as error:
        raise ModelBroken(f"it cannot be served: {error}") from error


def _check_model(folder: Path) -> None:
    """Check what every pod checks when it starts."""
    try:
        load_model_info(folder)
        check_tokenizer(folder)
    except ModelError as error:
        raise ModelBroken(f"it cannot be served: {error}") from error


def _check_space(folder: Path, wanted_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if wanted_bytes > free_bytes:
        raise NoSpace(
            f"{wanted_bytes / 1e9:.2f} GB are still to be fetched, but the volume has only {free_bytes / 1e9:.2f} GB"
            " free"
        )


def _remove_others(unfinished: Path, into: Path) -> None:
    """Delete unfinished models of other revisions, which nothing resumes."""
    for folder in into.parent.glob(f".{into.name}.*"):
        if folder != unfinished and folder.is_dir():
            shutil.rmtree(folder)


@contextmanager
def _lock(into: Path) -> Iterator[None]:
    """Let only one process fetch into a folder: a pod on a lost node may still run when the next pod starts.

    Raises: SettingError when no file can be made beside the folder.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(into))
        except OSError as error:
            if error.errno not in PATH_ERRORS:
                raise
            raise SettingError(f"setting into: {into} cannot be made: {error.strerror}") from error
        yield


@contextmanager
def _full_disk_as_no_space(into: Path) -> Iterator[None]:
    """Raise NoSpace for an OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(f"the volume of {into} is full") from error


def _bytes_on_disk(folder: Path, file: RemoteFile) -> int:
    return _size(folder / file.name) or _size(folder / (file.name + PART))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _add_file(hasher: Hasher, path: Path) -> None:
    with suppress(FileNotFoundError), path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            hasher.update(piece)
