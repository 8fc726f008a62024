"""Matrix products with packed weights (product.py) on a processor's vector registers.

A task walks the inputs once for every few rows (a pass), whose sums stay in registers meanwhile (tile.py). So the
weight is read once from memory, and a row once per panel from the processor's cache. Meanwhile the weights that follow
in memory are prefetched, which a thread probably needs next (`panel_of`), one share in each pass; otherwise products of
few rows would wait for memory. A single pass has code of its own, which prefetches two cache lines for each input,
while a share needs one. With the same code for both, the lines of shares were prefetched twice. On an Intel Xeon, all
products of 63 M parameters in float32 then took 1.02 to 1.06 times as long from 2 rows on, and the engine 1.02 times.
One row took the same time (two processes of each, alternating, ten rounds).

Half precision without pairs is multiplied as float32: a thread converts its rows once for all of its panels. If each
panel converted them again, an input would take four instructions, while its products with both vectors take two. Rows
that meet int8 weights are converted too. Each output of such a weight has a scale, which multiplies its sum at the end.

Source: the inner kernel of Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008. The outer
loops are left out: a batch is small enough to stay in the cache.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from orca.kernels.cpu.product import panel as at
from orca.kernels.cpu.product.panel import apply_epilogue, blocks_of, panel_of, prefetch_outputs
from orca.kernels.cpu.product.tile import Tile, add_products
from orca.kernels.cpu.rows import normalise_row
from orca.kernels.cpu.team.intrinsics import (
    FAST,
    KERNEL_TYPES,
    LINE_BYTES,
    float_argument,
    next_task,
    pointer,
    stack_floats,
    thread_number,
    to_float32,
)
from orca.kernels.cpu.team.team import Kernel

_FEW_PASSES, _FEW_DEPTH, _DEPTH = 2, 128, 512
"""Inputs (or pairs) that all rows of a task pass before the next inputs: with two passes, and with more passes. A
smaller number reads memory in a steadier stream; a larger number stores the sums less often. With a single pass the
sums stay in registers to the end."""
_AHEAD_BYTES = 8 << 10
"""Prefetch distance of a single pass. At a distance of a whole panel, 64 KiB, more prefetches are useless."""


def scratch_bytes(rows: int, inputs: int, dtype: torch.dtype, tile: Tile, *, is_normed: bool) -> int:
    """Return the scratch memory of a thread whose tasks have this many rows.

    It holds a copy of the rows if they are normalised or converted, and another row if they are both. 256 rows of
    14,336 inputs take 14 MiB in float32.
    """
    bytes_ = 0
    if _converts_rows(dtype, tile):
        bytes_ = rows * inputs * torch.float32.itemsize + inputs * dtype.itemsize
    elif is_normed:
        bytes_ = rows * inputs * dtype.itemsize
    return -(-bytes_ // LINE_BYTES) * LINE_BYTES


def _converts_rows(dtype: torch.dtype, tile: Tile) -> bool:
    return dtype != torch.float32 and not tile.pairs


@cache
def kernel(dtype: torch.dtype, weight_dtype: torch.dtype, tile: Tile) -> Kernel:
    """Return the kernel for rows and weights of two dtypes (see product.kernel).

    The function inside is long because its two calls of `add_products` have 15 arguments each.
    """
    kind, lanes, tile_rows, adjacent, is_paired = KERNEL_TYPES[dtype], tile.lanes, tile.rows, tile.adjacent, tile.pairs
    weight_kind, is_scaled = KERNEL_TYPES[weight_dtype], weight_dtype == torch.int8
    kind_bytes, weight_bytes = dtype.itemsize, weight_dtype.itemsize
    is_widened = _converts_rows(dtype, tile)
    input_bytes, sums_bytes = 4 if is_widened else adjacent * kind_bytes, 2 * lanes * 4
    width, task_sums = 2 * lanes, at.TASK_ROWS * 2 * lanes

    def body(args: Any) -> None:
        rows, panels, depth = args[at.ROWS], args[at.PANELS], args[at.INPUTS] // adjacent
        blocks = blocks_of(rows, panels, args[at.THREADS], tile_rows)
        row_bytes, vectors_bytes = depth * input_bytes, 2 * lanes * adjacent * weight_bytes
        sums_at = stack_floats(task_sums)
        copy_at = args[at.SCRATCH] + thread_number(args) * args[at.SCRATCH_BYTES]
        zeros_at, copied_block = stack_floats(width), -1
        carray(pointer(zeros_at, np.float32), (width,))[:] = 0
        task = next_task(args)
        while task < panels * blocks:
            block, panel = task // panels, panel_of(task % panels, args)
            first, last = rows * block // blocks, rows * (block + 1) // blocks
            x = args[at.X] + first * args[at.INPUTS] * kind_bytes
            if is_widened or args[at.NORM] != 0:
                if copied_block != block:
                    _prepare(copy_at, x, args, last - first, kind, kind_bytes, is_widened)
                    copied_block = block
                x = copy_at
            weights = args[at.WEIGHT] + panel * depth * vectors_bytes
            passes = (last - first + tile_rows - 1) // tile_rows
            bias = zeros_at if args[at.BIAS] == 0 else args[at.BIAS] + panel * sums_bytes
            start = zeros_at if is_scaled else bias
            if passes == 1:
                prefetch_outputs(first, last, panel, args, kind_bytes, lanes)
                add_products(
                    sums_at,
                    start,
                    0,
                    x,
                    row_bytes,
                    weights,
                    weights + _AHEAD_BYTES,
                    vectors_bytes,
                    depth,
                    last - first,
                    weight_kind,
                    lanes,
                    tile_rows,
                    is_paired,
                    True,
                )
            else:
                most = _FEW_DEPTH if passes == _FEW_PASSES else _DEPTH
                for done in range(0, depth, most):
                    some, here = min(most, depth - done), weights + done * vectors_bytes
                    for pass_index in range(passes):
                        low, high = (last - first) * pass_index // passes, (last - first) * (pass_index + 1) // passes
                        sums = sums_at + low * sums_bytes
                        if done + some == depth:
                            prefetch_outputs(first + low, first + high, panel, args, kind_bytes, lanes)
                        add_products(
                            sums,
                            start if done == 0 else sums,
                            0 if done == 0 else sums_bytes,
                            x + low * row_bytes + done * input_bytes,
                            row_bytes,
                            here,
                            here + (some + some * pass_index // passes) * vectors_bytes,
                            (vectors_bytes + passes - 1) // passes,
                            some,
                            high - low,
                            weight_kind,
                            lanes,
                            tile_rows,
                            is_paired,
                            False,
                        )
            if is_scaled:
                _scale(sums_at, last - first, args[at.SCALE] + panel * sums_bytes, bias, width)
            apply_epilogue(sums_at, first, last, panel, args, kind, kind_bytes, lanes)
            task = next_task(args)

    return Kernel(f"product-{dtype}-{f'{weight_dtype}-' if weight_dtype != dtype else ''}{tile.name}", body)


# Functions of the module, not inside `kernel`: Numba could not reuse their cached code in the next process.
@njit(**FAST)  # type: ignore[untyped-decorator]
def _prepare(copy_at: Any, x_at: Any, args: Any, rows: Any, kind: Any, bytes_: Any, is_widened: Any) -> None:
    """Copy rows for a thread, normalised if there is a norm, and converted to float32 if float32 is multiplied."""
    inputs, eps = args[at.INPUTS], np.float32(float_argument(args[at.EPS]))
    for row in range(rows):
        of = x_at + row * inputs * bytes_
        to = copy_at + rows * inputs * 4 if is_widened else copy_at + row * inputs * bytes_
        if args[at.NORM] != 0:
            normalise_row(to, of, args[at.NORM], args[at.NORM_BIAS], inputs, eps, kind)
            of = to
        if is_widened:
            _widen(copy_at + row * inputs * 4, of, inputs, kind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _widen(to: Any, of: Any, count: Any, kind: Any) -> None:
    widened, numbers = carray(pointer(to, np.float32), (count,)), carray(pointer(of, kind), (count,))
    for place in range(count):
        widened[place] = to_float32(numbers[place])


@njit(**FAST)  # type: ignore[untyped-decorator]
def _scale(sums_at: Any, rows: Any, scale_at: Any, bias_at: Any, width: Any) -> None:
    """Compute sums [rows, width] x scale [width] + bias [width] in place."""
    sums = carray(pointer(sums_at, np.float32), (rows, width))
    scale, bias = carray(pointer(scale_at, np.float32), (width,)), carray(pointer(bias_at, np.float32), (width,))
    for row in range(rows):
        for place in range(width):
            sums[row, place] = sums[row, place] * scale[place] + bias[place]
