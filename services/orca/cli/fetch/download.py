"""Brings a model's files into a folder that nobody sees before it is whole.

    INTO                        the model, made by one rename at the very end
    .NAME.IDENTITY/             beside it, while it is not whole: NAME is the folder's, IDENTITY the revision's
        model.safetensors       verified against its digest, and synced
        other.safetensors.part  the beginning of a file; the next start goes on behind it

A kill at any moment leaves one of these states. Another identity, such as a branch that has moved on, begins anew.
"""

import errno
import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from orca.cli.fetch.errors import ModelBroken, ModelUnreachable, NoSpace
from orca.cli.fetch.progress import Progress
from orca.cli.fetch.source import Hasher, RemoteFile, Source
from orca.cli.model_folder import is_fetched
from orca.core.domain.errors import ModelError, SettingError
from orca.core.domain.model import load_model_info, read_config, tokenizer_file
from orca.core.fetch_report import format_reason

log = logging.getLogger(__name__)

AT_A_TIME = 4
"""Files; one stream seldom fills a line."""
WAIT_FIRST_S = 1.0
"""Before the second try of a file, then twice as long each time."""
READ_BYTES = 1 << 20
PART = ".part"
NO_PLACE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""How making a file fails where none can ever be; what else a machine may say passes by."""


def fetch(source: Source, into: Path, progress: Progress, *, tries: int) -> bool:
    """Make sure that the folder `into` holds the model.

    Args: tries: of one file, without a byte between them, before it is given up.
    Returns: whether anything had to be fetched: False when the folder was there.
    Raises: FetchError; what was fetched stays for the next call. SettingError when the folder can never be there.
    """
    with _full_disk_named(into), _one_at_a_time(into):
        if into.exists():
            return False
        listing = source.listing()
        files = _wanted(listing.files)
        unfinished = into.with_name(f".{into.name}.{listing.identity}")
        _remove_others(unfinished, into)
        unfinished.mkdir(exist_ok=True)
        done, total = sum(_bytes_here(unfinished, file) for file in files), sum(file.size_bytes for file in files)
        progress.begin(done=done, total=total)
        _check_space(unfinished, total - done)
        _Download(source, unfinished, progress, tries).run(files)
        _check_model(unfinished)
        _sync_folder(unfinished)
        unfinished.rename(into)
        _sync_folder(into.parent)
    return True


class _Download:
    """All files of one model."""

    def __init__(self, source: Source, folder: Path, progress: Progress, tries: int) -> None:
        self._source = source
        self._folder = folder
        self._progress = progress
        self._tries = tries
        self._is_over = threading.Event()  # one file has failed: the others need not go on

    def run(self, files: Sequence[RemoteFile]) -> None:
        """The configuration first: it may tell that no byte of the weights is worth fetching."""
        missing = [file for file in files if not (self._folder / file.name).exists()]
        for file in missing:
            if file.name == "config.json":
                self._bring(file)
        _check_configuration(self._folder)
        with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="fetch") as threads:
            others = sorted((file for file in missing if file.name != "config.json"), key=lambda file: file.size_bytes)
            for _ in threads.map(self._bring_or_stop_all, others):
                pass

    def _bring_or_stop_all(self, file: RemoteFile) -> None:
        try:
            self._bring(file)
        except BaseException:
            self._is_over.set()
            raise

    def _bring(self, file: RemoteFile) -> None:
        """Go on where an earlier try was, until the file is here and is what it should be."""
        part = self._folder / (file.name + PART)
        fruitless = 0
        while not self._is_over.is_set():
            before = _size(part)
            try:
                self._go_on(file, part)
                break
            except ModelUnreachable as error:
                fruitless = 1 if _size(part) > before else fruitless + 1
                self._progress.fail(format_reason(error.reason, str(error)))
                log.warning("again: %s", error, extra={"file": file.name, "bytes_here": _size(part)})
                if fruitless >= self._tries:
                    raise
                self._is_over.wait(WAIT_FIRST_S * 2 ** (fruitless - 1))

    def _go_on(self, file: RemoteFile, part: Path) -> None:
        resumed = _size(part)
        hasher = None if file.digest is None else file.digest.hasher()
        if hasher is not None:
            _add_file(hasher, part)
        with part.open("ab") as written:
            if resumed < file.size_bytes:
                self._receive(file, resumed, written, hasher)
            written.flush()
            os.fsync(written.fileno())
        if self._is_over.is_set():
            return
        if _size(part) < file.size_bytes:
            raise ModelUnreachable(f"{file.name} ended after {_size(part)} of {file.size_bytes} bytes")
        is_right = hasher is None or file.digest is None or hasher.hexdigest() == file.digest.expected
        if _size(part) == file.size_bytes and is_right:
            part.rename(self._folder / file.name)
        else:
            self._throw_away(file, part, is_resumed=resumed > 0)

    def _receive(self, file: RemoteFile, from_byte: int, written: IO[bytes], hasher: Hasher | None) -> None:
        with self._source.read(file, from_byte) as pieces:
            for piece in pieces:
                if self._is_over.is_set():
                    return
                written.write(piece)
                if hasher is not None:
                    hasher.update(piece)
                self._progress.add(len(piece))

    def _throw_away(self, file: RemoteFile, part: Path, *, is_resumed: bool) -> None:
        """Raises: ModelBroken, unless a new copy may be right: a node that loses power may spoil what was there."""
        self._progress.add(-_size(part))
        part.unlink()
        if is_resumed:
            raise ModelUnreachable(f"the part of {file.name} that was here did not fit; it is fetched anew")
        raise ModelBroken(f"{file.name} is not what its size and digest say; it was changed on its way, or where it is")


def _wanted(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Those that are served. Raises: ModelBroken when they cannot be a model."""
    wanted = [file for file in files if is_fetched(file.name)]
    if not any(file.name == "config.json" for file in wanted):
        raise ModelBroken("there is no config.json: a folder in Hugging Face layout is needed")
    if not any(file.name.endswith(".safetensors") for file in wanted):
        pickled = sorted(file.name for file in files if file.name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        has = f"only pickled weights ({pickled[0]}), which can run code" if pickled else "no weights"
        raise ModelBroken(f"there are {has}: *.safetensors files are needed")
    return wanted


def _check_configuration(folder: Path) -> None:
    try:
        read_config(folder)
    except ModelError as error:
        raise ModelBroken(f"it cannot be served: {error}") from error


def _check_model(folder: Path) -> None:
    """Once more what every pod asks when it starts."""
    try:
        load_model_info(folder)
        tokenizer_file(folder)
    except ModelError as error:
        raise ModelBroken(f"it cannot be served: {error}") from error


def _check_space(folder: Path, wanted_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if wanted_bytes > free_bytes:
        raise NoSpace(
            f"{wanted_bytes / 1e9:.2f} GB are still to come, and the volume has {free_bytes / 1e9:.2f} GB free"
        )


def _remove_others(unfinished: Path, into: Path) -> None:
    """Beginnings of other revisions, which nobody goes on with."""
    for each in into.parent.glob(f".{into.name}.*"):
        if each != unfinished and each.is_dir():
            shutil.rmtree(each)


@contextmanager
def _one_at_a_time(into: Path) -> Iterator[None]:
    """A pod whose node is lost may still be at it when the next one starts; its lock goes when it ends.

    Raises: SettingError when there can be no file beside the folder.
    """
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        lock = into.with_name(f".{into.name}.lock").open("w")
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        raise SettingError(f"setting into: {into} cannot be made: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _full_disk_named(into: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(f"the volume of {into} is full") from error


def _bytes_here(folder: Path, file: RemoteFile) -> int:
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


def _sync_folder(folder: Path) -> None:
    """So that a loss of power does not take back the names in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
