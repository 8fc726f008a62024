"""Lookups by index or by size on a CPU (see device.py). Each is one launch.

take_rows   reads and writes each row once
embed       reads one or two rows per token and writes their sum; a row of a packed weight touches the cache lines of
            its whole panel
argmax      reads [rows, width] of float32 once, and the part of each row with its largest number again
mask_tokens reads a bit for each number of some rows, and writes the numbers that are left out
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.cpu.attention.tile import max_of
from orca.kernels.cpu.rows import TASK_TOKENS, address_of, tasks_of
from orca.kernels.cpu.team.intrinsics import (
    FAST,
    KERNEL_TYPES,
    float_argument,
    from_float32,
    next_task,
    pointer,
    prefetch,
    to_float32,
)
from orca.kernels.cpu.team.team import Kernel, new_empty, row_count


def kernels(dtype: torch.dtype, table_dtype: torch.dtype) -> list[Kernel]:
    """Return the kernels that a model with packed weights calls, for these dtypes of activations and embeddings."""
    return [_increment, _take_rows, _largest, _mask_tokens, _embed(table_dtype, dtype)]


def increment(at: int) -> None:
    _increment(1, at)


def _add_one(args: Any) -> None:
    carray(pointer(args[2], np.int64), (1,))[0] += 1


_increment = Kernel("increment", _add_one)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    assert rows.dtype == torch.int64
    assert rows.is_contiguous()
    assert x.is_contiguous()
    many = row_count(rows)
    taken = new_empty(x.dtype, many, *x.shape[1:])
    row_bytes = x.element_size() * math.prod(x.shape[1:])
    _take_rows(tasks_of(len(rows)), x.data_ptr(), rows.data_ptr(), taken.data_ptr(), many, row_bytes)
    return taken


def _copy_rows(args: Any) -> None:
    many, row_bytes = args[5], args[6]
    rows = carray(pointer(args[3], np.int64), (many,))
    first = next_task(args) * TASK_TOKENS
    while first < many:
        for row in range(first, min(first + TASK_TOKENS, many)):
            of = carray(pointer(args[2] + rows[row] * row_bytes, np.int8), (row_bytes,))
            to = carray(pointer(args[4] + row * row_bytes, np.int8), (row_bytes,))
            for byte in range(row_bytes):
                to[byte] = of[byte]
        first = next_task(args) * TASK_TOKENS


_take_rows = Kernel("take_rows", _copy_rows)


class RowLayout(NamedTuple):
    """The places of a row's numbers in a table, counted in numbers.

    Row r begins in block r // (vectors x lanes), at (r // lanes % vectors) x vector + (r % lanes) x lane. There are
    `adjacent` of its `width` numbers; the next ones follow at a distance of `step`.
    """

    width: int
    adjacent: int
    step: int
    block: int  # distance from one block to the next; `vector` and `lane` are distances too
    vectors: int = 1
    vector: int = 0
    lanes: int = 1
    lane: int = 0


def embed(
    table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    width = table.shape[1]
    return embed_from(table, RowLayout(width, width, width, width), ids, places, positions, dtype, scale)


def embed_from(
    table: Tensor,
    layout: RowLayout,
    ids: Tensor,
    places: Tensor | None,
    positions: Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """Do the same as `embed` with a table in another memory layout."""
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in (ids, positions))
    assert table.is_contiguous()
    # Inputs are stored in pairs only if rows have the same dtype (tile.py).
    assert layout.adjacent in (1, layout.width) or (layout.adjacent == 2 and table.dtype == dtype == torch.bfloat16)
    assert layout.width % layout.adjacent == 0
    assert places is None or (places.is_contiguous() and places.dtype == dtype and places.shape[1] == layout.width)
    tokens = row_count(ids)
    embedded = new_empty(dtype, tokens, layout.width)
    addresses = (table.data_ptr(), ids.data_ptr(), address_of(places), positions.data_ptr(), embedded.data_ptr())
    _embed(table.dtype, dtype)(tasks_of(len(ids)), *addresses, tokens, *layout, float(scale))
    return embedded


@cache
def _embed(table_dtype: torch.dtype, dtype: torch.dtype) -> Kernel:
    table_kind, table_bytes = KERNEL_TYPES[table_dtype], table_dtype.itemsize
    kind, row_bytes, is_same = KERNEL_TYPES[dtype], dtype.itemsize, table_dtype == dtype
    word = np.uint32 if table_bytes == 4 else np.uint16

    def body(args: Any) -> None:
        tokens, width, adjacent, step, block = args[7], args[8], args[9], args[10], args[11]
        vectors, vector, lanes, lane = args[12], args[13], args[14], args[15]
        scale = np.float32(float_argument(args[16]))
        ids, positions = (
            carray(pointer(args[3], np.int64), (tokens,)),
            carray(pointer(args[5], np.int64), (tokens,)),
        )
        step_bytes = table_bytes if adjacent == width else step * table_bytes
        first = next_task(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                row = ids[token]
                begin = row // (vectors * lanes) * block + row // lanes % vectors * vector + row % lanes * lane
                of, to = args[2] + begin * table_bytes, args[6] + token * width * row_bytes
                if not is_same:
                    _copy_to_float32(to, of, width, step_bytes, table_bytes, table_kind)
                elif 1 < adjacent < width:  # pairs
                    _copy_strided(to, of, width // 2, step_bytes, 4, np.uint32)
                else:
                    _copy_strided(to, of, width, step_bytes, table_bytes, word)
                if scale != 1.0:
                    _scale(to, scale, width, kind)
                if args[4] != 0:
                    _add(to, args[4] + positions[token] * width * row_bytes, width, kind)
            first = next_task(args) * TASK_TOKENS

    return Kernel(f"embed-{table_dtype}-{dtype}", body)


_PREFETCH_PIECES = 24
"""Prefetch distance in pieces, for rows whose pieces are not contiguous."""


@njit(**FAST)  # type: ignore[untyped-decorator]
def _copy_strided(to: Any, of: Any, many: Any, step_bytes: Any, size: Any, word: Any) -> None:
    """Copy words of `size` bytes, at a distance of `step_bytes`, to a contiguous row."""
    row = carray(pointer(to, word), (many,))
    if step_bytes == size:
        words = carray(pointer(of, word), (many,))
        for d in range(many):
            row[d] = words[d]
    else:
        for d in range(many):
            prefetch(of + _PREFETCH_PIECES * step_bytes)
            row[d] = carray(pointer(of, word), (1,))[0]
            of += step_bytes


@njit(**FAST)  # type: ignore[untyped-decorator]
def _copy_to_float32(to: Any, of: Any, many: Any, step_bytes: Any, size: Any, kind: Any) -> None:
    """Do the same as `_copy_strided`, and convert half precision to float32."""
    row = carray(pointer(to, np.float32), (many,))
    if step_bytes == size:
        numbers = carray(pointer(of, kind), (many,))
        for d in range(many):
            row[d] = to_float32(numbers[d])
    else:
        for d in range(many):
            prefetch(of + _PREFETCH_PIECES * step_bytes)
            row[d] = to_float32(carray(pointer(of, kind), (1,))[0])
            of += step_bytes


@njit(**FAST)  # type: ignore[untyped-decorator]
def _scale(to: Any, scale: Any, many: Any, kind: Any) -> None:
    row = carray(pointer(to, kind), (many,))
    for d in range(many):
        row[d] = from_float32(to_float32(row[d]) * scale, kind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _add(to: Any, of: Any, many: Any, kind: Any) -> None:
    row, numbers = carray(pointer(to, kind), (many,)), carray(pointer(of, kind), (many,))
    for d in range(many):
        row[d] = from_float32(to_float32(row[d]) + to_float32(numbers[d]), kind)


_SCAN_NUMBERS = 512
"""Numbers of a row that are scanned at a time for their largest one, with vector instructions. The index of the row's
largest number is then searched in one such part, number by number. A part is scanned for NaN first, in the cache."""


def argmax(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    rows, width = row_count(x), x.shape[1]
    places = new_empty(torch.int64, rows)
    _largest(len(x), x.data_ptr(), places.data_ptr(), rows, width)
    return places


def mask_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert rows.is_contiguous()
    assert masks.is_contiguous()
    masked, words = masks.shape
    _mask_tokens(masked, logits.data_ptr(), rows.data_ptr(), masks.data_ptr(), masked, logits.shape[1], words)


_BIT = np.uint32(1)


def _mask_rows(args: Any) -> None:
    masked, vocab, words = args[5], args[6], args[7]
    rows = carray(pointer(args[3], np.int64), (masked,))
    place = next_task(args)
    while place < masked:
        numbers = carray(pointer(args[2] + rows[place] * vocab * 4, np.float32), (vocab,))
        mask = carray(pointer(args[4] + place * words * 4, np.uint32), (words,))
        for word in range(words):
            first, bits = 32 * word, mask[word]
            # Without a branch on each bit, vector instructions do it.
            for bit in range(min(32, vocab - first)):
                is_allowed = (bits >> np.uint32(bit)) & _BIT
                numbers[first + bit] = numbers[first + bit] if is_allowed else -np.inf
        place = next_task(args)


_mask_tokens = Kernel("mask_tokens", _mask_rows)


_NOT_SIGN, _INFINITY_WORD = np.int32(0x7FFF_FFFF), np.int32(0x7F80_0000)
"""The bits of a float32 without its sign, and those of infinity. Larger ones are those of NaN."""


@njit(**FAST)  # type: ignore[untyped-decorator]
def _has_nan(at: Any, many: Any) -> Any:
    """Return whether one of the numbers is NaN. There is no early end, so vector instructions do it."""
    words, most = carray(pointer(at, np.int32), (many,)), _INFINITY_WORD
    for d in range(many):
        most = max(most, np.int32(words[d] & _NOT_SIGN))
    return most > _INFINITY_WORD


def _find_largest(args: Any) -> None:
    rows, width = args[4], args[5]
    places = carray(pointer(args[3], np.int64), (rows,))
    row = next_task(args)
    while row < rows:
        at, maximum, place = args[2] + row * width * 4, np.float32(-np.inf), 0
        for first in range(0, width, _SCAN_NUMBERS):
            many = min(_SCAN_NUMBERS, width - first)
            if _has_nan(at + first * 4, many):
                maximum, place = np.float32(np.nan), first
                break
            here = max_of(at + first * 4, many)
            if here > maximum:
                maximum, place = here, first
        numbers = carray(pointer(at, np.float32), (width,))
        while place < width - 1 and numbers[place] != maximum and not np.isnan(numbers[place]):
            place += 1
        places[row] = place
        row = next_task(args)


_largest = Kernel("argmax", _find_largest)
