"""What kernels of CPUs (numba_team.py) are written with beside Numba itself: counters, addresses, half precision by its
bits, rows as vectors, prefetch, a fast exponential.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FAST = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
"""How kernels are compiled: sums may be taken in any order; infinities and NaN keep their meaning."""

_POINTER = types.CPointer(types.int64)
ARGS = types.void(_POINTER)
"""The signature of a kernel."""

_HALF = ir.HalfType()
_FLOAT = ir.FloatType()

BITS_OF = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
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


@intrinsic  # type: ignore[untyped-decorator]
def real(_typing: Any, number: Any) -> Any:
    """A float that was given to the kernel."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(_typing: Any, exponent: Any) -> Any:
    """2 ** exponent as float32, for -126 <= exponent <= 127."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        bits = builder.shl(builder.add(values[0], ir.Constant(ir.IntType(32), 127)), ir.Constant(ir.IntType(32), 23))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(types.int32), generate


def _widened(builder: Any, bits: Any, kind: Any, lanes: int | None = None) -> Any:
    """LLVM's float32 of an element (or of a vector of `lanes`) of that kind."""

    def shaped(element: Any) -> Any:
        return element if lanes is None else ir.VectorType(element, lanes)

    if kind == types.float32:
        return bits
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, shaped(_HALF)), shaped(_FLOAT))
    word = shaped(ir.IntType(32))
    sixteen = ir.Constant(word, 16 if lanes is None else [16] * lanes)
    return builder.bitcast(builder.shl(builder.zext(bits, word), sixteen), shaped(_FLOAT))


@intrinsic  # type: ignore[untyped-decorator]
def wide(_typing: Any, bits: Any) -> Any:
    """An element of a tensor as float32 (`BITS_OF`)."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _widened(builder, values[0], bits)

    return types.float32(bits), generate


_LANES = 16
"""Of a vector at most: what one register of the largest kind holds. Longer ones take LLVM seconds to cut up."""


def _pieces(dim: int) -> list[tuple[int, int]]:
    """A row as vectors: first element and lanes of each."""
    return [(first, min(_LANES, dim - first)) for first in range(0, dim, _LANES)]


def _vector(builder: Any, address: Any, element: int, kind: Any, lanes: int) -> Any:
    """LLVM's vector of elements of a kind as float32, from `element` behind an address on."""
    bits = ir.VectorType(_FLOAT if kind == types.float32 else ir.IntType(16), lanes)
    here = builder.add(address, ir.Constant(ir.IntType(64), element * kind.bitwidth // 8))
    loaded = builder.load(builder.inttoptr(here, bits.as_pointer()), align=kind.bitwidth // 8)
    return _widened(builder, loaded, kind, lanes)


def _float(builder: Any, address: Any, place: int) -> Any:
    """LLVM's pointer to a float32, `place` of them behind an address."""
    return builder.inttoptr(builder.add(address, ir.Constant(ir.IntType(64), 4 * place)), _FLOAT.as_pointer())


# Rows are straight pieces of vector code of a length that the compiler knows: a loop over so few elements spends more
# time on its end than on the elements. They are given by their addresses.


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dots(_typing: Any, query: Any, keys: Any, scores: Any, kind: Any, dim: Any, count: Any) -> Any:
    """Scores [count] of keys [count, dim] of a kind by a query [dim] of float32."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = dim.literal_value
        asked = [_vector(builder, values[0], first, types.float32, lanes) for first, lanes in _pieces(width)]
        for place in range(count.literal_value):
            sums: dict[int, Any] = {}  # by lanes: all pieces but the last are alike
            for query_piece, (first, lanes) in zip(asked, _pieces(width), strict=True):
                key = _vector(builder, values[1], place * width + first, kind.dtype, lanes)
                product = builder.fmul(query_piece, key, flags=("contract",))
                sums[lanes] = builder.fadd(sums[lanes], product, flags=("contract",)) if lanes in sums else product
            score = _FLOAT(0.0)
            for lanes, each in sums.items():
                reduced = ir.FunctionType(_FLOAT, [_FLOAT, ir.VectorType(_FLOAT, lanes)])
                name = f"llvm.vector.reduce.fadd.v{lanes}f32"
                reduce = cgutils.get_or_insert_function(builder.module, reduced, name)
                score = builder.call(reduce, [score, each], fastmath=("reassoc", "contract"))
            builder.store(score, _float(builder, values[2], place))
        return context.get_dummy_value()

    return types.void(query, keys, scores, kind, dim, count), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_weighted(_typing: Any, total: Any, rows: Any, weights: Any, kind: Any, dim: Any, count: Any) -> Any:
    """total [dim] += weights [count] x rows [count, dim] of a kind; all others are float32."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = dim.literal_value
        factors = [builder.load(_float(builder, values[2], place)) for place in range(count.literal_value)]
        for first, lanes in _pieces(width):
            vector = ir.VectorType(_FLOAT, lanes)
            nothing = ir.Constant(vector, ir.Undefined)
            all_first = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
            sum_ = _vector(builder, values[0], first, types.float32, lanes)
            for place, factor in enumerate(factors):
                lone = builder.insert_element(nothing, factor, ir.IntType(32)(0))
                spread = builder.shuffle_vector(lone, nothing, all_first)
                row = _vector(builder, values[1], place * width + first, kind.dtype, lanes)
                product = builder.fmul(spread, row, flags=("contract",))
                sum_ = builder.fadd(sum_, product, flags=("contract",))
            to = builder.add(values[0], ir.Constant(ir.IntType(64), 4 * first))
            builder.store(sum_, builder.inttoptr(to, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(total, rows, weights, kind, dim, count), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(_typing: Any, number: Any, kind: Any) -> Any:
    """A float32 as an element of a tensor of that kind, rounded to the nearest, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        if kind.dtype == types.float32:
            return values[0]
        if kind.dtype == types.int16:
            return builder.bitcast(builder.fptrunc(values[0], _HALF), ir.IntType(16))

        def word(value: int) -> Any:
            return ir.Constant(ir.IntType(32), value)

        bits = builder.bitcast(values[0], ir.IntType(32))
        is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.lshr(builder.add(bits, builder.add(is_odd, word(0x7FFF))), word(16))
        is_nan = builder.fcmp_unordered("uno", values[0], values[0])
        return builder.trunc(builder.select(is_nan, word(0x7FC0), rounded), ir.IntType(16))

    return kind.dtype(types.float32, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address, into the second level: the first has too few lines in flight."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(ask, [builder.inttoptr(values[0], byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit(**FAST)  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e ** x in float32, for x <= 0, to 2 units in the last place; 1 at 0, and 0 below -87.

    Unlike math.exp it is plain arithmetic, of which LLVM makes vector instructions. The polynomial is Cephes' expf.
    """
    is_small = x < np.float32(-87.0)
    x = max(x, np.float32(-87.0))
    turns = np.float32(math.floor(x * np.float32(1.4426950408889634) + np.float32(0.5)))
    rest = x - turns * np.float32(0.693359375) + turns * np.float32(2.12194440e-4)
    sum_ = np.float32(1.9875691500e-4)
    sum_ = sum_ * rest + np.float32(1.3981999507e-3)
    sum_ = sum_ * rest + np.float32(8.3334519073e-3)
    sum_ = sum_ * rest + np.float32(4.1665795894e-2)
    sum_ = sum_ * rest + np.float32(1.6666665459e-1)
    sum_ = sum_ * rest + np.float32(5.0000001201e-1)
    power = (sum_ * rest * rest + rest + np.float32(1.0)) * power_of_two(np.int32(turns))
    return np.float32(0.0) if is_small else power
