"""What layers do with each token by itself, on a CPU (device.py has the meaning): one launch each, a few tokens a task.

    keep        reads qkv [tokens, heads, head_dim] once, writes its queries, and its keys and values into the cache
    normalise   reads x once, then from the processor's cache; writes the norm

Each reads and writes what it must and nothing else; PyTorch's operations took 10 to 20 launches for the same. Biases
and sums, which products in panels add in the same go (panel.py), are added by a launch of their own.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu.team.intrinsics import (
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
from orca.kernels.cpu.team.team import Kernel, new_empty, rows_of

TASK_TOKENS = 4


def tasks_of(tokens: int) -> int:
    return -(-tokens // TASK_TOKENS)


def address_of(tensor: Tensor | None) -> int:
    """0 for what is not there."""
    return 0 if tensor is None else tensor.data_ptr()


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Those that a model in panels calls, for one dtype."""
    return [_keep(dtype), _normalise(dtype)]


def write_kv(qkv: Tensor, kept: KvWrite, bias: Tensor | None = None) -> None:
    assert qkv.is_contiguous()
    if bias is not None:
        _add_to(qkv, None, bias)
    tokens, heads, head_dim = qkv.shape
    blocks, lines, block_tokens, _ = kept.cache.shape
    norm = kept.head_norm
    if norm is not None:
        assert norm.bias is None
        assert norm.weight.shape == (heads - lines // 2, head_dim)
        assert norm.weight.dtype == qkv.dtype
        assert norm.weight.is_contiguous()
    _keep(qkv.dtype)(
        tasks_of(tokens),
        qkv.data_ptr(),
        *kept_addresses(kept, tokens),
        *(rows_of(qkv), heads, blocks, lines, block_tokens, head_dim),
        *((0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)),
    )


def kept_addresses(kept: KvWrite, tokens: int) -> tuple[int, int, int]:
    """Of turns, or 0, slots and cache."""
    turns, slots, cache = kept.turns, kept.slots, kept.cache
    assert slots.shape == (tokens,)
    assert slots.dtype == torch.int64
    assert turns is None or (turns.dtype == torch.complex64 and turns.numel() * 2 == tokens * cache.shape[3])
    assert all(each is None or each.is_contiguous() for each in (turns, slots, cache))
    return address_of(turns), slots.data_ptr(), cache.data_ptr()


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
        first = take(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
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
            first = take(args) * TASK_TOKENS

    return Kernel(f"keep-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _turn(row: Any, turns: Any, kind: Any) -> None:
    """Pairs of neighbours times complex numbers."""
    for pair in range(len(row) // 2):
        real_, imaginary = wide(row[2 * pair]), wide(row[2 * pair + 1])
        cos, sin = turns[2 * pair], turns[2 * pair + 1]
        row[2 * pair] = narrow(real_ * cos - imaginary * sin, kind)
        row[2 * pair + 1] = narrow(real_ * sin + imaginary * cos, kind)


def normalise(x: Tensor, norm: NormParameters) -> Tensor:
    assert x.is_contiguous()
    tokens, width = rows_of(x), x.shape[1]
    normed = new_empty(x.dtype, tokens, width)
    weight, bias, eps = norm_arguments(norm, x)
    _normalise(x.dtype)(tasks_of(len(x)), x.data_ptr(), weight, bias, normed.data_ptr(), tokens, width, eps)
    return normed


def norm_arguments(norm: NormParameters | None, x: Tensor) -> tuple[int, int, float]:
    """Addresses of weight and bias, 0 for what is not there, and eps, of a norm for rows x."""
    if norm is None:
        return 0, 0, 0.0
    for each in (norm.weight, norm.bias):
        assert each is None or (each.shape == x.shape[1:] and each.dtype == x.dtype and each.is_contiguous())
    return norm.weight.data_ptr(), address_of(norm.bias), norm.eps


@cache
def _normalise(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = BITS_OF[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, width, eps = args[6], args[7], np.float32(real(args[8]))
        first = take(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                behind = token * width * kind_bytes
                normalise_row(args[5] + behind, args[2] + behind, args[3], args[4], width, eps, kind)
            first = take(args) * TASK_TOKENS

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


def add_normalise(x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
    assert x.is_contiguous()
    _add_to(x, added, bias)
    return normalise(x, norm)


def _add_to(x: Tensor, added: Tensor | None, bias: Tensor | None) -> None:
    """x [tokens, ...] += added + bias, rounded once."""
    width = math.prod(x.shape[1:])
    assert added is None or (added.shape == x.shape and added.dtype == x.dtype and added.is_contiguous())
    assert bias is None or (bias.numel() == width and bias.dtype == x.dtype and bias.is_contiguous())
    _add(x.dtype)(tasks_of(len(x)), x.data_ptr(), address_of(added), address_of(bias), rows_of(x), width)


@cache
def _add(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = BITS_OF[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, width = args[5], args[6]
        first = take(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                behind = token * width * kind_bytes
                added_at = 0 if args[3] == 0 else args[3] + behind
                _add_row(args[2] + behind, added_at, args[4], width, kind)
            first = take(args) * TASK_TOKENS

    return Kernel(f"add-{dtype}", body)


@njit(**IN_ORDER)  # type: ignore[untyped-decorator]
def _add_row(x_at: Any, added_at: Any, bias_at: Any, width: Any, kind: Any) -> None:
    """From left to right, by addresses; one at 0 is none."""
    x, added = carray(elements(x_at, kind), (width,)), carray(elements(added_at, kind), (width,))
    bias = carray(elements(bias_at, kind), (width,))
    for d in range(width):
        sum_ = wide(x[d])
        if added_at != 0:
            sum_ += wide(added[d])
        if bias_at != 0:
            sum_ += wide(bias[d])
        x[d] = narrow(sum_, kind)
