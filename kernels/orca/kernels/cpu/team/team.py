"""Kernels for CPUs, written in Numba's Python and run by a team of threads.

A kernel is a function of an array of 64-bit numbers: addresses and sizes. Numba compiles it for the processor at hand
(LLVM; code.py), and it runs on as many threads as PyTorch has: the one that calls, and helpers (threads.py)
as far as they have a processor. Each takes the next of the kernel's tasks off a counter until none is left, so the
result does not depend on how many take part. Where there is but one task none of them is woken.

Calls inside `together` run when its block ends, one behind the other without any Python in between: what a kernel reads
puts Python's own code and data out of the caches, and getting them back took three quarters of the time between two
kernels.

PyTorch's own threads are another team. What it computes on several beside our kernels should be little: both look for
work for a moment before they sleep.
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
from orca.kernels.cpu.team.code import compiled

log = logging.getLogger(__name__)

_CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_WORD_BYTES = 8
_COUNTERS = 2
"""Words ahead of what a call gives."""


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
        self._layout: struct.Struct | None = None  # of the counters and arguments
        self._compiling = Lock()

    def compile(self) -> None:
        with self._compiling:
            if self._compiled is None:
                self._compiled = compiled(self._name, self._body)

    @property
    def address(self) -> int:
        """Of its code."""
        address: int = self._compiled.address
        return address

    def __call__(self, tasks: int, *args: "int | float | Rows") -> None:
        """Run to the end, on as many threads as PyTorch has, or on this one alone where there is one task.

        Args:
            tasks: how many there are; of tensors whose number of rows varies, for the most.
            args: numbers, and addresses of what lives until the kernel has run; a float gives its bits (`real`), and so
                it does in each call.
        """
        block: Block | None = getattr(_open, "block", None)
        varying: tuple[tuple[int, Rows], ...] = ()
        if block is not None and block.varies:
            varying = tuple((_COUNTERS + place, each) for place, each in enumerate(args) if isinstance(each, Rows))
            args = tuple(each.most if isinstance(each, Rows) else each for each in args)
        if self._layout is None:
            self.compile()
            self._layout = struct.Struct("qq" + "".join("d" if isinstance(each, float) else "q" for each in args))
        call = Call(self, self._layout.pack(0, 0, *args), max(min(torch.get_num_threads(), tasks) - 1, 0), varying)
        if block is None:
            Program([call]).run()
        else:
            block.calls.append(call)


class Rows:
    """How many rows some tensors of a recording have: another number in each run, up to as many as there is memory for.

    Such tensors are made by `new_empty`, or said to be such by `vary`. Their recording runs on one thread at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most


class Call(NamedTuple):
    """Of a kernel, not run yet."""

    kernel: Kernel
    arguments: bytes
    helpers: int  # at most
    varying: tuple[tuple[int, Rows], ...]  # the words of the arguments that are numbers of rows


class Program:
    """Calls as `call_team` takes them, to be run any number of times, one after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        sizes = [_apart(len(call.arguments)) for call in calls]
        start = _apart(_WORD_BYTES * (threads.ORDER_WORDS + threads.BODY_WORDS * len(calls)))
        offsets = list(accumulate(sizes, initial=start))[:-1]
        bodies = ((call.kernel.address, offset, call.helpers) for call, offset in zip(calls, offsets, strict=True))
        order = array("q", (0, 0, len(calls), *chain.from_iterable(bodies)))
        arguments = (call.arguments.ljust(size, b"\0") for call, size in zip(calls, sizes, strict=True))
        self._image = b"".join((order.tobytes().ljust(start, b"\0"), *arguments))
        self._helpers = max((call.helpers for call in calls), default=0)
        places: dict[Rows, list[int]] = {}  # words of the image
        for call, offset in zip(calls, offsets, strict=True):
            for word, rows in call.varying:
                places.setdefault(rows, []).append(offset // _WORD_BYTES + word)
        self._varying = [(rows, np.array(words)) for rows, words in places.items()]
        self._idle: list[_Copy] = []

    def run(self) -> None:
        # Kernels count in their arguments, so runs at the same time have memory of their own.
        try:
            copy = self._idle.pop()
        except IndexError:
            copy = _Copy(self._image, self._varying)
        at = copy.made()
        team = _team() if self._helpers > 0 else None
        if team is None or not team.run(at, self._helpers):
            _call_team(0, at)
        self._idle.append(copy)


class _Copy:
    """Of a program's image, for one run at a time."""

    def __init__(self, image: bytes, varying: Sequence[tuple[Rows, NDArray[np.int64]]]) -> None:
        self._image, self._varying = image, varying
        self._memory = ctypes.create_string_buffer(len(image) + threads.APART_BYTES)
        self._at = _apart(ctypes.addressof(self._memory))
        if varying:
            behind = self._at - ctypes.addressof(self._memory)
            self._words = np.frombuffer(self._memory, np.int64, len(image) // _WORD_BYTES, behind)

    def made(self) -> int:
        """Its address, with the numbers of rows as they are now."""
        ctypes.memmove(self._at, self._image, len(self._image))
        for rows, places in self._varying:
            assert 0 <= rows.now <= rows.most
            self._words[places] = rows.now
        return self._at


def _call_team(team: int, order: int) -> None:
    """numba_threads.call_team; without helpers it needs no team. Args: order: address of a program's image."""
    (ctypes.c_int64 * 2).from_address(order)[:] = (team, order)
    _native(threads.call_team)(order)


def compile_launches() -> None:
    """Compile what runs kernels."""
    for body in (threads.call_team, threads.help_team):
        _native(body)


@cache
def _native(body: Callable[[Any], None]) -> "_Native":
    return _Native(body)


class _Native:
    """A function of an address, compiled, to be called from here."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._compiled = compiled(body.__name__, body)
        self._function = _CODE(self._compiled.address)

    def __call__(self, at: int) -> None:
        self._function(at)


class Block:
    """What `together` gathers."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._rows: dict[int, Rows] = {}  # of tensors whose number of rows varies, by id; they live as long as this
        self._given: list[Tensor] = []
        self._memory: dict[tuple[torch.dtype, tuple[int | Rows, ...]], list[Tensor]] = {}

    @property
    def varies(self) -> bool:
        """Whether there are tensors whose number of rows does."""
        return bool(self._rows)

    def vary(self, rows: Rows, tensor: Tensor) -> None:
        assert len(tensor) == rows.most
        self._rows[id(tensor)] = rows
        self._given.append(tensor)

    def rows_of(self, tensor: Tensor) -> int | Rows:
        if not self._rows:
            return tensor.shape[0]
        # In a recording with such tensors it is one: garbage behind its rows must go nowhere.
        assert id(tensor) in self._rows, "a view, or not told to `vary`"
        return self._rows[id(tensor)]

    def empty(self, dtype: torch.dtype, shape: tuple[int | Rows, ...]) -> Tensor:
        """As torch.empty. A tensor that nobody holds any more is given again: who writes into it runs behind those who
        were to use it before."""
        tensors = self._memory.setdefault((dtype, shape), [])
        for tensor in tensors:
            if getrefcount(tensor) == _HELD_HERE:
                return tensor
        made = torch.empty([each.most if isinstance(each, Rows) else each for each in shape], dtype=dtype)
        if isinstance(shape[0], Rows):
            self._rows[id(made)] = shape[0]
        tensors.append(made)
        return tensors[-1]


_HELD_HERE = 3
"""References to a tensor that only `Block.empty` has: its list, its loop and its question. Were it less in a later
Python, no tensor would be given again."""

_open = local()


@contextmanager
def _gathered() -> Iterator[Block]:
    assert getattr(_open, "block", None) is None
    block = _open.block = Block()
    try:
        yield block
    finally:
        _open.block = None


@contextmanager
def deferred() -> Iterator[None]:
    """Kernels that are called inside run when the block ends, unless it is left by an error.

    Nothing but these kernels may touch what they write, and it must come from `new_empty`, not as a view of it. What
    they read from outside lives until the end. While the team is at work for another thread, all run on this one alone.
    """
    with _gathered() as block:
        yield
    if block.calls:
        Program(block.calls).run()


class Recording:
    """Kernels that were called inside `recorded`, and the memory that they were given by `new_empty`."""

    def __init__(self, block: Block) -> None:
        self._block = block  # what the program has by address: memory, and the kernels' code
        self._program: Program | None = None

    def end(self) -> None:
        """Nothing more is called inside."""
        self._program = Program(self._block.calls)

    def run(self) -> None:
        """All of them, in their order. Not before `recorded` has ended."""
        assert self._program is not None
        self._program.run()


@contextmanager
def recorded() -> Iterator[Recording]:
    """As `together`, but what is called inside runs each time that the recording does, and never by itself. What it
    reads from outside lives as long as the recording. Tensors may have as many rows as each run says (`Rows`)."""
    with _gathered() as block:
        recording = Recording(block)
        yield recording
    recording.end()


def vary(rows: Rows, *tensors: Tensor) -> None:
    """In `recorded`, of memory for the most rows that is given from outside: a run has `rows.now` of them."""
    block: Block = _open.block
    for tensor in tensors:
        block.vary(rows, tensor)


def rows_of(tensor: Tensor) -> int | Rows:
    """How many rows a kernel is to go through: all, or as many as a run has."""
    block: Block | None = getattr(_open, "block", None)
    return tensor.shape[0] if block is None else block.rows_of(tensor)


def new_empty(dtype: torch.dtype, *shape: int | Rows) -> Tensor:
    """As torch.empty, for what only kernels touch as long as they are not run (`together`).

    Args:
        shape: its first number may be one that varies from run to run; there is memory for the most then.
    """
    block: Block | None = getattr(_open, "block", None)
    if block is not None:
        return block.empty(dtype, shape)
    return torch.empty(cast("tuple[int, ...]", shape), dtype=dtype)


class Team:
    """Threads that help the one that calls kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Args: library: C's."""
        self._library = library
        self._memory = ctypes.create_string_buffer(threads.TEAM_BYTES + threads.APART_BYTES)
        self._at = _apart(ctypes.addressof(self._memory))
        self._put(threads.SYSCALL, _address(library.syscall))
        self._put(threads.YIELD, _address(library.sched_yield))
        self._help = _native(threads.help_team)
        self._is_free = Lock()
        self._helpers: list[Thread] = []
        atexit.register(self.end)

    def run(self, order: int, helpers: int) -> bool:
        """Kernels one after the other, on this thread and on helpers.

        Args:
            order: address of a program's image.
            helpers: the most that any of its kernels may have.
        Returns: False if the team is at work already, for another thread; nothing was run then.
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


def _apart(bytes_: int) -> int:
    """An address or a size, up to the next whole number of lines that lie apart."""
    return -(-bytes_ // threads.APART_BYTES) * threads.APART_BYTES


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
