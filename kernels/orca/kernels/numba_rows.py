"""What layers do with each token by itself, on a CPU (device.py has the meaning): one launch each, a few tokens a task.

    keep        reads qkv [tokens, heads, head_dim] once, writes its queries, and its keys and values into the cache
    rms_norm    reads x (and what is added) once, then from the processor's cache; writes the norm (and the sum)
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

from orca.kernels.numba_intrinsics import BITS_OF, FAST, elements, exp, narrow, real, take, wide
from orca.kernels.numba_team import Kernel

_TASK_TOKENS = 4


def _tasks(tokens: int) -> int:
    return -(-tokens // _TASK_TOKENS)


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """All of them for one dtype."""
    return [of(dtype) for of in (_keep, _rms_norm, _gated_silu)]


def keep(qkv: Tensor, cache: Tensor, slots: Tensor, turns: Tensor | None) -> None:
    assert qkv.is_contiguous()
    assert cache.is_contiguous()
    tokens, heads, head_dim = qkv.shape
    assert slots.shape == (tokens,)
    assert slots.dtype == torch.int64
    assert slots.is_contiguous()
    assert turns is None or (turns.dtype == torch.complex64 and turns.is_contiguous())
    assert turns is None or turns.numel() * 2 == tokens * head_dim
    blocks, kept, block_tokens, _ = cache.shape
    _keep(qkv.dtype)(
        _tasks(tokens),
        qkv,
        cache,
        slots,
        0 if turns is None else turns,
        tokens,
        heads,
        blocks,
        kept,
        block_tokens,
        head_dim,
    )


@cache
def _keep(dtype: torch.dtype) -> Kernel:
    kind = BITS_OF[dtype]

    def body(args: Any) -> None:
        tokens, heads, blocks, kept, block_tokens, head_dim = args[6], args[7], args[8], args[9], args[10], args[11]
        qkv = carray(elements(args[2], kind), (tokens, heads, head_dim))
        cache = carray(elements(args[3], kind), (blocks, kept, block_tokens, head_dim))
        slots = carray(elements(args[4], np.int64), (tokens,))
        turns = carray(elements(args[5], np.float32), (tokens, head_dim))
        first = take(args) * _TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + _TASK_TOKENS, tokens)):
                if args[5] != 0:
                    for head in range(heads - kept // 2):
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.dtype == x.dtype
    assert added is None or (added.is_contiguous() and added.dtype == x.dtype and added.shape == x.shape)
    normed = torch.empty_like(x)
    width = x.shape[-1]
    _rms_norm(x.dtype)(
        _tasks(x.numel() // width), x, weight, 0 if added is None else added, normed, x.numel() // width, width, eps
    )
    return normed


@cache
def _rms_norm(dtype: torch.dtype) -> Kernel:
    kind = BITS_OF[dtype]

    def body(args: Any) -> None:
        tokens, width, eps = args[6], args[7], np.float32(real(args[8]))
        x = carray(elements(args[2], kind), (tokens, width))
        weight = carray(elements(args[3], kind), (width,))
        added = carray(elements(args[4], kind), (tokens, width))
        normed = carray(elements(args[5], kind), (tokens, width))
        first = take(args) * _TASK_TOKENS
        while first < tokens:
            for token in range(first, min(first + _TASK_TOKENS, tokens)):
                if args[4] != 0:
                    _add(x[token], added[token], kind)
                _normalise(normed[token], x[token], weight, eps, kind)
            first = take(args) * _TASK_TOKENS

    return Kernel(f"rms_norm-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _add(row: Any, added: Any, kind: Any) -> None:
    for d in range(len(row)):
        row[d] = narrow(wide(row[d]) + wide(added[d]), kind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _normalise(normed: Any, row: Any, weight: Any, eps: Any, kind: Any) -> None:
    squares = np.float32(0.0)
    for d in range(len(row)):
        squares += wide(row[d]) * wide(row[d])
    factor = np.float32(1.0) / math.sqrt(squares / np.float32(len(row)) + eps)
    for d in range(len(row)):
        normed[d] = narrow(wide(row[d]) * factor * wide(weight[d]), kind)


def gated_silu(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gated = gate_up.new_empty(tokens, width)
    _gated_silu(gate_up.dtype)(tokens, gate_up, gated, tokens, width)
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
    one = np.float32(1.0)
    for d in range(len(gated)):
        x = wide(gate[d])
        # 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
        small = exp(-abs(x))
        gated[d] = narrow(x * (one if x >= 0 else small) / (one + small) * wide(up[d]), kind)
