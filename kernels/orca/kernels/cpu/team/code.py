"""Compiles functions of numbers and addresses for the processor at hand, and keeps the code for the next process."""

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

TURN_SECONDS_MAX = 5.0
"""So long a kernel that another process compiles is waited for, about what the largest one takes. Who waits computes
nothing, and a rank must not stand still for long while it loads (`loading_silent_s`)."""
TURN_LOOK_SECONDS = 0.02

_compiling = Lock()
_has_compiled = Event()


def has_compiled() -> bool:
    """Whether this process has compiled code that others will find kept.

    They run other code than it does. Where a kernel is compiled, the functions inside it come from code of their own;
    where it is found kept, LLVM optimises them once more as parts of their kernel, and bfloat16 may be rounded at other
    places.
    """
    return _has_compiled.is_set()


def compiled(name: str, body: Callable[[Any], None]) -> Any:
    """Numba's code of `body`, by one thread at a time: where it is kept is a setting of the whole process. Where it can
    be kept, one process compiles it, and others that want it meanwhile wait for that.

    Args:
        name: its own, also among its variants.
        body: takes the address of 64-bit numbers.
    """
    with _compiling:
        kept_in = cache_folder()
        if kept_in is not None:
            others = config.CACHE_DIR
            # A folder for each: Numba keeps all variants of a function under one index, which two processes that write
            # at a time would leave pointing to each other's code.
            config.CACHE_DIR = str(kept_in / name)
            try:
                with _turn(kept_in / name):
                    code: Any = cfunc(ARGS, cache=True, **FAST)(body)
                if not code.cache_hits:
                    _has_compiled.set()
                return code
            except Exception as error:  # a full disk, a file cut short: Numba raises what it meets
                log.warning("kernel %s is compiled and not kept in %s: %s", name, kept_in, error)
            finally:
                config.CACHE_DIR = others
        return cfunc(ARGS, **FAST)(body)


@contextmanager
def _turn(place: Path) -> Iterator[None]:
    """Alone with this folder among processes, or beside one that has hung for TURN_SECONDS_MAX."""
    place.mkdir(exist_ok=True)
    held = os.open(place, os.O_RDONLY)
    try:
        end = monotonic() + TURN_SECONDS_MAX
        while _is_taken(held) and monotonic() < end:
            sleep(TURN_LOOK_SECONDS)
        yield
    finally:
        os.close(held)  # and with it the lock, as when the process dies


def _is_taken(held: int) -> bool:
    """Whether another process has the lock. If not, this one has it now, where the file system knows locks."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@cache
def cache_folder() -> Path | None:
    """Where code is kept, by all that it is compiled from and for: Numba itself looks at the kernel's own file, not at
    those that it imports. None where nothing can be kept."""
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
    except (OSError, RuntimeError):  # no home, or one that only can be read
        return None
