"""Matrix products in panels (product.py) of bfloat16 by the tile registers of AMX (amx.py).

A task goes through the inputs some steps at a time, 32 rows after 32 rows, so that the weights of these steps stay in
the first cache. Rows go into the registers from a copy in which the 32 inputs of a step lie together, the last ones
filled up with zeros. The panel that this thread probably takes next is asked for, as in vector_product.py.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from orca.kernels.cpu.product import panel as at
from orca.kernels.cpu.product.amx import INPUTS, LANES, ROWS, TILE_BYTES, add_tiles, copy_lines, enter, leave
from orca.kernels.cpu.product.panel import blocks_of, finish, panel_of
from orca.kernels.cpu.rows import normalise_row
from orca.kernels.cpu.team.intrinsics import BITS_OF, FAST, LINE_BYTES, elements, join, own_floats, real, take
from orca.kernels.cpu.team.team import Kernel

_KIND = BITS_OF[torch.bfloat16]
_SUMS_BYTES = 2 * LANES * 4
_TASK_SUMS = at.TASK_ROWS * 2 * LANES
_PANEL_BYTES = 2 * TILE_BYTES
"""Of the weights of a panel in a step."""
_STEPS = 8
"""That all rows of a task go through before the next ones: their weights are 16 KiB."""


def scratch_bytes(rows: int, inputs: int) -> int:
    """Of a thread whose tasks have so many rows: a row as it is, then all of them as the registers take them."""
    return -(-inputs // INPUTS) * (LINE_BYTES + -(-rows // ROWS) * TILE_BYTES)


@cache
def kernel() -> Kernel:
    def body(args: Any) -> None:
        rows, panels = args[at.ROWS], args[at.PANELS]
        blocks = blocks_of(rows, panels, args[at.THREADS], 2 * ROWS)
        steps = (args[at.INPUTS] + INPUTS - 1) // INPUTS
        sums_at = own_floats(_TASK_SUMS)
        row_at = args[at.SCRATCH] + join(args) * args[at.SCRATCH_BYTES]
        packed_at, packed_block = row_at + steps * LINE_BYTES, -1
        enter()
        task = take(args)
        while task < panels * blocks:
            block, panel = task // panels, panel_of(task % panels, args)
            first, last = rows * block // blocks, rows * (block + 1) // blocks
            tiles = (last - first + ROWS - 1) // ROWS
            step_bytes = tiles * TILE_BYTES
            if packed_block != block:
                _pack(packed_at, row_at, args, first, last, steps, step_bytes)
                packed_block = block
            weights = args[at.WEIGHT] + panel * steps * _PANEL_BYTES
            upcoming = args[at.WEIGHT] + min(panel + 1, panels - 1) * steps * _PANEL_BYTES
            turns = (tiles + 1) // 2
            for done in range(0, steps, _STEPS):
                some = min(_STEPS, steps - done)
                for turn in range(turns):
                    sums = sums_at + turn * 2 * ROWS * _SUMS_BYTES
                    add_tiles(
                        sums,
                        args[at.BIAS] + panel * _SUMS_BYTES if done == 0 else sums,
                        0 if done == 0 else _SUMS_BYTES,
                        packed_at + turn * 2 * TILE_BYTES + done * step_bytes,
                        step_bytes,
                        weights + done * _PANEL_BYTES,
                        some,
                        upcoming + done * _PANEL_BYTES + some * _PANEL_BYTES * turn // turns,
                        _PANEL_BYTES // turns,
                        tiles - 2 * turn,
                    )
            finish(sums_at, first, last, panel, args, _KIND, 2, LANES)
            task = take(args)
        leave()

    return Kernel("product-amx", body)


# A function of the module, not of `kernel`: Numba would not know it again in the next process.
@njit(**FAST)  # type: ignore[untyped-decorator]
def _pack(packed_at: Any, row_at: Any, args: Any, first: Any, last: Any, steps: Any, step_bytes: Any) -> None:
    """Rows [first, last), normalised where that is asked for, as [steps, rows, 32]."""
    inputs, eps = args[at.INPUTS], np.float32(real(args[at.EPS]))
    own = carray(elements(row_at, _KIND), (steps * INPUTS,))
    own[inputs:] = 0
    for row in range(first, last):
        of = args[at.X] + row * inputs * 2
        if args[at.NORM] != 0:
            normalise_row(row_at, of, args[at.NORM], args[at.NORM_BIAS], inputs, eps, _KIND)
            of = row_at
        elif inputs < steps * INPUTS:
            own[:inputs] = carray(elements(of, _KIND), (inputs,))
            of = row_at
        copy_lines(packed_at + (row - first) * LINE_BYTES, step_bytes, of, steps)
