"""What layers do with each token by itself, on a CPU (device.py has the meaning): one launch each, a few tokens a task.

    take_rows   reads and writes what it takes once
    embed       reads a row or two for each token, writes their sum
    largest     reads [rows, width] of float32 once, and the row again as far as its largest number
    keep        reads qkv [tokens, heads, head_dim] once, writes its queries, and its keys and values into the cache
    normalise   reads x once, then from the processor's cache; writes the norm
    gated_silu  reads gate and up once, writes half as much

Each reads and writes what it must and nothing else; PyTorch's operations took 10 to 20 launches for the same.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.numba_activations import silu
from orca.kernels.numba_attention_tile import largest_of
from orca.kernels.numba_intrinsics import (
    BITS_OF,
    FAST,
    IN_ORDER,
    elements,
    narrow,
    real,
    sum_of,
    sum_of_squares,
    take,
    wide,
)
from orca.kernels.numba_team import Kernel, new_empty
from orca.kernels.reference import Kept, RowNorm

_TASK_TOKENS = 4


def _tasks(tokens: int) -> int:
    return -(-tokens // _TASK_TOKENS)


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """All of them for one dtype."""
    return [_count, _take_rows, _largest, *(of(dtype) for of in (_embed, _keep, _normalise, _gated_silu))]


def count(at: int) -> None:
    _count(1, at)


def _add_one(args: Any) -> None:
    carray(elements(args[2], np.int64), (1,))[0] += 1


_count = Kernel("add_one", _add_one)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    assert rows.dtype == torch.int64
    assert rows.is_contiguous()
    assert x.is_contiguous()
    taken = new_empty(x.dtype, len(rows), *x.shape[1:])
    row_bytes = x.element_size() * math.prod(x.shape[1:])
    _take_rows(_tasks(len(rows)), x.data_ptr(), rows.data_ptr(), taken.data_ptr(), len(rows), row_bytes)
    return taken


def _copy_rows(args: Any) -> None:
    many, row_bytes = args[5], args[6]
    rows = carray(elements(args[3], np.int64), (many,))
    first = take(args) * _TASK_TOKENS
    while first < many:
        for row in range(first, min(first + _TASK_TOKENS, many)):
            of = carray(elements(args[2] + rows[row] * row_bytes, np.int8), (row_bytes,))
            to = carray(elements(args[4] + row * row_bytes, np.int8), (row_bytes,))
            for byte in range(row_bytes):
                to[byte] = of[byte]
        first = take(args) * _TASK_TOKENS


_take_rows = Kernel("take_rows", _copy_rows)


def embed(table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor) -> Tensor:
    if places is None:
        return take_rows(table, ids)
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in (ids, positions))
    assert table.is_contiguous()
    assert places.is_contiguous()
    assert table.dtype == places.dtype
    tokens, width = len(ids), table.shape[1]
    embedded = new_empty(table.dtype, tokens, width)
    addresses = (each.data_ptr() for each in (table, ids, places, positions, embedded))
    _embed(table.dtype)(_tasks(tokens), *addresses, len(table), len(places), tokens, width)
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
        first = take(args) * _TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + _TASK_TOKENS, tokens)):
                _add(embedded[token], table[ids[token]], places[positions[token]], kind)
            first = take(args) * _TASK_TOKENS

    return Kernel(f"embed-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _add(row: Any, one: Any, other: Any, kind: Any) -> None:
    for d in range(len(row)):
        row[d] = narrow(wide(one[d]) + wide(other[d]), kind)


def largest(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    places = new_empty(torch.int64, len(x))
    _largest(len(x), x.data_ptr(), places.data_ptr(), *x.shape)
    return places


def _find_largest(args: Any) -> None:
    rows, width = args[4], args[5]
    places = carray(elements(args[3], np.int64), (rows,))
    row = take(args)
    while row < rows:
        at = args[2] + row * width * 4
        numbers, most = carray(elements(at, np.float32), (width,)), largest_of(at, width)
        place = 0
        while place < width - 1 and numbers[place] != most:
            place += 1
        places[row] = place
        row = take(args)


_largest = Kernel("largest", _find_largest)


def keep(qkv: Tensor, kept: Kept) -> None:
    assert qkv.is_contiguous()
    tokens, heads, head_dim = qkv.shape
    blocks, lines, block_tokens, _ = kept.cache.shape
    norm = kept.head_norm
    if norm is not None:
        assert norm.bias is None
        assert norm.weight.shape == (heads - lines // 2, head_dim)
        assert norm.weight.dtype == qkv.dtype
        assert norm.weight.is_contiguous()
    _keep(qkv.dtype)(
        _tasks(tokens),
        qkv.data_ptr(),
        *kept_addresses(kept, tokens),
        *(tokens, heads, blocks, lines, block_tokens, head_dim),
        *((0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)),
    )


def kept_addresses(kept: Kept, tokens: int) -> tuple[int, int, int]:
    """Of turns, or 0, slots and cache."""
    turns, slots, cache = kept.turns, kept.slots, kept.cache
    assert slots.shape == (tokens,)
    assert slots.dtype == torch.int64
    assert turns is None or (turns.dtype == torch.complex64 and turns.numel() * 2 == tokens * cache.shape[3])
    assert all(each is None or each.is_contiguous() for each in (turns, slots, cache))
    return 0 if turns is None else turns.data_ptr(), slots.data_ptr(), cache.data_ptr()


@cache
def _keep(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = BITS_OF[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, heads, blocks, kept, block_tokens, head_dim = args[6], args[7], args[8], args[9], args[10], args[11]
        head_bytes, norm_at, eps = head_dim * kind_bytes, args[12], np.float32(real(args[13]))
        qkv = carray(elements(args[2], kind), (tokens, heads, head_dim))
        turns = carray(elements(args[3], np.float32), (tokens, head_dim))
        slots = carray(elements(args[4], np.int64), (tokens,))
        cache = carray(elements(args[5], kind), (blocks, kept, block_tokens, head_dim))
        first = take(args) * _TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + _TASK_TOKENS, tokens)):
                for head in range(heads - kept // 2):
                    if norm_at != 0:
                        at = args[2] + (token * heads + head) * head_bytes
                        normalise_row(at, at, norm_at + head * head_bytes, 0, head_dim, eps, kind)
                    if args[3] != 0:
                        _turn(qkv[token, head], turns[token], kind)
                block, place = slots[token] // block_tokens, slots[token] % block_tokens
                for head in range(kept):
                    to, of = cache[block, head, place], qkv[token, heads - kept + head]
                    for d in range(head_dim):
                        to[d] = of[d]
            first = take(args) * _TASK_TOKENS

    return Kernel(f"keep-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _turn(row: Any, turns: Any, kind: Any) -> None:
    """Pairs of neighbours times complex numbers."""
    for pair in range(len(row) // 2):
        real_, imaginary = wide(row[2 * pair]), wide(row[2 * pair + 1])
        cos, sin = turns[2 * pair], turns[2 * pair + 1]
        row[2 * pair] = narrow(real_ * cos - imaginary * sin, kind)
        row[2 * pair + 1] = narrow(real_ * sin + imaginary * cos, kind)


def normalise(x: Tensor, norm: RowNorm) -> Tensor:
    assert x.is_contiguous()
    normed = new_empty(x.dtype, *x.shape)
    tokens, width = x.shape
    weight, bias, eps = norm_arguments(norm, x)
    _normalise(x.dtype)(_tasks(tokens), x.data_ptr(), weight, bias, normed.data_ptr(), tokens, width, eps)
    return normed


def norm_arguments(norm: RowNorm | None, x: Tensor) -> tuple[int, int, float]:
    """Addresses of weight and bias, 0 for what is not there, and eps, of a norm for rows x."""
    if norm is None:
        return 0, 0, 0.0
    for each in (norm.weight, norm.bias):
        assert each is None or (each.shape == x.shape[1:] and each.dtype == x.dtype and each.is_contiguous())
    return norm.weight.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr(), norm.eps


@cache
def _normalise(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = BITS_OF[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, width, eps = args[6], args[7], np.float32(real(args[8]))
        first = take(args) * _TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + _TASK_TOKENS, tokens)):
                behind = token * width * kind_bytes
                normalise_row(args[5] + behind, args[2] + behind, args[3], args[4], width, eps, kind)
            first = take(args) * _TASK_TOKENS

    return Kernel(f"normalise-{dtype}", body)


@njit(**IN_ORDER)  # type: ignore[untyped-decorator]
def normalise_row(normed_at: Any, x_at: Any, weight_at: Any, bias_at: Any, width: Any, eps: Any, kind: Any) -> None:
    """RowNorm of one token, by addresses; a bias at 0 is none. In one order of operations, so that a token's norm is
    the same in every kernel."""
    normed, x = carray(elements(normed_at, kind), (width,)), carray(elements(x_at, kind), (width,))
    weight, bias = carray(elements(weight_at, kind), (width,)), carray(elements(bias_at, kind), (width,))
    mean = np.float32(0.0) if bias_at == 0 else sum_of(x_at, width, kind) / np.float32(width)
    squares = sum_of_squares(x_at, width, mean, kind)
    factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(width) + eps))
    if bias_at == 0:
        for d in range(width):
            normed[d] = narrow(wide(x[d]) * factor * wide(weight[d]), kind)
    else:
        for d in range(width):
            normed[d] = narrow((wide(x[d]) - mean) * factor * wide(weight[d]) + wide(bias[d]), kind)


def gated_silu(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gated = new_empty(gate_up.dtype, tokens, width)
    _gated_silu(gate_up.dtype)(tokens, gate_up.data_ptr(), gated.data_ptr(), tokens, width)
    return gated


@cache
def _gated_silu(dtype: torch.dtype) -> Kernel:
    kind = BITS_OF[dtype]

    def body(args: Any) -> None:
        tokens, width = args[4], args[5]
        gate_up = carray(elements(args[2], kind), (tokens, 2, width))
        gated = carray(elements(args[3], kind), (tokens, width))
        token = take(args)
        while token < tokens:
            _gate(gated[token], gate_up[token, 0], gate_up[token, 1], kind)
            token = take(args)

    return Kernel(f"gated_silu-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _gate(gated: Any, gate: Any, up: Any, kind: Any) -> None:
    for d in range(len(gated)):
        gated[d] = narrow(silu(wide(gate[d])) * wide(up[d]), kind)
