"""Shared parts of the matrix product kernels (vector_product.py, amx_product.py): their arguments, the panel of a task,
and the epilogue that writes its sums.

The outputs of neighbouring panels share a cache line, or the pair of lines that processors fetch. So threads work on
panels far apart; otherwise each store of one thread would take the line away from another. With two threads on a Zen 5
processor, products of 16 to 250 rows are up to 1.2 times as fast as with the panels in order (bfloat16; float32 1.05).
Prefetching the lines before they are written, because the other thread has read them, gives another 1.02 to 1.15 times.
"""

from typing import Any

import numpy as np
from numba import carray, literally, njit

from orca.kernels.contract.activation import Activation
from orca.kernels.cpu.activations import activate_lanes, gate_lanes
from orca.kernels.cpu.team.intrinsics import (
    FAST,
    LINE_BYTES,
    from_float32,
    pointer,
    prefetch_to_write,
    rotate_lanes,
    store_lanes,
    to_float32,
)

TASK_ROWS = 256
"""Most rows of a task: their sums of one panel, 32 KiB, stay in the L2 cache. With fewer rows, the weights would be
read from memory several times for a prompt."""

STORE, ADD, WRITE_KV, FLOAT32, ACTIVATE = range(5)
GATE = ACTIVATE + len(Activation)
"""Epilogues. STORE: store to y. ADD: add to y. WRITE_KV: rotate and write to the KV cache. FLOAT32: store to a float32
y without rounding. ACTIVATE: store after activation number epilogue - ACTIVATE. GATE: store activation(first half) *
second half, with activation number epilogue - GATE.
"""

# Indices of the arguments, in the order in which `PackedWeight` passes them.
X, WEIGHT, BIAS, Y, SCRATCH, ROTATIONS, SLOTS, CACHE = range(2, 10)
ROWS, INPUTS, OUTPUTS, PARTS, PANELS, THREADS, EPILOGUE = range(10, 17)
HEAD_DIM, CACHE_LINES, BLOCK_TOKENS, SCRATCH_BYTES, NORM, NORM_BIAS, EPS, SCALE = range(17, 25)

_TASKS_A_THREAD = 4
"""Fewest tasks per thread if rows can be split, so that all threads end at about the same time."""


@njit(**FAST)  # type: ignore[untyped-decorator]
def blocks_of(rows: Any, panels: Any, threads: Any, tile_rows: Any) -> Any:
    """Return the number of blocks that the rows are split into. A task is one panel for one block of rows."""
    wanted = (_TASKS_A_THREAD * threads + panels - 1) // panels
    return max((rows + TASK_ROWS - 1) // TASK_ROWS, min(wanted, rows // tile_rows), 1)


@njit(**FAST)  # type: ignore[untyped-decorator]
def panel_of(place: Any, args: Any) -> Any:
    """Return the panel of task number `place` among the tasks of the same rows.

    The panels form as many runs as there are threads, of nearly equal sizes. Tasks go through the first panel of each
    run, then the second of each run, and so on. So the next task of a thread is probably the next panel of its run.
    """
    each, longer = args[PANELS] // args[THREADS], args[PANELS] % args[THREADS]
    run = place % args[THREADS]
    return run * each + min(run, longer) + place // args[THREADS]


@njit(**FAST)  # type: ignore[untyped-decorator]
def prefetch_outputs(first: Any, last: Any, panel: Any, args: Any, bytes_: Any, lanes: Any) -> None:
    """Prefetch the cache lines of y that `apply_epilogue` will write for rows [first, last) of a panel."""
    element_bytes = 4 if args[EPILOGUE] == FLOAT32 else bytes_
    pieces = args[PARTS] if args[EPILOGUE] < GATE else 1
    piece_bytes = literally(lanes) * element_bytes * (2 if args[PARTS] == 1 else 1)
    for row in range(first, last):
        for piece in range(pieces):
            element = row * _width(args) + _column(panel, piece, args, lanes)
            for behind in range(0, piece_bytes, LINE_BYTES):
                prefetch_to_write(args[Y] + element * element_bytes + behind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def apply_epilogue(
    sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any
) -> None:
    """Write the sums [last - first, 2 x lanes] of a panel for rows [first, last) to y and to the KV cache."""
    if args[EPILOGUE] == WRITE_KV:
        _write_kv(sums_at, first, last, panel, args, kind, bytes_, lanes)
    else:
        _store(sums_at, first, last, panel, args, kind, bytes_, lanes)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _store(sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any) -> None:
    """Write sums to y. A row has two pieces, or one with a gate.

    It goes row by row, because the two pieces often share a cache line.
    """
    epilogue, vector_bytes = args[EPILOGUE], literally(lanes) * 4
    size, width = args[OUTPUTS] // args[PARTS], _width(args)
    for row in range(first, last):
        numbers = sums_at + (row - first) * 2 * vector_bytes
        if epilogue >= GATE:
            gate_lanes(numbers, epilogue - GATE, literally(lanes))
        elif epilogue >= ACTIVATE:
            activate_lanes(numbers, epilogue - ACTIVATE, literally(lanes))
        for piece in range(1 if epilogue >= GATE else 2):
            column = _column(panel, piece, args, lanes)
            # Outputs of y, or of this part of y, that are left from here on.
            left = size - panel * lanes if args[PARTS] == 2 else width - column
            sums, element = numbers + piece * vector_bytes, row * width + column
            if epilogue == FLOAT32:
                _store_vector(sums, args[Y] + element * 4, left, False, np.float32, lanes)
            else:
                _store_vector(sums, args[Y] + element * bytes_, left, epilogue == ADD, kind, lanes)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _width(args: Any) -> Any:
    """Return the width of a row of y."""
    return args[OUTPUTS] // args[PARTS] if args[EPILOGUE] >= GATE else args[OUTPUTS]


@njit(**FAST)  # type: ignore[untyped-decorator]
def _column(panel: Any, piece: Any, args: Any, lanes: Any) -> Any:
    """Return the column of y at which a piece of a panel's outputs begins."""
    if args[PARTS] == 2:
        return panel * lanes + piece * (args[OUTPUTS] // 2)
    return (2 * panel + piece) * lanes


@njit(**FAST)  # type: ignore[untyped-decorator]
def _store_vector(numbers: Any, to: Any, left: Any, is_added: Any, kind: Any, lanes: Any) -> None:
    """Write a vector to y, or add it to y; of a vector that is too long, only the first `left` numbers."""
    if left < lanes:
        sums, some = carray(pointer(numbers, np.float32), (lanes,)), carray(pointer(to, kind), (lanes,))
        for lane in range(left):
            some[lane] = from_float32(sums[lane] + (to_float32(some[lane]) if is_added else np.float32(0.0)), kind)
    elif is_added:
        store_lanes(numbers, to, kind, literally(lanes), True)
    else:
        store_lanes(numbers, to, kind, literally(lanes), False)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _write_kv(sums_at: Any, first: Any, last: Any, panel: Any, args: Any, kind: Any, bytes_: Any, lanes: Any) -> None:
    """Write the sums of a panel of queries, keys or values to y and to the cache (device.Kernels.write_kv)."""
    outputs, head_dim, cache_lines, block_tokens = args[OUTPUTS], args[HEAD_DIM], args[CACHE_LINES], args[BLOCK_TOKENS]
    slots = carray(pointer(args[SLOTS], np.int64), (args[ROWS],))
    for half in range(2):
        column = (2 * panel + half) * literally(lanes)
        if column < outputs:
            head, dim = column // head_dim, column % head_dim
            line = head - outputs // head_dim + cache_lines  # line in a block of the cache; negative for queries
            for row in range(first, last):
                numbers = sums_at + ((row - first) * 2 + half) * lanes * 4
                if args[ROTATIONS] != 0 and line < cache_lines // 2:
                    rotate_lanes(numbers, args[ROTATIONS] + (row * head_dim + dim) * 4, literally(lanes))
                store_lanes(numbers, args[Y] + (row * outputs + column) * bytes_, kind, literally(lanes), False)
                if line >= 0:
                    block, place = slots[row] // block_tokens, slots[row] % block_tokens
                    to = ((block * cache_lines + line) * block_tokens + place) * head_dim + dim
                    store_lanes(numbers, args[CACHE] + to * bytes_, kind, literally(lanes), False)
