"""Folders that appear only when they are whole: a lock beside them, and one rename at the very end.

INTO            the folder; where it exists, it is whole
.NAME.lock      held by the one process that makes the folder; NAME is the folder's name
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock(into: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Let only one process at a time make a folder. The kernel releases the lock when the process ends.

    Args: on_wait: is called once if another process has the lock.
    Raises: OSError when no file can be made beside the folder.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.with_name(f".{into.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def publish(unfinished: Path, into: Path) -> None:
    """Rename a complete folder of files. After a loss of power the new name is there only with the whole content."""
    for file in unfinished.iterdir():
        _sync(file)
    _sync(unfinished)
    unfinished.rename(into)
    _sync(into.parent)


def _sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
