"""What the kernels of matrix products (vector_product.py, amx_product.py) share: the arguments that they
get, which panel a task is, and what becomes of its sums.

The outputs of neighbouring panels lie in one line of the cache, or in the pair of lines that processors fetch. So
threads begin far apart, or each store of one would take the line away from another: with two threads on a Zen 5
processor products of 16 to 250 rows are up to 1.2 times as fast as with the panels in their order (bfloat16; float32
1.05), and 1.02 to 1.15 times again by asking for the lines before they are written, which the other thread has read.
"""

from typing import Any

import numpy as np
from numba import carray, literally, njit

from orca.kernels.cpu.activations import activate_lanes, gate_lanes
from orca.kernels.cpu.team.intrinsics import (
    FAST,
    LINE_BYTES,
    elements,
    narrow,
    narrow_lanes,
    prefetch_to_write,
    turn_lanes,
    wide,
)

TASK_ROWS = 256
"""Of a task at most: their sums of one panel, 32 KiB, stay in the second cache. With fewer, a prompt's weights would be
read from memory several times."""

STORE, ADD, GATE, KEEP, WIDE, ACTIVATE = range(6)
"""What becomes of the sums: y, or added to it; silu(one half) * the other; turned and put into the KV cache; y of
float32, unrounded; y by the first activation, and by the others from there on."""

# Places of the arguments, in the order in which `PackedWeight` gives them.
X, WEIGHT, BIAS, Y, SCRATCH, TURNS, SLOTS, CACHE = range(2, 10)
ROWS, INPUTS, OUTPUTS, PARTS, PANELS, THREADS, ENDING = range(10, 17)
HEAD_DIM, KEPT, BLOCK_TOKENS, SCRATCH_BYTES, NORM, NORM_BIAS, EPS, SCALE = range(17, 25)

_TASKS_A_THREAD = 4
"""At least, where there are rows to split: threads end at about the same time."""


@njit(**FAST)  # type: ignore[untyped-decorator]
def blocks_of(rows: Any, panels: Any, threads: Any, tile_rows: Any) -> Any:
    """Into how many parts rows are split, each panel of which is a task."""
    wanted = (_TASKS_A_THREAD * threads + panels - 1) // panels
    return max((rows + TASK_ROWS - 1) // TASK_ROWS, min(wanted, rows // tile_rows), 1)


@njit(**FAST)  # type: ignore[untyped-decorator]
def panel_of(place: Any, args: Any) -> Any:
    """The panel of the task that is taken at a place among those of the same rows.

    There are as many runs of panels as threads, of equal sizes or nearly so, and their panels take turns: the first of
    each run, then the second. So a thread probably takes the next panel next.
    """
    each, longer = args[PANELS] // args[THREADS], args[PANELS] % args[THREADS]
    run = place % args[THREADS]
    return run * each + min(run, longer) + place // args[THREADS]


@njit(**FAST)  # type: ignore[untyped-decorator]
def ask_for_outputs(first: Any, last: Any, panel: Any, args: Any, bytes_: Any, lanes: Any) -> None:
    """The lines of y that `finish` will write for rows [first, last) of a panel."""
    element_bytes = 4 if args[ENDING] == WIDE else bytes_
    pieces = args[PARTS] if args[ENDING] != GATE else 1
    piece_bytes = literally(lanes) * element_bytes * (2 if args[PARTS] == 1 else 1)
    for row in range(first, last):
        for piece in range(pieces):
            element = row * _width(args) + _column(panel, piece, args, lanes)
            for behind in range(0, piece_bytes, LINE_BYTES):
                prefetch_to_write(args[Y] + element * element_bytes + behind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def finish(sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any) -> None:
    """From sums [last - first, 2 x lanes] of a panel, of rows [first, last), to y, and the cache."""
    if args[ENDING] == KEEP:
        _keep(sums_at, first, last, panel, args, kind, bytes_, lanes)
    else:
        _store(sums_at, first, last, panel, args, kind, bytes_, lanes)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _store(sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any) -> None:
    """To y, where the sums of a row are two pieces, or one when gated. Row by row: the pieces often share a line."""
    ending, vector_bytes = args[ENDING], literally(lanes) * 4
    size, width = args[OUTPUTS] // args[PARTS], _width(args)
    for row in range(first, last):
        numbers = sums_at + (row - first) * 2 * vector_bytes
        if ending == GATE:
            gate_lanes(numbers, literally(lanes))
        elif ending >= ACTIVATE:
            activate_lanes(numbers, ending - ACTIVATE, literally(lanes))
        for piece in range(1 if ending == GATE else 2):
            column = _column(panel, piece, args, lanes)
            # What is there of y, or of this part of it, from there on.
            left = size - panel * lanes if args[PARTS] == 2 else width - column
            sums, element = numbers + piece * vector_bytes, row * width + column
            if ending == WIDE:
                _put(sums, args[Y] + element * 4, left, False, np.float32, lanes)
            else:
                _put(sums, args[Y] + element * bytes_, left, ending == ADD, kind, lanes)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _width(args: Any) -> Any:
    """Of a row of y."""
    return args[OUTPUTS] // args[PARTS] if args[ENDING] == GATE else args[OUTPUTS]


@njit(**FAST)  # type: ignore[untyped-decorator]
def _column(panel: Any, piece: Any, args: Any, lanes: Any) -> Any:
    """Of y, where a piece of a panel's outputs begins."""
    if args[PARTS] == 2:
        return panel * lanes + piece * (args[OUTPUTS] // 2)
    return (2 * panel + piece) * lanes


@njit(**FAST)  # type: ignore[untyped-decorator]
def _put(numbers: Any, to: Any, left: Any, is_added: Any, kind: Any, lanes: Any) -> None:
    """A vector, as far as there is room for it, to y, or to what is there."""
    if left < lanes:
        sums, some = carray(elements(numbers, np.float32), (lanes,)), carray(elements(to, kind), (lanes,))
        for lane in range(left):
            some[lane] = narrow(sums[lane] + (wide(some[lane]) if is_added else np.float32(0.0)), kind)
    elif is_added:
        narrow_lanes(numbers, to, kind, literally(lanes), True)
    else:
        narrow_lanes(numbers, to, kind, literally(lanes), False)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _keep(sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any) -> None:
    """From sums of a panel of queries, keys or values to y and the cache (device.Kernels.keep)."""
    outputs, head_dim, kept, block_tokens = args[OUTPUTS], args[HEAD_DIM], args[KEPT], args[BLOCK_TOKENS]
    slots = carray(elements(args[SLOTS], np.int64), (args[ROWS],))
    for half in range(2):
        column = (2 * panel + half) * literally(lanes)
        if column < outputs:
            head, dim = column // head_dim, column % head_dim
            line = head - outputs // head_dim + kept  # of a block in the cache; below 0 for queries
            for row in range(first, last):
                numbers = sums_at + ((row - first) * 2 + half) * lanes * 4
                if args[TURNS] != 0 and line < kept // 2:
                    turn_lanes(numbers, args[TURNS] + (row * head_dim + dim) * 4, literally(lanes))
                narrow_lanes(numbers, args[Y] + (row * outputs + column) * bytes_, kind, literally(lanes), False)
                if line >= 0:
                    block, place = slots[row] // block_tokens, slots[row] % block_tokens
                    to = ((block * kept + line) * block_tokens + place) * head_dim + dim
                    narrow_lanes(numbers, args[CACHE] + to * bytes_, kind, literally(lanes), False)
