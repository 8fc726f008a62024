"""Matrix products with packed weights (product.py) of bfloat16, with the tile registers of AMX (amx.py).

A task walks the inputs some steps at a time. For these steps it walks all rows in groups of 32, so that the weights of
the steps stay in the L1 cache. Registers are loaded from a copy of the rows in which the 32 inputs of a step are
contiguous, with zeros after the last ones. The panel that this thread probably takes next is prefetched, as in
vector_product.py.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from orca.kernels.cpu.product import panel as at
from orca.kernels.cpu.product.amx import (
    INPUTS,
    LANES,
    ROWS,
    TILE_BYTES,
    add_tiles,
    configure_tiles,
    copy_lines,
    release_tiles,
)
from orca.kernels.cpu.product.panel import apply_epilogue, blocks_of, panel_of
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
)
from orca.kernels.cpu.team.team import Kernel

_KIND = KERNEL_TYPES[torch.bfloat16]
_SUMS_BYTES = 2 * LANES * 4
_TASK_SUMS = at.TASK_ROWS * 2 * LANES
_PANEL_BYTES = 2 * TILE_BYTES
"""Bytes of a panel's weights in a step."""
_STEPS = 8
"""Steps that all rows of a task pass before the next steps begin: their weights are 16 KiB."""


def scratch_bytes(rows: int, inputs: int) -> int:
    """Return the scratch memory of a thread: one plain row, then all rows of a task in the order of the registers."""
    return -(-inputs // INPUTS) * (LINE_BYTES + -(-rows // ROWS) * TILE_BYTES)


@cache
def kernel() -> Kernel:
    """Return the kernel of all bfloat16 products on a processor with AMX."""

    def body(args: Any) -> None:
        rows, panels = args[at.ROWS], args[at.PANELS]
        blocks = blocks_of(rows, panels, args[at.THREADS], 2 * ROWS)
        steps = (args[at.INPUTS] + INPUTS - 1) // INPUTS
        sums_at = stack_floats(_TASK_SUMS)
        row_at = args[at.SCRATCH] + thread_number(args) * args[at.SCRATCH_BYTES]
        packed_at, packed_block = row_at + steps * LINE_BYTES, -1
        configure_tiles()
        task = next_task(args)
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
            passes = (tiles + 1) // 2
            for done in range(0, steps, _STEPS):
                some = min(_STEPS, steps - done)
                for pass_index in range(passes):
                    sums = sums_at + pass_index * 2 * ROWS * _SUMS_BYTES
                    add_tiles(
                        sums,
                        args[at.BIAS] + panel * _SUMS_BYTES if done == 0 else sums,
                        0 if done == 0 else _SUMS_BYTES,
                        packed_at + pass_index * 2 * TILE_BYTES + done * step_bytes,
                        step_bytes,
                        weights + done * _PANEL_BYTES,
                        some,
                        upcoming + done * _PANEL_BYTES + some * _PANEL_BYTES * pass_index // passes,
                        _PANEL_BYTES // passes,
                        tiles - 2 * pass_index,
                    )
            apply_epilogue(sums_at, first, last, panel, args, _KIND, 2, LANES)
            task = next_task(args)
        release_tiles()

    return Kernel("product-amx", body)


# A function of the module, not inside `kernel`: Numba could not reuse its cached code in the next process.
@njit(**FAST)  # type: ignore[untyped-decorator]
def _pack(packed_at: Any, row_at: Any, args: Any, first: Any, last: Any, steps: Any, step_bytes: Any) -> None:
    """Copy rows [first, last), normalised if there is a norm, as [steps, rows, 32]."""
    inputs, eps = args[at.INPUTS], np.float32(float_argument(args[at.EPS]))
    own = carray(pointer(row_at, _KIND), (steps * INPUTS,))
    own[inputs:] = 0
    for row in range(first, last):
        of = args[at.X] + row * inputs * 2
        if args[at.NORM] != 0:
            normalise_row(row_at, of, args[at.NORM], args[at.NORM_BIAS], inputs, eps, _KIND)
            of = row_at
        elif inputs < steps * INPUTS:
            own[:inputs] = carray(pointer(of, _KIND), (inputs,))
            of = row_at
        copy_lines(packed_at + (row - first) * LINE_BYTES, step_bytes, of, steps)
