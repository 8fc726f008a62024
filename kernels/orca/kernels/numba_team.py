"""Kernels for CPUs, written in Numba's Python and run by PyTorch's own threads.

A kernel is a function of an array of 64-bit numbers: addresses and sizes. Numba compiles it for the processor at hand
(LLVM; kept on disk for the next process, where a folder may be written), and it runs as one OpenMP parallel region of
the very library that PyTorch computes with: those threads are there already, and no second team contends with them.
Every thread takes the next of the kernel's tasks off a counter until none is left, so the result does not depend on how
many take part. A single task wakes none of them.
"""

import ctypes
import hashlib
import logging
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding
import numba
import torch
from numba import cfunc, config

from orca.kernels.numba_intrinsics import ARGS, FAST

log = logging.getLogger(__name__)


class Kernel:
    """A kernel, compiled at its first call or by `compile`.

    Args:
        name: its own, also among its variants.
        body: (args) -> None. args[0] and args[1] are the counters of `take` and `join`, args[2:] what the call gives.
    """

    def __init__(self, name: str, body: Callable[[Any], None]) -> None:
        self._name = name
        self._body = body
        self._compiled: Any = None
        self._alone: Any = None  # the same, for one thread to call
        self._layout: struct.Struct | None = None  # of the counters and arguments

    def compile(self) -> None:
        with _compiling:
            if self._compiled is None:
                self._compiled = _compiled(self._name, self._body)
                self._alone = _ALONE(self._compiled.address)

    def __call__(self, tasks: int, *args: int | float) -> None:
        """Run to the end, on all threads that PyTorch has, or on this one alone where there is one task.

        Args:
            args: numbers, and addresses of what lives until the call returns; a float gives its bits (`real`), and so
                it does in each call.
        """
        if self._layout is None:
            self.compile()
            self._layout = struct.Struct("qq" + "".join("d" if isinstance(each, float) else "q" for each in args))
        packed = self._layout.pack(0, 0, *args)
        # The kernel counts in its first numbers, so each call has a copy of its own.
        own = ctypes.create_string_buffer(packed, len(packed))
        threads = torch.get_num_threads()
        if tasks < 2 or threads < 2 or _PARALLEL is None:
            self._alone(ctypes.addressof(own))
        else:
            # Never some of them: GNU's OpenMP ends those that a smaller team leaves out, and starts others for the next
            # larger one.
            _PARALLEL(self._compiled.address, ctypes.addressof(own), threads, 0)


_ALONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_compiling = Lock()


def _compiled(name: str, body: Callable[[Any], None]) -> Any:
    """By one thread at a time, for where Numba keeps what it compiles is a setting of the whole process."""
    kept_in = folder()
    if kept_in is not None:
        others = config.CACHE_DIR
        # A folder for each: Numba keeps all variants of a function under one index, which two processes that write
        # at a time would leave pointing to each other's code.
        config.CACHE_DIR = str(kept_in / name)
        try:
            return cfunc(ARGS, cache=True, **FAST)(body)
        except Exception as error:  # a full disk, a file cut short: Numba raises what it meets
            log.warning("kernel %s is compiled and not kept in %s: %s", name, kept_in, error)
        finally:
            config.CACHE_DIR = others
    return cfunc(ARGS, **FAST)(body)


@cache
def folder() -> Path | None:
    """Where compiled kernels are kept, by all that they are compiled from and for: Numba itself looks at the kernel's
    own file, not at those that it imports. None where nothing can be kept."""
    kind = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    kind.update(llvmlite.binding.get_host_cpu_features().flatten().encode())
    for path in sorted(Path(__file__).parent.glob("numba_*.py")):
        kind.update(path.read_bytes())
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kept_in = home / "orca" / "kernels" / kind.hexdigest()[:16]
        kept_in.mkdir(parents=True, exist_ok=True)
        return kept_in if os.access(kept_in, os.W_OK) else None
    except (OSError, RuntimeError):  # no home, or one that only can be read
        return None


def _parallel() -> Any:
    """GOMP_parallel(function, its argument, threads, flags) of the OpenMP library that PyTorch is linked with."""
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError) as error:
        log.warning("PyTorch's OpenMP is not to be found, so kernels run on one thread: %s", error)
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_PARALLEL = _parallel()
