"""Compiles functions of numbers and addresses for this processor, and caches the code for the next process."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any

import llvmlite.binding
import numba
from numba import cfunc, config

from orca.kernels.cpu.team.intrinsics import ARGS, FAST

log = logging.getLogger(__name__)

LOCK_SECONDS_MAX = 5.0
"""Longest wait for a kernel that another process compiles: about the time that the largest kernel takes. A process that
waits computes nothing, and a rank must not be silent for long while it loads (`loading_silent_s`)."""
LOCK_POLL_SECONDS = 0.02

_compiling = Lock()
_has_compiled = Event()


def has_compiled() -> bool:
    """Return whether this process has compiled code that other processes will load from the cache.

    Their code can differ from the code of this process. In a process that compiles a kernel, the functions inside it
    keep code of their own. In a process that loads the kernel, LLVM optimises them again as parts of the kernel, and
    may round bfloat16 at other places.
    """
    return _has_compiled.is_set()


def compile_body(name: str, body: Callable[[Any], None]) -> Any:
    """Compile `body` with Numba, or load its code from the cache.

    One thread at a time does this, because the cache folder is a setting of the whole process. If the code can be
    cached, one process compiles it, and other processes that need it wait for that.

    Args:
        name: a unique name of this variant of the kernel.
        body: a function of the address of 64-bit numbers.
    """
    with _compiling:
        kept_in = cache_folder()
        if kept_in is not None:
            others = config.CACHE_DIR
            # A folder for each kernel: Numba keeps all variants of a function under one index. Two processes that write
            # at the same time would leave an index that points to the other's code.
            config.CACHE_DIR = str(kept_in / name)
            try:
                with _exclusive(kept_in / name):
                    code: Any = cfunc(ARGS, cache=True, **FAST)(body)
                if not code.cache_hits:
                    _has_compiled.set()
                return code
            except Exception as error:  # a full disk or a truncated file: Numba raises all kinds of errors
                log.warning("kernel %s is compiled and not kept in %s: %s", name, kept_in, error)
            finally:
                config.CACHE_DIR = others
        return cfunc(ARGS, **FAST)(body)


@contextmanager
def _exclusive(place: Path) -> Iterator[None]:
    """Hold a lock on a folder among processes; after LOCK_SECONDS_MAX go on without it."""
    place.mkdir(exist_ok=True)
    descriptor = os.open(place, os.O_RDONLY)
    try:
        end = monotonic() + LOCK_SECONDS_MAX
        while _is_locked_elsewhere(descriptor) and monotonic() < end:
            sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # releases the lock, as the death of the process does


def _is_locked_elsewhere(descriptor: int) -> bool:
    """Try to take the lock. Returns: whether another process has it; False also if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@cache
def cache_folder() -> Path | None:
    """Return the folder of cached code; None if nothing can be cached.

    Its name depends on all source files and on the processor: Numba itself checks only the kernel's own file, not the
    files that it imports.
    """
    kind = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    kind.update(llvmlite.binding.get_host_cpu_features().flatten().encode())
    kernels = Path(__file__).parents[2]
    for path in (*sorted((kernels / "cpu").rglob("*.py")), kernels / "contract" / "activation.py"):
        kind.update(path.read_bytes())
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kept_in = home / "orca" / "kernels" / kind.hexdigest()[:16]
        kept_in.mkdir(parents=True, exist_ok=True)
        return kept_in if os.access(kept_in, os.W_OK) else None
    except (OSError, RuntimeError):  # there is no home, or it is read-only
        return None
