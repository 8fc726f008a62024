"""Kernels for CPUs, written in Numba's Python and run by a team of threads.

A kernel is a function of an array of 64-bit numbers: addresses and sizes. Numba compiles it for this processor (LLVM;
code.py). It runs on as many threads as PyTorch has: the calling thread, and helpers (threads.py) as far as processors
are free for them. Each thread takes the kernel's next task from a counter until none is left, so the result does not
depend on the number of threads. If there is only one task, no helper is woken.

Calls inside `deferred` run when its block ends, one after the other without Python in between. The data that a kernel
reads evicts Python's own code and data from the caches. Reloading them took three quarters of the time between two
kernels.

PyTorch's own threads are another team. PyTorch should compute little on several threads beside these kernels: the
threads of both teams spin for a moment before they sleep.
"""

import atexit
import ctypes
import logging
import os
import signal
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, chain
from sys import getrefcount
from threading import Lock, Thread, local
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.cpu.team import threads as threads
from orca.kernels.cpu.team.code import compile_body

log = logging.getLogger(__name__)

_CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_WORD_BYTES = 8
_COUNTERS = 2
"""Number of 64-bit words before the arguments of a call."""


class Kernel:
    """A kernel, compiled at its first call or by `compile`.

    Args:
        name: a unique name of this variant of the kernel.
        body: (args) -> None. args[0] and args[1] are the counters of `next_task` and `thread_number`; args[2:] are the
            arguments of the call.
    """

    def __init__(self, name: str, body: Callable[[Any], None]) -> None:
        self._name = name
        self._body = body
        self._compiled: Any = None
        self._layout: struct.Struct | None = None  # of the counters and arguments
        self._compiling = Lock()

    def compile(self) -> None:
        with self._compiling:
            if self._compiled is None:
                self._compiled = compile_body(self._name, self._body)

    @property
    def address(self) -> int:
        """Address of the compiled code."""
        address: int = self._compiled.address
        return address

    def __call__(self, tasks: int, *args: "int | float | RowCount") -> None:
        """Run the kernel to the end, on as many threads as PyTorch has, or on this thread alone if there is one task.

        Args:
            tasks: number of tasks; if the number of rows varies, that for the most rows.
            args: numbers, and addresses of memory that lives until the kernel has run. A float is passed by its bits
                (`float_argument`); the same argument must be a float in each call.
        """
        block: CallBlock | None = getattr(_thread_state, "block", None)
        varying: tuple[tuple[int, RowCount], ...] = ()
        if block is not None and block.has_varying_rows:
            varying = tuple(
                (_COUNTERS + place, argument) for place, argument in enumerate(args) if isinstance(argument, RowCount)
            )
            args = tuple(argument.maximum if isinstance(argument, RowCount) else argument for argument in args)
        if self._layout is None:
            self.compile()
            self._layout = struct.Struct(
                "qq" + "".join("d" if isinstance(argument, float) else "q" for argument in args)
            )
        call = KernelCall(
            self, self._layout.pack(0, 0, *args), max(min(torch.get_num_threads(), tasks) - 1, 0), varying
        )
        if block is None:
            CallProgram([call]).run()
        else:
            block.calls.append(call)


class RowCount:
    """The number of rows of some tensors in a recording: each run may set `current`, up to `maximum`.

    `new_empty` makes such tensors, and `bind_rows` registers tensors from outside. Only one thread at a time may run
    the recording.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = self.current = maximum


class KernelCall(NamedTuple):
    """A kernel call that has not run yet."""

    kernel: Kernel
    arguments: bytes
    helpers: int  # most helpers that may take part
    varying: tuple[tuple[int, RowCount], ...]  # indices of argument words that are numbers of rows


class CallProgram:
    """Calls in the memory format of `call_team`. They run one after the other, any number of times."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        sizes = [_align(len(call.arguments)) for call in calls]
        start = _align(_WORD_BYTES * (threads.ORDER_WORDS + threads.BODY_WORDS * len(calls)))
        offsets = list(accumulate(sizes, initial=start))[:-1]
        bodies = ((call.kernel.address, offset, call.helpers) for call, offset in zip(calls, offsets, strict=True))
        order = array("q", (0, 0, len(calls), *chain.from_iterable(bodies)))
        arguments = (call.arguments.ljust(size, b"\0") for call, size in zip(calls, sizes, strict=True))
        self._image = b"".join((order.tobytes().ljust(start, b"\0"), *arguments))
        self._helpers = max((call.helpers for call in calls), default=0)
        places: dict[RowCount, list[int]] = {}  # indices of words in the image
        for call, offset in zip(calls, offsets, strict=True):
            for word, rows in call.varying:
                places.setdefault(rows, []).append(offset // _WORD_BYTES + word)
        self._varying = [(rows, np.array(words)) for rows, words in places.items()]
        self._idle: list[_ProgramCopy] = []

    def run(self) -> None:
        # Kernels count inside their arguments, so each concurrent run needs memory of its own.
        try:
            copy = self._idle.pop()
        except IndexError:
            copy = _ProgramCopy(self._image, self._varying)
        at = copy.refresh()
        team = _team() if self._helpers > 0 else None
        if team is None or not team.run(at, self._helpers):
            _call_team(0, at)
        self._idle.append(copy)


class _ProgramCopy:
    """A copy of a program's image, for one run at a time."""

    def __init__(self, image: bytes, varying: Sequence[tuple[RowCount, NDArray[np.int64]]]) -> None:
        self._image, self._varying = image, varying
        self._memory = ctypes.create_string_buffer(len(image) + threads.ALIGNMENT_BYTES)
        self._at = _align(ctypes.addressof(self._memory))
        if varying:
            behind = self._at - ctypes.addressof(self._memory)
            self._words = np.frombuffer(self._memory, np.int64, len(image) // _WORD_BYTES, behind)

    def refresh(self) -> int:
        """Write the image with the current numbers of rows. Returns: its address."""
        ctypes.memmove(self._at, self._image, len(self._image))
        for rows, places in self._varying:
            assert 0 <= rows.current <= rows.maximum
            self._words[places] = rows.current
        return self._at


def _call_team(team: int, order: int) -> None:
    """Call threads.call_team. Args: team: address of the team, 0 without helpers; order: address of an image."""
    (ctypes.c_int64 * 2).from_address(order)[:] = (team, order)
    _native(threads.call_team)(order)


def compile_launches() -> None:
    """Compile the functions that run kernels."""
    for body in (threads.call_team, threads.help_team):
        _native(body)


@cache
def _native(body: Callable[[Any], None]) -> "_Native":
    return _Native(body)


class _Native:
    """A compiled function of an address, callable from Python."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._compiled = compile_body(body.__name__, body)
        self._function = _CODE(self._compiled.address)

    def __call__(self, at: int) -> None:
        self._function(at)


class CallBlock:
    """The calls and the memory of a `deferred` or `record_calls` block."""

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []
        self._rows: dict[int, RowCount] = {}  # by id of tensors with a varying number of rows, which live as long
        self._bound: list[Tensor] = []
        self._memory: dict[tuple[torch.dtype, tuple[int | RowCount, ...]], list[Tensor]] = {}

    @property
    def has_varying_rows(self) -> bool:
        """True if there are tensors with a varying number of rows."""
        return bool(self._rows)

    def bind_rows(self, rows: RowCount, tensor: Tensor) -> None:
        assert len(tensor) == rows.maximum
        self._rows[id(tensor)] = rows
        self._bound.append(tensor)

    def row_count(self, tensor: Tensor) -> int | RowCount:
        if not self._rows:
            return tensor.shape[0]
        # In such a recording each tensor must vary: garbage after its current rows must not be used.
        assert id(tensor) in self._rows, "a view, or not passed to `bind_rows`"
        return self._rows[id(tensor)]

    def empty(self, dtype: torch.dtype, shape: tuple[int | RowCount, ...]) -> Tensor:
        """Return memory as torch.empty does, or a tensor that nobody references any more.

        Reuse is safe: the kernel that writes into the tensor runs after all earlier users of it.
        """
        tensors = self._memory.setdefault((dtype, shape), [])
        for tensor in tensors:
            if getrefcount(tensor) == _OWN_REFERENCES:
                return tensor
        made = torch.empty([size.maximum if isinstance(size, RowCount) else size for size in shape], dtype=dtype)
        if isinstance(shape[0], RowCount):
            self._rows[id(made)] = shape[0]
        tensors.append(made)
        return tensors[-1]


_OWN_REFERENCES = 3
"""References of `CallBlock.empty` to a tensor: its list, its loop variable and the argument of getrefcount. If a later
Python counts fewer, no tensor is reused."""

_thread_state = local()


@contextmanager
def _collect_calls() -> Iterator[CallBlock]:
    assert getattr(_thread_state, "block", None) is None
    block = _thread_state.block = CallBlock()
    try:
        yield block
    finally:
        _thread_state.block = None


@contextmanager
def deferred() -> Iterator[None]:
    """Run the kernels that are called inside when the block ends, unless an exception leaves it.

    Only these kernels may touch the memory that they write, and it must come from `new_empty`, not be a view. Memory
    that they read from outside must live until the end. While the team works for another thread, all of them run on
    this thread alone.
    """
    with _collect_calls() as block:
        yield
    if block.calls:
        CallProgram(block.calls).run()


class KernelRecording:
    """The kernel calls of a `record_calls` block, and their memory from `new_empty`."""

    def __init__(self, block: CallBlock) -> None:
        self._block = block  # keeps alive the memory and code that the program uses by address
        self._program: CallProgram | None = None

    def end(self) -> None:
        """Finish the recording: no more calls will follow."""
        self._program = CallProgram(self._block.calls)

    def run(self) -> None:
        """Run all calls in order. Only after the `record_calls` block has ended."""
        assert self._program is not None
        self._program.run()


@contextmanager
def record_calls() -> Iterator[KernelRecording]:
    """Record the kernels that are called inside. They run only when the recording runs, any number of times.

    The rules of `deferred` apply; memory that is read from outside must live as long as the recording. The number of
    rows of tensors may vary from run to run (`RowCount`).
    """
    with _collect_calls() as block:
        recording = KernelRecording(block)
        yield recording
    recording.end()


def bind_rows(rows: RowCount, *tensors: Tensor) -> None:
    """Inside `record_calls`, register tensors from outside that have `rows.current` rows in a run.

    Args: tensors: memory for `rows.maximum` rows.
    """
    block: CallBlock = _thread_state.block
    for tensor in tensors:
        block.bind_rows(rows, tensor)


def row_count(tensor: Tensor) -> int | RowCount:
    """Return the number of rows that a kernel must process: that of the tensor, or the varying one."""
    block: CallBlock | None = getattr(_thread_state, "block", None)
    return tensor.shape[0] if block is None else block.row_count(tensor)


def new_empty(dtype: torch.dtype, *shape: int | RowCount) -> Tensor:
    """Return memory as torch.empty does, for tensors that only kernels touch until they have run (`deferred`).

    Args:
        shape: the first number may be a RowCount; the tensor then has memory for its maximum.
    """
    block: CallBlock | None = getattr(_thread_state, "block", None)
    if block is not None:
        return block.empty(dtype, shape)
    return torch.empty(cast("tuple[int, ...]", shape), dtype=dtype)


class Team:
    """Threads that help the thread that calls kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Args: library: the C library."""
        self._library = library
        self._memory = ctypes.create_string_buffer(threads.TEAM_BYTES + threads.ALIGNMENT_BYTES)
        self._at = _align(ctypes.addressof(self._memory))
        self._put(threads.SYSCALL, _address(library.syscall))
        self._put(threads.YIELD, _address(library.sched_yield))
        self._help = _native(threads.help_team)
        self._is_free = Lock()
        self._helpers: list[Thread] = []
        atexit.register(self.end)

    def run(self, order: int, helpers: int) -> bool:
        """Run kernels one after the other, on this thread and on helpers.

        Args:
            order: address of a program's image.
            helpers: largest number of helpers of any of its kernels.
        Returns: False if the team already works for another thread; then nothing has run.
        """
        if not self._is_free.acquire(blocking=False):
            return False
        try:
            while len(self._helpers) < helpers:
                self._grow()
            _call_team(self._at, order)
        finally:
            self._is_free.release()
        return True

    def end(self) -> None:
        """End the helper threads: the code that they run is freed with the interpreter."""
        self._put(threads.IS_OVER, 1)
        self._put(threads.CALLS, 1 + self._get(threads.CALLS))
        self._library.syscall(threads.FUTEX, ctypes.c_void_p(self._at + threads.CALLS), threads.FUTEX_WAKE, 1 << 30)
        for helper in self._helpers:
            helper.join()

    def _grow(self) -> None:
        name = f"kernels-{1 + len(self._helpers)}"
        helper = Thread(target=self._run_helper, args=(self._get(threads.STATE),), name=name, daemon=True)
        self._helpers.append(helper)
        helper.start()

    def _run_helper(self, state: int) -> None:
        # Signals are for the main thread. If another thread gets one, Python wakes the main thread for nothing.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        order = (ctypes.c_int64 * 2)(self._at, state)
        self._help(ctypes.addressof(order))

    def _put(self, at: int, number: int) -> None:
        ctypes.c_int64.from_address(self._at + at).value = number

    def _get(self, at: int) -> int:
        return ctypes.c_int64.from_address(self._at + at).value


def _align(bytes_: int) -> int:
    """Round an address or size up to a multiple of ALIGNMENT_BYTES."""
    return -(-bytes_ // threads.ALIGNMENT_BYTES) * threads.ALIGNMENT_BYTES


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@cache
def _team() -> Team | None:
    """Return the team of this process; None on systems without a known futex system call."""
    if not threads.FUTEX:
        log.warning("kernels run on one thread: Orca knows no futex system call for this system")
        return None
    return Team(ctypes.CDLL(None))


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_team.cache_clear)
