"""What kernels of CPUs (team.py) are written with beside Numba itself: counters, addresses, half precision by its
bits, rows as vectors, prefetch. Functions of numbers are in activations.py.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

FAST = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
"""How kernels are compiled: sums may be taken in any order; infinities and NaN keep their meaning."""
IN_ORDER = {"fastmath": False, "error_model": "numpy"}
"""How a function is compiled that is part of several kernels and must give the same bits in each. Said outright: what a
function leaves open it takes over from whichever calls it first."""

_POINTER = types.CPointer(types.int64)
ARGS = types.void(_POINTER)
"""The signature of a kernel."""


@cache
def compiles_for(feature: str) -> bool:
    """Whether the processor has it for which Numba compiles: the one at hand, unless NUMBA_CPU_NAME names another."""
    if config.CPU_NAME is not None:
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


class _Bfloat(ir.Type):
    """LLVM's type of this name, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOAT = _Bfloat()
_HALF = ir.HalfType()
_FLOAT = ir.FloatType()

BITS_OF = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16, torch.int8: np.int8}
"""What a kernel takes the elements of a tensor for: the two half precisions for whole numbers of different kinds."""


def _count(place: int, what: str) -> Any:
    def count(_typing: Any, args: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            counter = builder.gep(values[0], [ir.Constant(ir.IntType(64), place)])
            return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(_POINTER), generate

    count.__doc__ = what
    return intrinsic(count)


take = _count(0, "The first of the kernel's tasks that nobody has taken; they are numbered from 0.")
join = _count(1, "A number of its own for each thread that calls it once; they are numbered from 0.")


@intrinsic  # type: ignore[untyped-decorator]
def elements(_typing: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to elements of a NumPy type, for numba.carray."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def own_floats(_typing: Any, count: Any) -> Any:
    """The address of that many float32 on this thread's stack, for as long as the kernel runs; a literal."""

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, count.literal_value))
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(count), generate


@intrinsic  # type: ignore[untyped-decorator]
def real(_typing: Any, number: Any) -> Any:
    """A float that was given to the kernel."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.DoubleType())

    return types.float64(types.int64), generate


# What follows takes LLVM's numbers one by one or as vectors: the type of a value says how many it has.


def shaped(element: Any, like: Any) -> Any:
    """LLVM's type of elements, as many as `like` has."""
    return ir.VectorType(element, like.type.count) if isinstance(like.type, ir.VectorType) else element


def filled(kind: Any, value: float) -> Any:
    """LLVM's constant of a type, the same value in each lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def widened(builder: Any, bits: Any, kind: Any) -> Any:
    """LLVM's float32 of elements of that kind."""
    if kind == types.float32:
        return bits
    if kind == types.int8:
        return builder.sitofp(builder.sext(bits, shaped(ir.IntType(32), bits)), shaped(_FLOAT, bits))
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, shaped(_HALF, bits)), shaped(_FLOAT, bits))
    word = shaped(ir.IntType(32), bits)
    return builder.bitcast(builder.shl(builder.zext(bits, word), filled(word, 16)), shaped(_FLOAT, bits))


def narrowed(builder: Any, number: Any, kind: Any) -> Any:
    """LLVM's elements of that kind of float32, rounded to the nearest, ties to even."""
    if kind == types.float32:
        return number
    element, word = shaped(ir.IntType(16), number), shaped(ir.IntType(32), number)
    if kind == types.int16 or compiles_for("avx512bf16"):
        half = _HALF if kind == types.int16 else BFLOAT
        return builder.bitcast(builder.fptrunc(number, shaped(half, number)), element)
    bits, sixteen = builder.bitcast(number, word), filled(word, 16)
    is_odd = builder.and_(builder.lshr(bits, sixteen), filled(word, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(is_odd, filled(word, 0x7FFF))), sixteen)
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_nan, filled(word, 0x7FC0), rounded), element)


@intrinsic  # type: ignore[untyped-decorator]
def wide(_typing: Any, bits: Any) -> Any:
    """An element of a tensor as float32 (`BITS_OF`)."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return widened(builder, values[0], bits)

    return types.float32(bits), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def narrow_lanes(_typing: Any, numbers: Any, into: Any, kind: Any, lanes: Any, is_added: Any) -> Any:
    """float32 `numbers` [lanes], or their sums with what is there, become elements of a kind; by their addresses."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = lanes.literal_value
        result = vector(builder, values[0], 0, types.float32, width)
        if is_added.literal_value:
            result = builder.fadd(result, vector(builder, values[1], 0, kind.dtype, width))
        result = narrowed(builder, result, kind.dtype)
        builder.store(result, builder.inttoptr(values[1], result.type.as_pointer()), align=kind.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(numbers, into, kind, lanes, is_added), generate


_LANES = 16
"""Of a vector at most: what one register of the largest kind holds. Longer ones take LLVM seconds to cut up."""


def vector(builder: Any, address: Any, element: int, kind: Any, lanes: int) -> Any:
    """LLVM's vector of elements of a kind as float32, from `element` behind an address on."""
    bits = ir.VectorType(_FLOAT if kind == types.float32 else ir.IntType(kind.bitwidth), lanes)
    here = builder.add(address, ir.Constant(ir.IntType(64), element * kind.bitwidth // 8))
    loaded = builder.load(builder.inttoptr(here, bits.as_pointer()), align=kind.bitwidth // 8)
    return widened(builder, loaded, kind)


def spread(builder: Any, number: Any, lanes: int) -> Any:
    """LLVM's vector with a number in each lane."""
    nothing = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    all_first = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(nothing, number, ir.IntType(32)(0)), nothing, all_first)


LINE_BYTES = 64
"""Of the processor's cache."""


@cache
def _locality() -> int:
    """LLVM's, of what is asked for to be read.

    Into the second cache: the first has too few lines in flight, and too little room for what is asked for ahead. On
    Zen 5, where it was measured, with the hint of data that is not used again: the engine is 1.04 to 1.08 times as fast
    by that at batches of 1 to 16, and as fast as without at 64 (63 M and 24 M parameters, both dtypes, two processes of
    each by turns, five rounds, tokens of float32 equal). Presumably the last cache, which takes what the second gives
    up, is left to what is used again: activations, and Python's code and data between two steps.
    """
    name: str = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    return 0 if name == "znver5" else 2


def ask_for(builder: Any, address: Any, *, is_written: bool = False) -> None:
    """LLVM's prefetch of an address's cache line.

    Args: is_written: the line will be, so other cores are to give it up.
    """
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    locality = 3 if is_written else _locality()
    builder.call(ask, [builder.inttoptr(address, byte), word(int(is_written)), word(locality), word(1)])


@intrinsic  # type: ignore[untyped-decorator]
def narrow(_typing: Any, number: Any, kind: Any) -> Any:
    """A float32 as an element of a tensor of that kind, rounded to the nearest, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return narrowed(builder, values[0], kind.dtype)

    return kind.dtype(types.float32, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, address: Any) -> Any:
    """`ask_for` an address."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        ask_for(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_to_write(_typing: Any, address: Any) -> Any:
    """`ask_for` an address that is written soon."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        ask_for(builder, values[0], is_written=True)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _sum(builder: Any, at: Any, many: Any, kind: Any, term: Callable[[Any], Any]) -> Any:
    """LLVM's sum of the terms of `many` elements of a kind, in float32; always in the same order."""
    long = ir.IntType(64)
    whole = builder.and_(many, long(-_LANES))
    lanes = cgutils.alloca_once_value(builder, filled(ir.VectorType(_FLOAT, _LANES), 0.0))
    total = cgutils.alloca_once_value(builder, _FLOAT(0.0))

    def add(sums: Any, first: Any, width: int) -> None:
        here = builder.add(at, builder.mul(first, long(kind.bitwidth // 8)))
        numbers = vector(builder, here, 0, kind, width)
        numbers = numbers if width > 1 else builder.extract_element(numbers, ir.IntType(32)(0))
        builder.store(builder.fadd(builder.load(sums), term(numbers), flags=("contract",)), sums)

    with cgutils.for_range_slice(builder, long(0), whole, long(_LANES)) as (first, _):
        add(lanes, first, _LANES)
    with cgutils.for_range_slice(builder, whole, many, long(1)) as (first, _):
        add(total, first, 1)
    each = builder.load(lanes)
    width = _LANES
    while width > 1:  # halves upon halves
        width //= 2
        order = ir.VectorType(ir.IntType(32), width)
        low, high = (
            builder.shuffle_vector(each, each, ir.Constant(order, list(range(start, start + width))))
            for start in (0, width)
        )
        each = builder.fadd(low, high)
    return builder.fadd(builder.extract_element(each, ir.IntType(32)(0)), builder.load(total))


@intrinsic  # type: ignore[untyped-decorator]
def sum_of(_typing: Any, address: Any, count: Any, kind: Any) -> Any:
    """Of `count` elements of a kind, in float32; always in the same order."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _sum(builder, values[0], values[1], kind.dtype, lambda numbers: numbers)

    return types.float32(address, count, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(_typing: Any, address: Any, count: Any, mean: Any, kind: Any) -> Any:
    """Of the distances of `count` elements of a kind from a float32, in float32; always in the same order."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        def square(numbers: Any) -> Any:
            is_vector = isinstance(numbers.type, ir.VectorType)
            away = builder.fsub(numbers, spread(builder, values[2], numbers.type.count) if is_vector else values[2])
            return builder.fmul(away, away, flags=("contract",))

        return _sum(builder, values[0], values[1], kind.dtype, square)

    return types.float32(address, count, mean, kind), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def turn_lanes(_typing: Any, numbers: Any, turns: Any, lanes: Any) -> Any:
    """float32 numbers [lanes], pairs of neighbours, times complex turns [lanes / 2], in place; by their addresses."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = lanes.literal_value
        number, turn = (vector(builder, at, 0, types.float32, width) for at in values[:2])
        order = ir.VectorType(ir.IntType(32), width)

        def picked(of: Any, places: list[int]) -> Any:
            return builder.shuffle_vector(of, ir.Constant(of.type, ir.Undefined), ir.Constant(order, places))

        cos = picked(turn, [lane // 2 * 2 for lane in range(width)])
        sin = builder.fmul(
            picked(turn, [lane // 2 * 2 + 1 for lane in range(width)]),
            ir.Constant(turn.type, [-1.0, 1.0] * (width // 2)),
        )
        others = builder.fmul(picked(number, [lane ^ 1 for lane in range(width)]), sin)
        turned = builder.fadd(builder.fmul(number, cos, flags=("contract",)), others, flags=("contract",))
        builder.store(turned, builder.inttoptr(values[0], turned.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(numbers, turns, lanes), generate
