"""Kernels for CPUs, written in Numba's Python and run by a team of threads.

A kernel is a function of an array of 64-bit numbers: addresses and sizes. Numba compiles it for the processor at hand
(LLVM; numba_code.py), and it runs on as many threads as PyTorch has: the one that calls, and helpers (numba_threads.py)
as far as they have a processor. Each takes the next of the kernel's tasks off a counter until none is left, so the
result does not depend on how many take part. A single task wakes none of them.

PyTorch's own threads are another team. What it computes on several beside our kernels should be little: both look for
work for a moment before they sleep.
"""

import atexit
import ctypes
import logging
import os
import signal
import struct
from collections.abc import Callable
from functools import cache
from threading import Lock, Thread
from typing import Any

import torch

from orca.kernels import numba_threads as threads
from orca.kernels.numba_code import compiled

log = logging.getLogger(__name__)

_CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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
        self._compiling = Lock()

    def compile(self) -> None:
        with self._compiling:
            if self._compiled is None:
                self._compiled = compiled(self._name, self._body)
                self._alone = _CODE(self._compiled.address)

    def __call__(self, tasks: int, *args: int | float) -> None:
        """Run to the end, on as many threads as PyTorch has, or on this one alone where there is one task.

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
        helpers = min(torch.get_num_threads(), tasks) - 1
        team = _team() if helpers > 0 else None
        if team is None or not team.run(self._compiled.address, ctypes.addressof(own), helpers):
            self._alone(ctypes.addressof(own))


class Team:
    """Threads that help the one that calls a kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Args: library: C's."""
        self._library = library
        self._memory = ctypes.create_string_buffer(threads.TEAM_BYTES + threads.LINE_BYTES)
        self._at = -(-ctypes.addressof(self._memory) // threads.LINE_BYTES) * threads.LINE_BYTES
        self._put(threads.SYSCALL, _address(library.syscall))
        self._put(threads.YIELD, _address(library.sched_yield))
        self._call_code, self._help_code = (
            compiled(body.__name__, body) for body in (threads.call_team, threads.help_team)
        )
        self._call, self._help = _CODE(self._call_code.address), _CODE(self._help_code.address)
        self._order = (ctypes.c_int64 * 4)(self._at)
        self._order_at = ctypes.addressof(self._order)
        self._is_free = Lock()
        self._helpers: list[Thread] = []
        atexit.register(self.end)

    def run(self, body: int, arguments: int, helpers: int) -> bool:
        """A kernel's code on this thread and on so many helpers at most. Returns: False if the team is at work already,
        for another thread; nothing was run then."""
        if not self._is_free.acquire(blocking=False):
            return False
        try:
            while len(self._helpers) < helpers:
                self._grow()
            self._order[1:] = body, arguments, helpers
            self._call(self._order_at)
        finally:
            self._is_free.release()
        return True

    def end(self) -> None:
        """End the helpers: the code that they run goes with the interpreter."""
        self._put(threads.IS_OVER, 1)
        self._put(threads.CALLS, 1 + self._get(threads.CALLS))
        self._library.syscall(threads.FUTEX, ctypes.c_void_p(self._at + threads.CALLS), threads.FUTEX_WAKE, 1 << 30)
        for helper in self._helpers:
            helper.join()

    def _grow(self) -> None:
        name = f"kernels-{1 + len(self._helpers)}"
        helper = Thread(target=self._attend, args=(self._get(threads.STATE),), name=name, daemon=True)
        self._helpers.append(helper)
        helper.start()

    def _attend(self, state: int) -> None:
        # They are for the main thread, which Python wakes for them in vain when another one gets them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        order = (ctypes.c_int64 * 2)(self._at, state)
        self._help(ctypes.addressof(order))

    def _put(self, at: int, number: int) -> None:
        ctypes.c_int64.from_address(self._at + at).value = number

    def _get(self, at: int) -> int:
        return ctypes.c_int64.from_address(self._at + at).value


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@cache
def _team() -> Team | None:
    """That of this process; None where threads could not wait for each other."""
    if not threads.FUTEX:
        log.warning("kernels run on one thread: how threads wait for each other is not known on this system")
        return None
    return Team(ctypes.CDLL(None))


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_team.cache_clear)
