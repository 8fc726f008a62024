"""The inner part of matrix products on a CPU: a few rows by two vectors of outputs, with all sums in registers."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.cpu.product import amx
from orca.kernels.cpu.team.intrinsics import (
    BFLOAT,
    LINE_BYTES,
    constant,
    emit_fma,
    emit_prefetch,
    has_cpu_feature,
    load_vector,
    splat,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a product that fits into a processor's registers.

    They hold the sums of `rows` rows and two vectors of outputs, two vectors of weights, and one of an input.
    """

    lanes: int  # lanes of a float32 vector
    rows: int
    pairs: bool  # neighbouring inputs are stored as pairs (AVX512_BF16 and AMX; bfloat16 only)
    is_amx: bool = False  # uses AMX registers instead of vectors (amx.py); bfloat16 only

    @property
    def adjacent(self) -> int:
        """Number of inputs of one output that are adjacent in memory."""
        return 2 if self.pairs else 1

    @property
    def step(self) -> int:
        """Number of inputs that are multiplied at a time."""
        return amx.INPUTS if self.is_amx else self.adjacent

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.lanes}{'-pairs' if self.pairs else ''}"


@cache
def tile_of(dtype: torch.dtype) -> Tile:
    """Return the tile for weights of a dtype on this processor."""
    if dtype == torch.bfloat16 and amx.is_available():
        return Tile(lanes=amx.LANES, rows=2 * amx.ROWS, pairs=True, is_amx=True)
    if not has_cpu_feature("avx512f"):
        return Tile(lanes=8, rows=6, pairs=False)
    return Tile(lanes=16, rows=12, pairs=dtype == torch.bfloat16 and has_cpu_feature("avx512bf16"))


def is_interleaved(dtype: torch.dtype, tile: Tile) -> bool:
    """Return whether the two vectors of a panel are interleaved as the halves of 32-bit words.

    One instruction then converts each of them to float32. Stored one after the other they need two, and products of 16
    or more rows take 1.04 to 1.08 times as long on a Zen 3.
    """
    return dtype == torch.bfloat16 and not tile.pairs


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_products(
    _typing: Any,
    sums: Any,
    before: Any,
    before_bytes: Any,
    x: Any,
    row_bytes: Any,
    weights: Any,
    ahead: Any,
    ahead_bytes: Any,
    depth: Any,
    rows: Any,
    kind: Any,
    lanes: Any,
    rows_max: Any,
    pairs: Any,
    is_alone: Any,
) -> Any:
    """Compute sums [rows, 2 x lanes] = before + x [rows, depth (x 2)] times weights [depth, 2 x lanes (x 2)].

    The weights are of a kind; x is bfloat16 with pairs, otherwise float32.

    Args: the first eight are addresses, or distances in bytes.
        before_bytes: distance between rows of `before`; 0 uses one row for all.
        row_bytes: distance between rows of x.
        ahead: address to prefetch, `ahead_bytes` for each input or pair: at most one cache line, or two if is_alone.
        depth: number of inputs, or of pairs of inputs; 1 or more.
        rows: 1 to rows_max; at least half of rows_max unless is_alone.
        is_alone: the weights are read only for these rows.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        width = lanes.literal_value
        if pairs.literal_value:
            inputs: _Inputs = _Pairs(width)
        else:
            inputs = _Words(width, kind.dtype) if kind.dtype == types.uint16 else _Singles(width, kind.dtype)
        end = builder.append_basic_block("end")
        switch = builder.switch(values[9], end)
        most = rows_max.literal_value
        for count in range(1 if is_alone.literal_value else (most + 1) // 2, most + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(ir.IntType(64), count), block)
            builder.position_at_end(block)
            _add_products(builder, values[:9], count, inputs, is_alone=is_alone.literal_value)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    numbers = sums, before, before_bytes, x, row_bytes, weights, ahead, ahead_bytes, depth, rows
    return types.void(*numbers, kind, lanes, rows_max, pairs, is_alone), generate


class _Inputs(Protocol):
    """Emits the multiplication of inputs. Addresses and vectors are LLVM values."""

    lanes: int
    bytes: int  # bytes of a row that are multiplied at a time
    weight_bytes: int  # bytes of an output's weight that are multiplied at a time

    def one(self, builder: Any, address: Any) -> Any:
        """Emit a vector with an input (or pair) of a row in each lane."""
        ...

    def weights(self, builder: Any, address: Any) -> list[Any]:
        """Emit the weights of both vectors of outputs."""
        ...

    def add(self, builder: Any, sums: Any, one: Any, weights: Any) -> Any:
        """Emit sums + one x weights."""
        ...


class _Singles:
    """Multiplies inputs one by one, as float32."""

    bytes = 4

    def __init__(self, lanes: int, kind: Any) -> None:
        self.lanes, self.weight_bytes, self._kind = lanes, kind.bitwidth // 8, kind

    def one(self, builder: Any, address: Any) -> Any:
        number = builder.load(builder.inttoptr(address, ir.FloatType().as_pointer()))
        return splat(builder, number, self.lanes)

    def weights(self, builder: Any, address: Any) -> list[Any]:
        return [load_vector(builder, address, first, self._kind, self.lanes) for first in (0, self.lanes)]

    def add(self, builder: Any, sums: Any, one: Any, weights: Any) -> Any:
        return emit_fma(builder, one, weights, sums)


class _Words(_Singles):
    """Multiplies bfloat16 weights of which each 32-bit word holds one of each vector (`is_interleaved`)."""

    def weights(self, builder: Any, address: Any) -> list[Any]:
        kind = ir.VectorType(ir.IntType(32), self.lanes)
        words = builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)
        numbers = builder.shl(words, constant(kind, 16)), builder.and_(words, constant(kind, 0xFFFF0000))
        return [builder.bitcast(each, ir.VectorType(ir.FloatType(), self.lanes)) for each in numbers]


class _Pairs:
    """Multiplies two neighbouring bfloat16 inputs at a time, with one instruction of AVX512_BF16."""

    bytes = weight_bytes = 4

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._words = ir.VectorType(ir.IntType(32), lanes)
        self._numbers = ir.VectorType(BFLOAT, 2 * lanes)

    def one(self, builder: Any, address: Any) -> Any:
        word = builder.load(builder.inttoptr(address, ir.IntType(32).as_pointer()), align=2)
        return builder.bitcast(splat(builder, word, self.lanes), self._numbers)

    def weights(self, builder: Any, address: Any) -> list[Any]:
        at = address, builder.add(address, ir.IntType(64)(self.lanes * self.weight_bytes))
        words = (builder.load(builder.inttoptr(half, self._words.as_pointer()), align=2) for half in at)
        return [builder.bitcast(each, self._numbers) for each in words]

    def add(self, builder: Any, sums: Any, one: Any, weights: Any) -> Any:
        kind = ir.FunctionType(sums.type, [sums.type, self._numbers, self._numbers])
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [sums, weights, one])


def _add_products(builder: Any, values: Any, rows: int, inputs: _Inputs, *, is_alone: bool) -> None:
    """Emit the code of `add_products` for one number of rows: a loop over the inputs."""
    sums_at, before_at, before_bytes, x, row_bytes, weights, ahead, ahead_bytes, depth = values
    lanes, long = inputs.lanes, ir.IntType(64)
    vector_bytes = lanes * inputs.weight_bytes
    places = [(row, half) for row in range(rows) for half in range(2)]
    rows_at = [builder.add(x, builder.mul(row_bytes, long(row))) for row in range(rows)]
    before_rows = [builder.add(before_at, builder.mul(before_bytes, long(row))) for row in range(rows)]
    before = [load_vector(builder, before_rows[row], half * lanes, types.float32, lanes) for row, half in places]

    start, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("loop_end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(long)
    sums = [builder.phi(each.type) for each in before]
    done = builder.mul(index, long(2 * vector_bytes))
    asked = builder.add(ahead, builder.mul(index, ahead_bytes))
    emit_prefetch(builder, asked)
    halves = inputs.weights(builder, builder.add(weights, done))
    after = []
    for row, at in enumerate(rows_at):
        one = inputs.one(builder, builder.add(at, builder.mul(index, long(inputs.bytes))))
        after += [inputs.add(builder, sums[2 * row + half], one, halves[half]) for half in range(2)]
    if is_alone and 2 * vector_bytes > LINE_BYTES:
        emit_prefetch(builder, builder.add(asked, builder.lshr(ahead_bytes, long(1))))
    following = builder.add(index, long(1))
    for phi, first, next_ in zip([index, *sums], [long(0), *before], [following, *after], strict=True):
        phi.add_incoming(first, start)
        phi.add_incoming(next_, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)

    builder.position_at_end(end)
    for (row, half), sum_ in zip(places, after, strict=True):
        to = builder.add(sums_at, long(4 * (2 * row + half) * lanes))
        builder.store(sum_, builder.inttoptr(to, sum_.type.as_pointer()), align=4)
