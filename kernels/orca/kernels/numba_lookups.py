"""What is found by its place or its size, on a CPU (device.py has the meaning): one launch each.

take_rows   reads and writes what it takes once
embed       reads a row or two for each token, writes their sum
largest     reads [rows, width] of float32 once, and of each row again the part that has its largest number
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.numba_attention_tile import largest_of
from orca.kernels.numba_intrinsics import BITS_OF, FAST, elements, narrow, take, wide
from orca.kernels.numba_rows import TASK_TOKENS, tasks_of
from orca.kernels.numba_team import Kernel, new_empty, rows_of


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Those that a model in panels calls, for one dtype."""
    return [_count, _take_rows, _largest, _embed(dtype)]


def count(at: int) -> None:
    _count(1, at)


def _add_one(args: Any) -> None:
    carray(elements(args[2], np.int64), (1,))[0] += 1


_count = Kernel("add_one", _add_one)


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


def embed(table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor) -> Tensor:
    if places is None:
        return take_rows(table, ids)
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in (ids, positions))
    assert table.is_contiguous()
    assert places.is_contiguous()
    assert table.dtype == places.dtype
    tokens, width = rows_of(ids), table.shape[1]
    embedded = new_empty(table.dtype, tokens, width)
    addresses = (each.data_ptr() for each in (table, ids, places, positions, embedded))
    _embed(table.dtype)(tasks_of(len(ids)), *addresses, len(table), len(places), tokens, width)
    return embedded


@cache
def _embed(dtype: torch.dtype) -> Kernel:
    kind = BITS_OF[dtype]

    def body(args: Any) -> None:
        tokens, width = args[9], args[10]
        table, places = (
            carray(elements(args[2], kind), (args[7], width)),
            carray(elements(args[4], kind), (args[8], width)),
        )
        ids, positions = carray(elements(args[3], np.int64), (tokens,)), carray(elements(args[5], np.int64), (tokens,))
        embedded = carray(elements(args[6], kind), (tokens, width))
        first = take(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                _add(embedded[token], table[ids[token]], places[positions[token]], kind)
            first = take(args) * TASK_TOKENS

    return Kernel(f"embed-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _add(row: Any, one: Any, other: Any, kind: Any) -> None:
    for d in range(len(row)):
        row[d] = narrow(wide(one[d]) + wide(other[d]), kind)


_PART = 512
"""Of a row, the numbers that are gone through at a time for the largest of them, which is done by vectors. The place
of the largest in the row is looked for in one part, number by number."""


def largest(x: Tensor) -> Tensor:
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
