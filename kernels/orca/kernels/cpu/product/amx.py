"""The tile registers of AMX: one instruction multiplies 16 rows by 16 outputs by 32 inputs of bfloat16, and sums in
float32.

There are eight registers of 1 KiB. Four hold the sums of 32 rows and 32 outputs, two hold rows, and two hold weights:
each loaded register is used twice. Denormal numbers count as zero.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

import ctypes
import platform
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from orca.kernels.cpu.team.intrinsics import LINE_BYTES, emit_prefetch, has_cpu_feature

ROWS = 16
"""Rows of a register."""
INPUTS = 32
"""Inputs of a register of rows. A register of weights holds pairs of inputs in its rows."""
TILE_BYTES = 1024
LANES = 16
"""Outputs of a register: as many as the lanes of a float32 vector on these processors."""

_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18

_LONG, _BYTE = ir.IntType(64), ir.IntType(8)
_SUMS, _X, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)


@cache
def is_available() -> bool:
    """Return whether this process may use the registers. Linux requires that the process requests them."""
    if not (has_cpu_feature("amx-tile") and has_cpu_feature("amx-bf16")) or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _call(builder: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def _move(builder: Any, name: str, tile: int, address: Any, row_bytes: Any) -> None:
    """Emit a load or store of a register."""
    _call(builder, name, _BYTE(tile), builder.inttoptr(address, _BYTE.as_pointer()), row_bytes)


@intrinsic  # type: ignore[untyped-decorator]
def configure_tiles(_typing: Any) -> Any:
    """Configure this thread's registers, all with their full shape, until `release_tiles`."""
    # Palette 1; from byte 16 on, the bytes per row of each register (16 bits); from byte 48 on, its number of rows.
    shapes = [1] + [0] * 15 + [LINE_BYTES, 0] * 8 + [0] * 16 + [ROWS] * 8 + [0] * 8

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        bytes_ = ir.ArrayType(_BYTE, len(shapes))
        memory = cgutils.alloca_once(builder, bytes_)
        builder.store(ir.Constant(bytes_, shapes), memory)
        _call(builder, "ldtilecfg", builder.bitcast(memory, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def release_tiles(_typing: Any) -> Any:
    """Release the registers, so that the operating system need not save them."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_tiles(
    _typing: Any,
    sums: Any,
    before: Any,
    before_bytes: Any,
    x: Any,
    x_bytes: Any,
    weights: Any,
    steps: Any,
    ahead: Any,
    ahead_bytes: Any,
    tiles: Any,
) -> Any:
    """Compute sums [tiles x 16, 32] = before + x times weights. sums, before, x and weights are addresses.

    Args:
        before_bytes: distance between rows of `before`; 0 uses one row for all.
        x: [steps, any rows, 32] of bfloat16: 32 inputs of each row per step.
        x_bytes: distance between steps.
        weights: [steps x 16, 32, 2] of bfloat16: pairs of inputs of each output.
        steps: 1 or more.
        ahead: address to prefetch, `ahead_bytes` in each step.
        tiles: number of tiles of rows, 1 or 2.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        with builder.if_else(builder.icmp_signed(">", values[9], _LONG(1))) as (two, one):
            with two:
                _add_tiles(builder, values[:9], 2)
            with one:
                _add_tiles(builder, values[:9], 1)
        return context.get_dummy_value()

    numbers = sums, before, before_bytes, x, x_bytes, weights, steps, ahead, ahead_bytes, tiles
    return types.void(*numbers), generate


def _add_tiles(builder: Any, values: Any, tiles: int) -> None:
    """Emit the code of `add_tiles` for one number of tiles."""
    sums, before, before_bytes, x, x_bytes, weights, steps, ahead, ahead_bytes = values
    line, two_lines = _LONG(LINE_BYTES), _LONG(2 * LINE_BYTES)

    def move_sums(name: str, at: Any, row_bytes: Any) -> None:
        for tile in range(tiles):
            for half in range(2):
                first = builder.add(builder.mul(row_bytes, _LONG(ROWS * tile)), _LONG(LINE_BYTES * half))
                _move(builder, name, _SUMS[2 * tile + half], builder.add(at, first), row_bytes)

    move_sums("tileloadd64", before, before_bytes)
    with cgutils.for_range(builder, steps, intp=_LONG) as loop:
        asked = builder.add(ahead, builder.mul(loop.index, ahead_bytes))
        with cgutils.for_range_slice(builder, _LONG(0), ahead_bytes, line) as (behind, _):
            emit_prefetch(builder, builder.add(asked, behind))
        x_at = builder.add(x, builder.mul(loop.index, x_bytes))
        weights_at = builder.add(weights, builder.mul(loop.index, _LONG(2 * TILE_BYTES)))
        for half in range(2):
            half_at = builder.add(weights_at, _LONG(LINE_BYTES * half))
            _move(builder, "tileloadd64", _WEIGHTS[half], half_at, two_lines)
            for tile in range(tiles):
                if half == 0:
                    _move(builder, "tileloadd64", _X[tile], builder.add(x_at, _LONG(TILE_BYTES * tile)), line)
                registers = _SUMS[2 * tile + half], _X[tile], _WEIGHTS[half]
                _call(builder, "tdpbf16ps", *map(_BYTE, registers))
    move_sums("tilestored64", sums, two_lines)


@intrinsic  # type: ignore[untyped-decorator]
def copy_lines(_typing: Any, to: Any, to_bytes: Any, of: Any, lines: Any) -> Any:
    """Copy contiguous cache lines to addresses that are `to_bytes` apart."""
    words = ir.VectorType(ir.IntType(32), LINE_BYTES // 4)

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        to, to_bytes, of, lines = values
        with cgutils.for_range(builder, lines, intp=_LONG) as loop:
            from_at = builder.add(of, builder.mul(loop.index, _LONG(LINE_BYTES)))
            to_at = builder.add(to, builder.mul(loop.index, to_bytes))
            line = builder.load(builder.inttoptr(from_at, words.as_pointer()), align=2)
            builder.store(line, builder.inttoptr(to_at, words.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(to, to_bytes, of, lines), generate
