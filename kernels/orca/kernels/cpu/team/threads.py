"""The protocol of a team's threads (team.py): one thread calls, the others help.

The memory of a team is a few numbers, each in cache lines of its own. The first one, `STATE`, is the whole protocol:

    number of the call (32 bits) | places that helpers may still take (16) | helpers inside (16)

The caller writes the function and its arguments, then the state with a new number and its places, and works itself. A
helper that sees a number that it has not helped with takes a place and is inside, by one compare-and-exchange. When the
caller runs out of tasks, it takes the remaining places away, so no helper can enter any more. So the caller waits only
for helpers inside, never for a thread that the operating system does not run. On a busy machine, the threads that run
at the moment do the work of a call.

After each call a helper yields its processor (sched_yield). On a busy machine, a process that waits for the processor
then gets it between two calls. Otherwise it would get it in the middle of a task whose end the caller must await. This
was measured with 63 M parameters and a batch of 16, on two processors shared with gateway, scheduler and Redis (Linux
6.18). The waiting took 7.7 % of the caller's time and now takes 3.1 %, and `orca up` generates 1.045 times as many
tokens. The engine alone is as fast as before (0.997).

A helper spins for about as long as the gap between two calls of a step, then it sleeps. A call that finds sleeping
helpers wakes as many as it has places.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.cpu.team.intrinsics import FAST, LINE_BYTES

_LONG, _WORD = ir.IntType(64), ir.IntType(32)

ALIGNMENT_BYTES = 2 * LINE_BYTES
"""Processors fetch cache lines as pairs."""

# The memory of a team: offsets of its numbers in bytes.
STATE, BODY, ARGUMENTS, SLEEPERS, CALLS, IS_OVER, SYSCALL, YIELD = range(0, 8 * ALIGNMENT_BYTES, ALIGNMENT_BYTES)
TEAM_BYTES = 8 * ALIGNMENT_BYTES

# Parts of the state.
_NUMBER, _NUMBERS = 1 << 32, -1 << 32
_PLACE, _PLACES = 1 << 16, 0xFFFF << 16
_INSIDE = 0xFFFF

_SPINS_BEFORE_SLEEP = 4000
"""Spins before a helper sleeps: 60 to 200 microseconds, depending on the processor."""
_SPINS_BEFORE_YIELD = 2000
"""Spins before a caller that waits for helpers yields its processor between two reads."""

FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private to one process
FUTEX = {"Linux x86_64": 202, "Linux aarch64": 98}.get(f"{platform.system()} {platform.machine()}", 0)
"""Number of the system call; 0 if it is not known for this system."""


ORDER_WORDS, BODY_WORDS = 3, 3
"""Sizes of the argument of `call_team` in 64-bit words: its head, and each body after that."""


def call_team(args: Any) -> None:
    """Run bodies one after the other, each on this thread and on helpers.

    args: address of the team, or 0 without helpers; address of args; number of bodies; then for each body its address,
        the offset of its arguments from args in bytes, and its places.
    """
    for number in range(args[2]):
        at = ORDER_WORDS + BODY_WORDS * number
        _run_with_helpers(args[0], args[at], args[1] + args[at + 1], args[at + 2])


@njit(**FAST)  # type: ignore[untyped-decorator]
def _run_with_helpers(team: Any, body: Any, arguments: Any, places: Any) -> None:
    """Run one body, with helpers if there are places for them."""
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
    spins = 0
    while _get(team + STATE) & _INSIDE != 0:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            _pause()
        else:
            _call(_get(team + YIELD))


def help_team(args: Any) -> None:
    """Help with all calls until the team ends.

    args: address of the team; its state before the first call.
    """
    team, helped, spins = args[0], args[1] & _NUMBERS, 0
    while _get(team + IS_OVER) == 0:
        state = _get(team + STATE)
        if state & _NUMBERS != helped and state & _PLACES != 0:
            if _exchange(team + STATE, state, state - _PLACE + 1):
                helped, spins = state & _NUMBERS, 0
                _run(_get(team + BODY), _get(team + ARGUMENTS))
                _add(team + STATE, -1)
                _call(_get(team + YIELD))
        elif spins < _SPINS_BEFORE_SLEEP:
            spins += 1
            _pause()
        else:
            _sleep(team, state)
            spins = 0


@njit(**FAST)  # type: ignore[untyped-decorator]
def _sleep(team: Any, state: Any) -> None:
    """Sleep until a call comes, unless one has come since `state` was read."""
    calls = _get(team + CALLS)
    _add(team + SLEEPERS, 1)
    if (_get(team + STATE) ^ state) & _NUMBERS == 0 and _get(team + IS_OVER) == 0:
        _futex(_get(team + SYSCALL), team + CALLS, FUTEX_WAIT, calls)
    _add(team + SLEEPERS, -1)


# The following functions take addresses. All are sequentially consistent.


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


def _atomic(operation: str) -> Any:
    def change(_typing: Any, at: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            builder.atomic_rmw(operation, _pointer(builder, values[0]), values[1], "seq_cst")
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(change)


_add, _mask = _atomic("add"), _atomic("and")


@intrinsic  # type: ignore[untyped-decorator]
def _exchange(_typing: Any, at: Any, expected: Any, number: Any) -> Any:
    """Replace the expected number by another one atomically. Returns: whether the expected number was there."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, expected, number = values
        found = builder.cmpxchg(_pointer(builder, at), expected, number, "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [_WORD(1)])}


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_typing: Any) -> Any:
    """Tell the processor that this thread is spinning."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        name, arguments = _PAUSE.get(platform.machine(), ("llvm.donothing", []))
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _run(_typing: Any, body: Any, arguments: Any) -> Any:
    """Call a kernel. Args: addresses of its code and of its arguments."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer()])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [_pointer(builder, values[1])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(_typing: Any, function: Any) -> Any:
    """Call a function of the C library without arguments."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_WORD, [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _futex(_typing: Any, syscall: Any, at: Any, operation: Any, number: Any) -> Any:
    """Sleep while the lower 32 bits at an address equal `number`, or wake this many threads; see futex(2)."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_LONG, [_LONG] * 7)
        function = builder.inttoptr(values[0], kind.as_pointer())
        nothing = _LONG(0)
        builder.call(function, [_LONG(FUTEX), values[1], values[2], values[3], nothing, nothing, nothing])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate
