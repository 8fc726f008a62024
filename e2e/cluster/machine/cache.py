"""What is built once and kept: a folder per thing, named by all that decides its content.

A thing is built in a folder beside its own and renamed when it is whole, so whatever kills a build leaves nothing half,
and the next build clears what was left.
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
    """`$ORCA_CACHE`, else `~/.cache/orca`."""
    return Path(os.environ.get("ORCA_CACHE") or Path.home() / ".cache" / "orca")


def key_of(*parts: str | bytes | Path) -> str:
    """12 hexadecimal digits of all the parts; of a path its content counts, not its name."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:12]


def cached(folder: Path, build: Callable[[Path], None]) -> bool:
    """Make sure that `folder` is there and whole.

    Args:
        build: fills the empty folder that it is given; called only when there is nothing yet.
    Returns: whether it was built now.
    Raises: whatever `build` raises; nothing is kept then.
    """
    if folder.exists():
        return False
    with one_at_a_time(folder):
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
    """Raises: ClusterError that says how much is missing on the disk of `folder`, which need not exist yet."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < wanted_gb:
        raise ClusterError(f"{purpose} needs {wanted_gb:.1f} GB below {folder}, {free_gb:.1f} GB are free there")


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Two builders of one folder wait for each other; the lock goes with its holder, however that ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
