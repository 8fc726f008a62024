"""Matrix products in panels (product.py) by a processor's vectors.

A task goes through the inputs once for every few rows, whose sums stay in registers meanwhile (tile.py), so the
weight is read once from memory and a row once per panel from the processor's cache. Meanwhile the weights that come
next in memory are asked for, which a thread probably needs next (`panel_of`), in as many shares as there are turns:
products of few rows wait for memory otherwise. A single turn has code of its own, which asks for two lines for each
input, where a share takes one: with one code for both, the lines of shares were asked for twice, and all products of
63 M parameters in float32 took 1.02 to 1.06 times as long from 2 rows on, on an Intel Xeon (for one row the same; two
processes of each by turns, ten rounds), the engine 1.02 times.

Half precision without pairs is multiplied as float32, to which a thread widens its rows once for all of its panels:
widened for each panel anew, an input took four instructions, and its products with both vectors are two. So are rows
that meet weights of 8 bits. Each output of these has a scale, by which its sum is multiplied at the end.

Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008: the inner kernel. The rest is left out:
a batch is small enough to stay in the cache as it is.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from orca.kernels.cpu.product import panel as at
from orca.kernels.cpu.product.panel import ask_for_outputs, blocks_of, finish, panel_of
from orca.kernels.cpu.product.tile import Tile, add_products
from orca.kernels.cpu.rows import normalise_row
from orca.kernels.cpu.team.intrinsics import BITS_OF, FAST, LINE_BYTES, elements, join, own_floats, real, take, wide
from orca.kernels.cpu.team.team import Kernel

_FEW_TURNS, _FEW_DEPTH, _DEPTH = 2, 128, 512
"""Inputs (or pairs of them) that all rows of a task go through before the next, where there are two turns and where
there are more. Fewer of them come from memory in a steadier stream; more of them put the sums away less often. Rows
that go through in a single turn stay in the registers to the end."""
_AHEAD_BYTES = 8 << 10
"""Of a single turn: how far behind what it multiplies the weights are that it asks for. A whole panel behind, 64 KiB,
is asked for in vain more often."""


def scratch_bytes(rows: int, inputs: int, dtype: torch.dtype, tile: Tile, *, is_normed: bool) -> int:
    """Of a thread whose tasks have so many rows: a copy of these where they are normalised or widened, a row beside it
    where they are both. 256 rows of 14,336 inputs take 14 MiB in float32."""
    bytes_ = 0
    if _widens(dtype, tile):
        bytes_ = rows * inputs * torch.float32.itemsize + inputs * dtype.itemsize
    elif is_normed:
        bytes_ = rows * inputs * dtype.itemsize
    return -(-bytes_ // LINE_BYTES) * LINE_BYTES


def _widens(dtype: torch.dtype, tile: Tile) -> bool:
    return dtype != torch.float32 and not tile.pairs


@cache
def kernel(dtype: torch.dtype, weight_dtype: torch.dtype, tile: Tile) -> Kernel:
    """As numba_product.kernel."""
    kind, lanes, tile_rows, together, is_paired = BITS_OF[dtype], tile.lanes, tile.rows, tile.together, tile.pairs
    weight_kind, is_scaled = BITS_OF[weight_dtype], weight_dtype == torch.int8
    kind_bytes, weight_bytes = dtype.itemsize, weight_dtype.itemsize
    is_widened = _widens(dtype, tile)
    input_bytes, sums_bytes = 4 if is_widened else together * kind_bytes, 2 * lanes * 4
    width, task_sums = 2 * lanes, at.TASK_ROWS * 2 * lanes

    def body(args: Any) -> None:
        rows, panels, depth = args[at.ROWS], args[at.PANELS], args[at.INPUTS] // together
        blocks = blocks_of(rows, panels, args[at.THREADS], tile_rows)
        row_bytes, vectors_bytes = depth * input_bytes, 2 * lanes * together * weight_bytes
        sums_at = own_floats(task_sums)
        own_at = args[at.SCRATCH] + join(args) * args[at.SCRATCH_BYTES]
        zeros_at, own_block = own_floats(width), -1
        carray(elements(zeros_at, np.float32), (width,))[:] = 0
        task = take(args)
        while task < panels * blocks:
            block, panel = task // panels, panel_of(task % panels, args)
            first, last = rows * block // blocks, rows * (block + 1) // blocks
            x = args[at.X] + first * args[at.INPUTS] * kind_bytes
            if is_widened or args[at.NORM] != 0:
                if own_block != block:
                    _prepare(own_at, x, args, last - first, kind, kind_bytes, is_widened)
                    own_block = block
                x = own_at
            weights = args[at.WEIGHT] + panel * depth * vectors_bytes
            turns = (last - first + tile_rows - 1) // tile_rows
            bias = zeros_at if args[at.BIAS] == 0 else args[at.BIAS] + panel * sums_bytes
            start = zeros_at if is_scaled else bias
            if turns == 1:
                ask_for_outputs(first, last, panel, args, kind_bytes, lanes)
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
                most = _FEW_DEPTH if turns == _FEW_TURNS else _DEPTH
                for done in range(0, depth, most):
                    some, here = min(most, depth - done), weights + done * vectors_bytes
                    for turn in range(turns):
                        low, high = (last - first) * turn // turns, (last - first) * (turn + 1) // turns
                        sums = sums_at + low * sums_bytes
                        if done + some == depth:
                            ask_for_outputs(first + low, first + high, panel, args, kind_bytes, lanes)
                        add_products(
                            sums,
                            start if done == 0 else sums,
                            0 if done == 0 else sums_bytes,
                            x + low * row_bytes + done * input_bytes,
                            row_bytes,
                            here,
                            here + (some + some * turn // turns) * vectors_bytes,
                            (vectors_bytes + turns - 1) // turns,
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
            finish(sums_at, first, last, panel, args, kind, kind_bytes, lanes)
            task = take(args)

    return Kernel(f"product-{dtype}-{f'{weight_dtype}-' if weight_dtype != dtype else ''}{tile.name}", body)


# Functions of the module, not of `kernel`: Numba would not know them again in the next process.
@njit(**FAST)  # type: ignore[untyped-decorator]
def _prepare(own_at: Any, x_at: Any, args: Any, rows: Any, kind: Any, bytes_: Any, is_widened: Any) -> None:
    """A thread's own copy of rows, normalised if they are to be, and in float32 if that is what is multiplied."""
    inputs, eps = args[at.INPUTS], np.float32(real(args[at.EPS]))
    for row in range(rows):
        of = x_at + row * inputs * bytes_
        to = own_at + rows * inputs * 4 if is_widened else own_at + row * inputs * bytes_
        if args[at.NORM] != 0:
            normalise_row(to, of, args[at.NORM], args[at.NORM_BIAS], inputs, eps, kind)
            of = to
        if is_widened:
            _widen(own_at + row * inputs * 4, of, inputs, kind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _widen(to: Any, of: Any, count: Any, kind: Any) -> None:
    widened, numbers = carray(elements(to, np.float32), (count,)), carray(elements(of, kind), (count,))
    for place in range(count):
        widened[place] = wide(numbers[place])


@njit(**FAST)  # type: ignore[untyped-decorator]
def _scale(sums_at: Any, rows: Any, scale_at: Any, bias_at: Any, width: Any) -> None:
    """sums [rows, width] x scale [width] + bias [width], in place."""
    sums = carray(elements(sums_at, np.float32), (rows, width))
    scale, bias = carray(elements(scale_at, np.float32), (width,)), carray(elements(bias_at, np.float32), (width,))
    for row in range(rows):
        for place in range(width):
            sums[row, place] = sums[row, place] * scale[place] + bias[place]
