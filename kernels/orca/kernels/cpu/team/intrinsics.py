"""The building blocks of CPU kernels (team.py) that Numba lacks: task counters, addresses, half precision, vectors,
prefetch. Mathematical functions are in activations.py.
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
"""Compiler options of kernels: sums may be taken in any order; infinities and NaN keep their meaning."""
IN_ORDER = {"fastmath": False, "error_model": "numpy"}
"""Compiler options of a function that must compute the same bits in several kernels. All options are explicit: a
function takes over unset options from its first caller."""

_POINTER = types.CPointer(types.int64)
ARGS = types.void(_POINTER)
"""The signature of a kernel."""


@cache
def has_cpu_feature(feature: str) -> bool:
    """Return whether the processor that Numba compiles for has a feature: this one, or that of NUMBA_CPU_NAME."""
    if config.CPU_NAME is not None:
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


class _Bfloat(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

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

KERNEL_TYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16, torch.int8: np.int8}
"""NumPy types that kernels use for the elements of a tensor. bfloat16 and float16 appear as different integer types."""


def _counter(place: int, what: str) -> Any:
    def count(_typing: Any, args: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            counter = builder.gep(values[0], [ir.Constant(ir.IntType(64), place)])
            return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(_POINTER), generate

    count.__doc__ = what
    return intrinsic(count)


next_task = _counter(0, "Return the next task that no thread has taken; tasks are numbered from 0.")
thread_number = _counter(1, "Return the number of this thread, from 0 on; each thread may call it once.")


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_typing: Any, address: Any, kind: Any) -> Any:
    """Convert an address to a pointer to elements of a NumPy type, for numba.carray."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def stack_floats(_typing: Any, count: Any) -> Any:
    """Return the address of `count` float32 on this thread's stack, valid until the kernel ends.

    Args: count: a compile-time constant.
    """

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, count.literal_value))
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(count), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_argument(_typing: Any, number: Any) -> Any:
    """Return a float argument of the kernel from its 64 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.DoubleType())

    return types.float64(types.int64), generate


# The following functions take LLVM scalars or vectors: the type of a value shows which.


def type_like(element: Any, like: Any) -> Any:
    """Return LLVM's type with this element type and the number of lanes of `like`."""
    return ir.VectorType(element, like.type.count) if isinstance(like.type, ir.VectorType) else element


def constant(kind: Any, value: float) -> Any:
    """Return LLVM's constant of a type, with the same value in each lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def emit_to_float32(builder: Any, bits: Any, kind: Any) -> Any:
    """Emit the conversion of elements of a kind to float32."""
    if kind == types.float32:
        return bits
    if kind == types.int8:
        return builder.sitofp(builder.sext(bits, type_like(ir.IntType(32), bits)), type_like(_FLOAT, bits))
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, type_like(_HALF, bits)), type_like(_FLOAT, bits))
    word = type_like(ir.IntType(32), bits)
    return builder.bitcast(builder.shl(builder.zext(bits, word), constant(word, 16)), type_like(_FLOAT, bits))


def emit_from_float32(builder: Any, number: Any, kind: Any) -> Any:
    """Emit the conversion of float32 to elements of a kind, rounded to nearest, ties to even."""
    if kind == types.float32:
        return number
    element, word = type_like(ir.IntType(16), number), type_like(ir.IntType(32), number)
    if kind == types.int16 or has_cpu_feature("avx512bf16"):
        half = _HALF if kind == types.int16 else BFLOAT
        return builder.bitcast(builder.fptrunc(number, type_like(half, number)), element)
    bits, sixteen = builder.bitcast(number, word), constant(word, 16)
    is_odd = builder.and_(builder.lshr(bits, sixteen), constant(word, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(is_odd, constant(word, 0x7FFF))), sixteen)
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_nan, constant(word, 0x7FC0), rounded), element)


@intrinsic  # type: ignore[untyped-decorator]
def to_float32(_typing: Any, bits: Any) -> Any:
    """Convert an element of a tensor (`KERNEL_TYPES`) to float32."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_to_float32(builder, values[0], bits)

    return types.float32(bits), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_lanes(_typing: Any, numbers: Any, into: Any, kind: Any, lanes: Any, is_added: Any) -> Any:
    """Store float32 `numbers` [lanes] as elements of a kind, or add them to the elements. Both are addresses."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = lanes.literal_value
        result = load_vector(builder, values[0], 0, types.float32, width)
        if is_added.literal_value:
            result = builder.fadd(result, load_vector(builder, values[1], 0, kind.dtype, width))
        result = emit_from_float32(builder, result, kind.dtype)
        builder.store(result, builder.inttoptr(values[1], result.type.as_pointer()), align=kind.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(numbers, into, kind, lanes, is_added), generate


_LANES = 16
"""Most lanes of a vector: one register of the largest kind. LLVM takes seconds to split longer vectors."""


def load_vector(builder: Any, address: Any, element: int, kind: Any, lanes: int) -> Any:
    """Emit a load of elements of a kind as a float32 vector, from `element` after an address on."""
    bits = ir.VectorType(_FLOAT if kind == types.float32 else ir.IntType(kind.bitwidth), lanes)
    here = builder.add(address, ir.Constant(ir.IntType(64), element * kind.bitwidth // 8))
    loaded = builder.load(builder.inttoptr(here, bits.as_pointer()), align=kind.bitwidth // 8)
    return emit_to_float32(builder, loaded, kind)


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """Emit a vector with a number in each lane."""
    nothing = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    all_first = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(nothing, number, ir.IntType(32)(0)), nothing, all_first)


LINE_BYTES = 64
"""Size of a line of the processor's cache."""


@cache
def _locality() -> int:
    """Return LLVM's locality of prefetches for reading.

    They go into the L2 cache: the L1 cache allows too few lines in flight and has too little room for prefetched data.
    On Zen 5, where it was measured, they carry the hint that the data is not used again. The engine is then 1.04 to
    1.08 times as fast at batches of 1 to 16, and as fast as without the hint at 64 (63 M and 24 M parameters, both
    dtypes, two processes of each, alternating, five rounds, float32 tokens equal). Presumably the last-level cache,
    which takes the lines that L2 evicts, then keeps the data that is used again: activations, and Python's code and
    data between two steps.
    """
    name: str = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    return 0 if name == "znver5" else 2


def emit_prefetch(builder: Any, address: Any, *, is_written: bool = False) -> None:
    """Emit a prefetch of the cache line at an address.

    Args: is_written: the line will be written, so other cores should give it up.
    """
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    locality = 3 if is_written else _locality()
    builder.call(ask, [builder.inttoptr(address, byte), word(int(is_written)), word(locality), word(1)])


@intrinsic  # type: ignore[untyped-decorator]
def from_float32(_typing: Any, number: Any, kind: Any) -> Any:
    """Convert a float32 to an element of a tensor of a kind, rounded to nearest, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_from_float32(builder, values[0], kind.dtype)

    return kind.dtype(types.float32, kind), generate


def emit_fma(builder: Any, one: Any, other: Any, added: Any) -> Any:
    """Emit one x other + added for float32 numbers or vectors, rounded once if the processor can do that.

    If LLVM were only allowed to contract a product and a sum, it would do so where both end up in one block. Then the
    same function would compute other bits in another kernel, or after it was loaded from the cache.
    """
    if not _has_fma():
        flags = ("nsz",)  # harmless; if there were none, Numba would add those of the function
        return builder.fadd(builder.fmul(one, other, flags=flags), added, flags=flags)
    name = f"llvm.fma.v{one.type.count}f32" if isinstance(one.type, ir.VectorType) else "llvm.fma.f32"
    kind = ir.FunctionType(one.type, [one.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [one, other, added])


def _has_fma() -> bool:
    return has_cpu_feature("fma") or llvmlite.binding.get_process_triple().startswith(("aarch64", "arm64"))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, address: Any) -> Any:
    """Prefetch the cache line at an address for reading."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        emit_prefetch(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_to_write(_typing: Any, address: Any) -> Any:
    """Prefetch the cache line at an address for writing."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        emit_prefetch(builder, values[0], is_written=True)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _sum(builder: Any, at: Any, many: Any, kind: Any, add_term: Callable[[Any, Any], Any]) -> Any:
    """Emit the float32 sum of the terms of `many` elements of a kind, in a fixed order.

    Args:
        add_term: emits a sum and the term of a number; numbers and sums are vectors, or single ones.
    """
    long = ir.IntType(64)
    whole = builder.and_(many, long(-_LANES))
    lanes = cgutils.alloca_once_value(builder, constant(ir.VectorType(_FLOAT, _LANES), 0.0))
    total = cgutils.alloca_once_value(builder, _FLOAT(0.0))

    def add(sums: Any, first: Any, width: int) -> None:
        here = builder.add(at, builder.mul(first, long(kind.bitwidth // 8)))
        numbers = load_vector(builder, here, 0, kind, width)
        numbers = numbers if width > 1 else builder.extract_element(numbers, ir.IntType(32)(0))
        builder.store(add_term(numbers, builder.load(sums)), sums)

    with cgutils.for_range_slice(builder, long(0), whole, long(_LANES)) as (first, _):
        add(lanes, first, _LANES)
    with cgutils.for_range_slice(builder, whole, many, long(1)) as (first, _):
        add(total, first, 1)
    each = builder.load(lanes)
    width = _LANES
    while width > 1:  # add halves to halves
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
    """Return the float32 sum of `count` elements of a kind, in a fixed order."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _sum(builder, values[0], values[1], kind.dtype, builder.fadd)

    return types.float32(address, count, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(_typing: Any, address: Any, count: Any, mean: Any, kind: Any) -> Any:
    """Return the float32 sum of squared differences of `count` elements of a kind from `mean`, in a fixed order."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        def add_square(numbers: Any, sums: Any) -> Any:
            is_vector = isinstance(numbers.type, ir.VectorType)
            away = builder.fsub(numbers, splat(builder, values[2], numbers.type.count) if is_vector else values[2])
            return emit_fma(builder, away, away, sums)

        return _sum(builder, values[0], values[1], kind.dtype, add_square)

    return types.float32(address, count, mean, kind), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def rotate_lanes(_typing: Any, numbers: Any, turns: Any, lanes: Any) -> Any:
    """Multiply float32 numbers [lanes], as pairs of neighbours, by complex numbers [lanes / 2], in place.

    Args: numbers, turns: addresses.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = lanes.literal_value
        number, turn = (load_vector(builder, at, 0, types.float32, width) for at in values[:2])
        order = ir.VectorType(ir.IntType(32), width)

        def picked(of: Any, places: list[int]) -> Any:
            return builder.shuffle_vector(of, ir.Constant(of.type, ir.Undefined), ir.Constant(order, places))

        cos = picked(turn, [lane // 2 * 2 for lane in range(width)])
        sin = builder.fmul(
            picked(turn, [lane // 2 * 2 + 1 for lane in range(width)]),
            ir.Constant(turn.type, [-1.0, 1.0] * (width // 2)),
        )
        others = builder.fmul(picked(number, [lane ^ 1 for lane in range(width)]), sin)
        turned = emit_fma(builder, number, cos, others)
        builder.store(turned, builder.inttoptr(values[0], turned.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(numbers, turns, lanes), generate
