"""What is found by its place or its size, on a CPU (device.py has the meaning): one launch each.

take_rows   reads and writes what it takes once
embed       reads a row or two for each token, writes their sum; a row out of panels takes the lines of its whole panel
largest     reads [rows, width] of float32 once, and of each row again the part that has its largest number
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.cpu.attention.tile import largest_of
from orca.kernels.cpu.rows import TASK_TOKENS, address_of, tasks_of
from orca.kernels.cpu.team.intrinsics import BITS_OF, FAST, elements, narrow, prefetch, take, wide
from orca.kernels.cpu.team.team import Kernel, new_empty, rows_of


def kernels(dtype: torch.dtype, table_dtype: torch.dtype) -> list[Kernel]:
    """Those that a model in panels calls, of activations and embeddings in these dtypes."""
    return [_increment, _take_rows, _largest, _embed(table_dtype, dtype)]


def increment(at: int) -> None:
    _increment(1, at)


def _add_one(args: Any) -> None:
    carray(elements(args[2], np.int64), (1,))[0] += 1


_increment = Kernel("add_one", _add_one)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    assert rows.dtype == torch.int64
    assert rows.is_contiguous()
    assert x.is_contiguous()
    many = rows_of(rows)
    taken = new_empty(x.dtype, many, *x.shape[1:])
    row_bytes = x.element_size() * math.prod(x.shape[1:])
    _take_rows(tasks_of(len(rows)), x.data_ptr(), rows.data_ptr(), taken.data_ptr(), many, row_bytes)
    return taken


def _copy_rows(args: Any) -> None:
    many, row_bytes = args[5], args[6]
    rows = carray(elements(args[3], np.int64), (many,))
    first = take(args) * TASK_TOKENS
    while first < many:
        for row in range(first, min(first + TASK_TOKENS, many)):
            of = carray(elements(args[2] + rows[row] * row_bytes, np.int8), (row_bytes,))
            to = carray(elements(args[4] + row * row_bytes, np.int8), (row_bytes,))
            for byte in range(row_bytes):
                to[byte] = of[byte]
        first = take(args) * TASK_TOKENS


_take_rows = Kernel("take_rows", _copy_rows)


class RowLayout(NamedTuple):
    """Where the numbers of a table's row lie, counted in numbers.

    Row r begins in block r // (vectors x lanes), at (r // lanes % vectors) x vector + (r % lanes) x lane, with
    `together` of its `width` numbers; the next ones are `step` further on.
    """

    width: int
    together: int
    step: int
    block: int  # from one to the next, as `vector` and `lane`
    vectors: int = 1
    vector: int = 0
    lanes: int = 1
    lane: int = 0


def embed(table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor:
    width = table.shape[1]
    return embed_from(table, RowLayout(width, width, width, width), ids, places, positions, dtype)


def embed_from(
    table: Tensor, layout: RowLayout, ids: Tensor, places: Tensor | None, positions: Tensor, dtype: torch.dtype
) -> Tensor:
    """`embed`, out of a table that lies in memory in another way."""
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in (ids, positions))
    assert table.is_contiguous()
    # Inputs lie in pairs only beside rows of their own dtype (tile.py).
    assert layout.together in (1, layout.width) or (layout.together == 2 and table.dtype == dtype == torch.bfloat16)
    assert layout.width % layout.together == 0
    assert places is None or (places.is_contiguous() and places.dtype == dtype and places.shape[1] == layout.width)
    tokens = rows_of(ids)
    embedded = new_empty(dtype, tokens, layout.width)
    addresses = (table.data_ptr(), ids.data_ptr(), address_of(places), positions.data_ptr(), embedded.data_ptr())
    _embed(table.dtype, dtype)(tasks_of(len(ids)), *addresses, tokens, *layout)
    return embedded


@cache
def _embed(table_dtype: torch.dtype, dtype: torch.dtype) -> Kernel:
    table_kind, table_bytes = BITS_OF[table_dtype], table_dtype.itemsize
    kind, row_bytes, is_same = BITS_OF[dtype], dtype.itemsize, table_dtype == dtype
    word = np.uint32 if table_bytes == 4 else np.uint16

    def body(args: Any) -> None:
        tokens, width, together, step, block = args[7], args[8], args[9], args[10], args[11]
        vectors, vector, lanes, lane = args[12], args[13], args[14], args[15]
        ids, positions = carray(elements(args[3], np.int64), (tokens,)), carray(elements(args[5], np.int64), (tokens,))
        step_bytes = table_bytes if together == width else step * table_bytes
        first = take(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                row = ids[token]
                begin = row // (vectors * lanes) * block + row // lanes % vectors * vector + row % lanes * lane
                of, to = args[2] + begin * table_bytes, args[6] + token * width * row_bytes
                if not is_same:
                    _widen(to, of, width, step_bytes, table_bytes, table_kind)
                elif 1 < together < width:  # pairs
                    _move(to, of, width // 2, step_bytes, 4, np.uint32)
                else:
                    _move(to, of, width, step_bytes, table_bytes, word)
                if args[4] != 0:
                    _add(to, args[4] + positions[token] * width * row_bytes, width, kind)
            first = take(args) * TASK_TOKENS

    return Kernel(f"embed-{table_dtype}-{dtype}", body)


_AHEAD = 24
"""Of pieces of a row that lie apart, how far behind the one that is read one is asked for."""


@njit(**FAST)  # type: ignore[untyped-decorator]
def _move(to: Any, of: Any, many: Any, step_bytes: Any, size: Any, word: Any) -> None:
    """Words of so many bytes, `step_bytes` from one to the next, to a row without gaps."""
    row = carray(elements(to, word), (many,))
    if step_bytes == size:
        words = carray(elements(of, word), (many,))
        for d in range(many):
            row[d] = words[d]
    else:
        for d in range(many):
            prefetch(of + _AHEAD * step_bytes)
            row[d] = carray(elements(of, word), (1,))[0]
            of += step_bytes


@njit(**FAST)  # type: ignore[untyped-decorator]
def _widen(to: Any, of: Any, many: Any, step_bytes: Any, size: Any, kind: Any) -> None:
    """As `_move`, half precision to float32."""
    row = carray(elements(to, np.float32), (many,))
    if step_bytes == size:
        numbers = carray(elements(of, kind), (many,))
        for d in range(many):
            row[d] = wide(numbers[d])
    else:
        for d in range(many):
            prefetch(of + _AHEAD * step_bytes)
            row[d] = wide(carray(elements(of, kind), (1,))[0])
            of += step_bytes


@njit(**FAST)  # type: ignore[untyped-decorator]
def _add(to: Any, of: Any, many: Any, kind: Any) -> None:
    row, numbers = carray(elements(to, kind), (many,)), carray(elements(of, kind), (many,))
    for d in range(many):
        row[d] = narrow(wide(row[d]) + wide(numbers[d]), kind)


_PART = 512
"""Of a row, the numbers that are gone through at a time for the largest of them, which is done by vectors. The place
of the largest in the row is looked for in one part, number by number."""


def argmax(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    rows, width = rows_of(x), x.shape[1]
    places = new_empty(torch.int64, rows)
    _largest(len(x), x.data_ptr(), places.data_ptr(), rows, width)
    return places


def _find_largest(args: Any) -> None:
    rows, width = args[4], args[5]
    places = carray(elements(args[3], np.int64), (rows,))
    row = take(args)
    while row < rows:
        at, most, place = args[2] + row * width * 4, np.float32(-np.inf), 0
        for first in range(0, width, _PART):
            here = largest_of(at + first * 4, min(_PART, width - first))
            if here > most:
                most, place = here, first
        numbers = carray(elements(at, np.float32), (width,))
        while place < width - 1 and numbers[place] != most:
            place += 1
        places[row] = place
        row = take(args)


_largest = Kernel("largest", _find_largest)
