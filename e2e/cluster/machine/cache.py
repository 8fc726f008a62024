"""A cache of things that are built once: one folder each, with a hash of everything that determines its content.

A build fills a temporary folder and renames it at the end. So a killed build leaves nothing incomplete, and the next
build removes the rest.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.machine.errors import ClusterError


def cache_folder() -> Path:
    """Return `$ORCA_CACHE`, or `~/.cache/orca` by default."""
    return Path(os.environ.get("ORCA_CACHE") or Path.home() / ".cache" / "orca")


def content_key(*parts: str | bytes | Path) -> str:
    """Return 12 hexadecimal digits of a hash of all parts; for a path the file's content counts, not its name."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:12]


def build_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Build `folder` if it does not exist yet.

    Args:
        build: fills an empty folder.
    Returns: True if it was built now.
    Raises: every error of `build`; nothing is stored then.
    """
    if folder.exists():
        return False
    with exclusive_lock(folder):
        if folder.exists():
            return False
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            build(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return True


def check_space(folder: Path, *, wanted_gb: float, purpose: str) -> None:
    """Check the space on the disk of `folder`, which may not exist yet. Raises: ClusterError if it is too small."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < wanted_gb:
        raise ClusterError(f"{purpose} needs {wanted_gb:.1f} GB below {folder}, {free_gb:.1f} GB are free there")


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that builders wait for each other; the kernel releases it with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
