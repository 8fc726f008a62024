"""What the threads of a team (team.py) do: one calls, the others help.

The memory of a team is some numbers, each in cache lines of its own. The first one, `STATE`, is the whole protocol:

    number of the call (32 bits) | places that helpers may still take (16) | helpers inside (16)

A call writes what is to be run, then the state with a new number and its places, and goes to work itself. A helper that
sees a number it has not helped with takes a place and is inside by one exchange; none can once the caller, out of work,
has taken the places away. So the caller waits for those inside and never for one that the kernel of the operating
system has not let run: on a busy machine a call is done by the threads that there are at the moment.

Behind each call a helper lets others have its processor (sched_yield). Who waits for it, on a busy machine, gets it
there rather than in the middle of a task, of which the caller would have to await the end: with 63 M parameters and a
batch of 16 on two processors shared with gateway, scheduler and Redis (Linux 6.18) that waiting was 7.7 % of the
caller's time and is 3.1 %, and `orca up` writes 1.045 times as many tokens. Alone the engine is as fast (0.997).

A helper looks for the next call for as long as the gap between two calls of a step is, then it sleeps, and a call that
finds sleepers wakes as many as it has places for.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.cpu.team.intrinsics import FAST, LINE_BYTES

_LONG, _WORD = ir.IntType(64), ir.IntType(32)

APART_BYTES = 2 * LINE_BYTES
"""Processors fetch cache lines as pairs."""

# The memory of a team: these numbers, in bytes from its address.
STATE, BODY, ARGUMENTS, SLEEPERS, CALLS, IS_OVER, SYSCALL, YIELD = range(0, 8 * APART_BYTES, APART_BYTES)
TEAM_BYTES = 8 * APART_BYTES

# Parts of the state.
_NUMBER, _NUMBERS = 1 << 32, -1 << 32
_PLACE, _PLACES = 1 << 16, 0xFFFF << 16
_INSIDE = 0xFFFF

_LOOKS = 4000
"""Before a helper sleeps: 60 to 200 microseconds, by processor."""
_WAITS = 2000
"""Before a caller that waits for those inside lets others have its processor between two looks."""

FUTEX_WAIT, FUTEX_WAKE = 128, 129  # of threads of one process
FUTEX = {"Linux x86_64": 202, "Linux aarch64": 98}.get(f"{platform.system()} {platform.machine()}", 0)
"""The number of the system call; 0 where we do not know it."""


ORDER_WORDS, BODY_WORDS = 3, 3
"""What `call_team` takes, in words of 64 bits: ahead of the bodies, and of each of them."""


def call_team(args: Any) -> None:
    """Run bodies one after the other, each on this thread and on those that help.

    args: address of the team, or 0 where nobody helps; that of args; number of bodies; of each its address, where its
        arguments are behind args, in bytes, and places.
    """
    for number in range(args[2]):
        at = ORDER_WORDS + BODY_WORDS * number
        _share(args[0], args[at], args[1] + args[at + 1], args[at + 2])


@njit(**FAST)  # type: ignore[untyped-decorator]
def _share(team: Any, body: Any, arguments: Any, places: Any) -> None:
    """Run one body."""
    if team == 0 or places == 0:
        _run(body, arguments)
        return
    _set(team + BODY, body)
    _set(team + ARGUMENTS, arguments)
    _set(team + STATE, (_get(team + STATE) & _NUMBERS) + _NUMBER + places * _PLACE)
    if _get(team + SLEEPERS) > 0:
        _add(team + CALLS, 1)
        _futex(_get(team + SYSCALL), team + CALLS, FUTEX_WAKE, places)
    _run(body, arguments)
    _mask(team + STATE, ~_PLACES)
    looks = 0
    while _get(team + STATE) & _INSIDE != 0:
        looks += 1
        if looks < _WAITS:
            _pause()
        else:
            _call(_get(team + YIELD))


def help_team(args: Any) -> None:
    """Help with all calls until the team is over.

    args: address of the team, its state before the first of them.
    """
    team, helped, looks = args[0], args[1] & _NUMBERS, 0
    while _get(team + IS_OVER) == 0:
        state = _get(team + STATE)
        if state & _NUMBERS != helped and state & _PLACES != 0:
            if _exchange(team + STATE, state, state - _PLACE + 1):
                helped, looks = state & _NUMBERS, 0
                _run(_get(team + BODY), _get(team + ARGUMENTS))
                _add(team + STATE, -1)
                _call(_get(team + YIELD))
        elif looks < _LOOKS:
            looks += 1
            _pause()
        else:
            _sleep(team, state)
            looks = 0


@njit(**FAST)  # type: ignore[untyped-decorator]
def _sleep(team: Any, state: Any) -> None:
    """Until a call comes, unless one has come since `state` was seen."""
    calls = _get(team + CALLS)
    _add(team + SLEEPERS, 1)
    if (_get(team + STATE) ^ state) & _NUMBERS == 0 and _get(team + IS_OVER) == 0:
        _futex(_get(team + SYSCALL), team + CALLS, FUTEX_WAIT, calls)
    _add(team + SLEEPERS, -1)


# What follows takes addresses; all of it is in one order that every thread sees.


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _LONG.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def _get(_typing: Any, at: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(builder, values[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _set(_typing: Any, at: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], _pointer(builder, values[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _changed(operation: str) -> Any:
    def change(_typing: Any, at: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            builder.atomic_rmw(operation, _pointer(builder, values[0]), values[1], "seq_cst")
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(change)


_add, _mask = _changed("add"), _changed("and")


@intrinsic  # type: ignore[untyped-decorator]
def _exchange(_typing: Any, at: Any, expected: Any, number: Any) -> Any:
    """Whether the expected number was there, and the other is now."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, expected, number = values
        found = builder.cmpxchg(_pointer(builder, at), expected, number, "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [_WORD(1)])}


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_typing: Any) -> Any:
    """Tell the processor that this thread only waits."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        name, arguments = _PAUSE.get(platform.machine(), ("llvm.donothing", []))
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _run(_typing: Any, body: Any, arguments: Any) -> Any:
    """A kernel, by the addresses of its code and of its arguments."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer()])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [_pointer(builder, values[1])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(_typing: Any, function: Any) -> Any:
    """A function of the C library that takes nothing."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_WORD, [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _futex(_typing: Any, syscall: Any, at: Any, operation: Any, number: Any) -> Any:
    """Sleep while the lower half of what is there is `number`, or wake so many; see futex(2)."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_LONG, [_LONG] * 7)
        function = builder.inttoptr(values[0], kind.as_pointer())
        nothing = _LONG(0)
        builder.call(function, [_LONG(FUTEX), values[1], values[2], values[3], nothing, nothing, nothing])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate
