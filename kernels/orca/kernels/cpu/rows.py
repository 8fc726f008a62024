"""Operations on single tokens on a CPU (see device.py). Each is one launch, with a few tokens per task.

    write_kv    reads qkv [tokens, heads, head_dim] once, writes its queries, and its keys and values into the cache
    normalise   reads x once from memory, then from the processor's cache; writes the norm

Each reads and writes only what it must; PyTorch's operations took 10 to 20 launches for the same. Biases and sums are
added by a launch of their own here; products with packed weights add them in the same launch (panel.py).
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
    FAST,
    IN_ORDER,
    KERNEL_TYPES,
    float_argument,
    from_float32,
    next_task,
    pointer,
    sum_of,
    sum_of_squares,
    to_float32,
)
from orca.kernels.cpu.team.team import Kernel, new_empty, row_count

TASK_TOKENS = 4


def tasks_of(tokens: int) -> int:
    return -(-tokens // TASK_TOKENS)


def address_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """Return the kernels that a model with packed weights calls, for one dtype."""
    return [_write_kv(dtype), _normalise(dtype)]


def write_kv(qkv: Tensor, kv: KvWrite, bias: Tensor | None = None) -> None:
    assert qkv.is_contiguous()
    if bias is not None:
        _add_to(qkv, None, bias)
    tokens, heads, head_dim = qkv.shape
    blocks, lines, block_tokens, _ = kv.cache.shape
    norm = kv.head_norm
    if norm is not None:
        assert norm.bias is None
        assert norm.weight.shape == (heads - lines // 2, head_dim)
        assert norm.weight.dtype == qkv.dtype
        assert norm.weight.is_contiguous()
    _write_kv(qkv.dtype)(
        tasks_of(tokens),
        qkv.data_ptr(),
        *kv_addresses(kv, tokens),
        *(row_count(qkv), heads, blocks, lines, block_tokens, head_dim),
        *((0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)),
    )


def kv_addresses(kv: KvWrite, tokens: int) -> tuple[int, int, int]:
    """Return the addresses of rotations (0 for none), slots and cache."""
    rotations, slots, cache = kv.rotations, kv.slots, kv.cache
    assert slots.shape == (tokens,)
    assert slots.dtype == torch.int64
    assert rotations is None or (
        rotations.dtype == torch.complex64 and rotations.numel() * 2 == tokens * cache.shape[3]
    )
    assert all(tensor is None or tensor.is_contiguous() for tensor in (rotations, slots, cache))
    return address_of(rotations), slots.data_ptr(), cache.data_ptr()


@cache
def _write_kv(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = KERNEL_TYPES[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, heads, blocks, cache_lines, block_tokens, head_dim = (
            args[6],
            args[7],
            args[8],
            args[9],
            args[10],
            args[11],
        )
        head_bytes, norm_at, eps = head_dim * kind_bytes, args[12], np.float32(float_argument(args[13]))
        qkv = carray(pointer(args[2], kind), (tokens, heads, head_dim))
        rotations = carray(pointer(args[3], np.float32), (tokens, head_dim))
        slots = carray(pointer(args[4], np.int64), (tokens,))
        cache = carray(pointer(args[5], kind), (blocks, cache_lines, block_tokens, head_dim))
        first = next_task(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                for head in range(heads - cache_lines // 2):
                    if norm_at != 0:
                        at = args[2] + (token * heads + head) * head_bytes
                        normalise_row(at, at, norm_at + head * head_bytes, 0, head_dim, eps, kind)
                    if args[3] != 0:
                        _rotate(qkv[token, head], rotations[token], kind)
                block, place = slots[token] // block_tokens, slots[token] % block_tokens
                for head in range(cache_lines):
                    to, of = cache[block, head, place], qkv[token, heads - cache_lines + head]
                    for d in range(head_dim):
                        to[d] = of[d]
            first = next_task(args) * TASK_TOKENS

    return Kernel(f"write_kv-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _rotate(row: Any, rotations: Any, kind: Any) -> None:
    """Multiply pairs of neighbouring numbers by complex numbers."""
    for pair in range(len(row) // 2):
        real_, imaginary = to_float32(row[2 * pair]), to_float32(row[2 * pair + 1])
        cos, sin = rotations[2 * pair], rotations[2 * pair + 1]
        row[2 * pair] = from_float32(real_ * cos - imaginary * sin, kind)
        row[2 * pair + 1] = from_float32(real_ * sin + imaginary * cos, kind)


def normalise(x: Tensor, norm: NormParameters) -> Tensor:
    assert x.is_contiguous()
    tokens, width = row_count(x), x.shape[1]
    normed = new_empty(x.dtype, tokens, width)
    weight, bias, eps = norm_arguments(norm, x)
    _normalise(x.dtype)(tasks_of(len(x)), x.data_ptr(), weight, bias, normed.data_ptr(), tokens, width, eps)
    return normed


def norm_arguments(norm: NormParameters | None, x: Tensor) -> tuple[int, int, float]:
    """Return the addresses of weight and bias (0 for none) and eps of a norm of rows x."""
    if norm is None:
        return 0, 0, 0.0
    for tensor in (norm.weight, norm.bias):
        assert tensor is None or (tensor.shape == x.shape[1:] and tensor.dtype == x.dtype and tensor.is_contiguous())
    return norm.weight.data_ptr(), address_of(norm.bias), norm.eps


@cache
def _normalise(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = KERNEL_TYPES[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, width, eps = args[6], args[7], np.float32(float_argument(args[8]))
        first = next_task(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                behind = token * width * kind_bytes
                normalise_row(args[5] + behind, args[2] + behind, args[3], args[4], width, eps, kind)
            first = next_task(args) * TASK_TOKENS

    return Kernel(f"normalise-{dtype}", body)


@njit(**IN_ORDER)  # type: ignore[untyped-decorator]
def normalise_row(normed_at: Any, x_at: Any, weight_at: Any, bias_at: Any, width: Any, eps: Any, kind: Any) -> None:
    """Normalise one token. All arguments are addresses; a bias at 0 means none.

    The order of operations is fixed, so that every kernel computes the same bits for a token.
    """
    normed, x = carray(pointer(normed_at, kind), (width,)), carray(pointer(x_at, kind), (width,))
    weight, bias = carray(pointer(weight_at, kind), (width,)), carray(pointer(bias_at, kind), (width,))
    mean = np.float32(0.0) if bias_at == 0 else sum_of(x_at, width, kind) / np.float32(width)
    squares = sum_of_squares(x_at, width, mean, kind)
    factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(width) + eps))
    if bias_at == 0:
        for d in range(width):
            normed[d] = from_float32(to_float32(x[d]) * factor * to_float32(weight[d]), kind)
    else:
        for d in range(width):
            normed[d] = from_float32(
                (to_float32(x[d]) - mean) * factor * to_float32(weight[d]) + to_float32(bias[d]), kind
            )


def add_normalise(x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
    assert x.is_contiguous()
    _add_to(x, added, bias)
    return normalise(x, norm)


def _add_to(x: Tensor, added: Tensor | None, bias: Tensor | None) -> None:
    """Compute x [tokens, ...] += added + bias, rounded once."""
    width = math.prod(x.shape[1:])
    assert added is None or (added.shape == x.shape and added.dtype == x.dtype and added.is_contiguous())
    assert bias is None or (bias.numel() == width and bias.dtype == x.dtype and bias.is_contiguous())
    _add(x.dtype)(tasks_of(len(x)), x.data_ptr(), address_of(added), address_of(bias), row_count(x), width)


@cache
def _add(dtype: torch.dtype) -> Kernel:
    kind, kind_bytes = KERNEL_TYPES[dtype], dtype.itemsize

    def body(args: Any) -> None:
        tokens, width = args[5], args[6]
        first = next_task(args) * TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + TASK_TOKENS, tokens)):
                behind = token * width * kind_bytes
                added_at = 0 if args[3] == 0 else args[3] + behind
                _add_row(args[2] + behind, added_at, args[4], width, kind)
            first = next_task(args) * TASK_TOKENS

    return Kernel(f"add-{dtype}", body)


@njit(**IN_ORDER)  # type: ignore[untyped-decorator]
def _add_row(x_at: Any, added_at: Any, bias_at: Any, width: Any, kind: Any) -> None:
    """Add from left to right. All arguments are addresses; 0 means none."""
    x, added = carray(pointer(x_at, kind), (width,)), carray(pointer(added_at, kind), (width,))
    bias = carray(pointer(bias_at, kind), (width,))
    for d in range(width):
        sum_ = to_float32(x[d])
        if added_at != 0:
            sum_ += to_float32(added[d])
        if bias_at != 0:
            sum_ += to_float32(bias[d])
        x[d] = from_float32(sum_, kind)
