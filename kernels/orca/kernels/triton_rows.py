"""What layers do with each token by itself, on a GPU; each reads its rows once and writes them once.

A program has one token, or a run of numbers. Everything is computed in float32 and rounded once, to the rows' dtype;
between a head's norm and its turn it is rounded, as it would be where these are two kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.reference import Kept, RowNorm

_HEADS = 8
"""Heads of a program of `keep`."""
RUN = 1024
"""Numbers of a program of `gated_silu`."""


@triton.jit  # type: ignore[untyped-decorator]
def normalise_rows(  # type: ignore[no-untyped-def]
    x, weight, bias, normed, width, eps, has_bias: tl.constexpr, block: tl.constexpr
):
    """[tokens, width]: 2 x width elements moved per token, and the weights from the cache. block: at least width."""
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    is_mine = column < width
    row = tl.load(x + at + column, mask=is_mine, other=0.0).to(tl.float32)
    scaled = tl.load(weight + column, mask=is_mine, other=0.0).to(tl.float32)
    if has_bias:
        row = tl.where(is_mine, row - tl.sum(row) / width, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(row * row) / width + eps)
    result = row * factor * scaled
    if has_bias:
        result += tl.load(bias + column, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(normed + at + column, result.to(normed.dtype.element_ty), mask=is_mine)


@triton.jit  # type: ignore[untyped-decorator]
def gate_rows(gate_up, gated, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up of one run of a token's numbers: 3 x width elements moved per token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_mine = column < width
    at = gate_up + token * 2 * width + column
    gate = tl.load(at, mask=is_mine, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_mine, other=0.0).to(tl.float32)
    # Of the two forms of the sigmoid the one whose power cannot overflow.
    power = tl.exp(-tl.abs(gate))
    result = gate * tl.where(gate < 0, power, 1.0) / (1.0 + power) * up
    tl.store(gated + token * width + column, result.to(gated.dtype.element_ty), mask=is_mine)


@triton.jit  # type: ignore[untyped-decorator]
def keep_rows(  # type: ignore[no-untyped-def]
    qkv,
    cache,
    slots,
    turns,
    head_norm,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    is_turned: tl.constexpr,
    is_normed: tl.constexpr,
    block_heads: tl.constexpr,
    half: tl.constexpr,
):
    """Some heads of one token, as pairs of neighbouring dimensions. half: at least head_dim / 2.

    heads: of queries; behind them come kv_heads of keys, then of values.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    is_head = head < heads + 2 * kv_heads
    # Queries and keys are changed in place; keys and values go into the cache.
    is_changed = head < heads + kv_heads
    pair = tl.arange(0, half)
    dim = tl.arange(0, 2 * half)
    is_dim = dim < head_dim
    is_mine = is_head[:, None] & is_dim[None, :]
    at = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * head_dim + dim[None, :]
    row = tl.load(at, mask=is_mine, other=0.0)
    changed = row.to(tl.float32)
    if is_normed:
        factor = 1.0 / tl.sqrt(tl.sum(changed * changed, axis=1) / head_dim + eps)
        weight_at = head_norm + head[:, None] * head_dim + dim[None, :]
        weight = tl.load(weight_at, mask=is_changed[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
        changed = (changed * factor[:, None] * weight).to(row.dtype).to(tl.float32)
    if is_turned:
        even, odd = tl.split(tl.reshape(changed, (block_heads, half, 2)))
        turn_at = turns + token * head_dim + 2 * pair
        cos = tl.load(turn_at, mask=2 * pair < head_dim, other=0.0)[None, :]
        sin = tl.load(turn_at + 1, mask=2 * pair < head_dim, other=0.0)[None, :]
        joined = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        changed = tl.reshape(joined, (block_heads, 2 * half))
    if is_normed or is_turned:
        row = tl.where(is_changed[:, None], changed.to(row.dtype), row)
        tl.store(at, row, mask=is_mine & is_changed[:, None])
    slot = tl.load(slots + token)
    line = head - heads
    cache_line = (slot // block_tokens * (2 * kv_heads) + line) * block_tokens + slot % block_tokens
    to = cache + cache_line[:, None] * head_dim + dim[None, :]
    tl.store(to, row, mask=is_mine & (line >= 0)[:, None])


def normalise(x: Tensor, norm: RowNorm) -> Tensor:
    """As device.Kernels.normalise."""
    assert x.is_contiguous()
    assert norm.weight.is_contiguous()
    normed = torch.empty_like(x)
    tokens, width = x.shape
    if tokens:
        block = triton.next_power_of_2(width)
        bias = norm.weight if norm.bias is None else norm.bias
        normalise_rows[(tokens,)](
            x,
            norm.weight,
            bias,
            normed,
            width,
            norm.eps,
            has_bias=norm.bias is not None,
            block=block,
            num_warps=norm_warps(width),
        )
    return normed


def gated_silu(gate_up: Tensor) -> Tensor:
    """As device.Kernels.gated_silu."""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gated = gate_up.new_empty(tokens, width)
    if tokens:
        gate_rows[(tokens, triton.cdiv(width, RUN))](gate_up, gated, width, block=RUN)
    return gated


def keep(qkv: Tensor, kept: Kept) -> None:
    """As device.Kernels.keep."""
    assert qkv.is_contiguous()
    assert kept.cache.is_contiguous()
    tokens, heads, head_dim = qkv.shape
    lines, block_tokens = kept.cache.shape[1:3]
    if not tokens:
        return
    assert kept.slots.shape == (tokens,)
    norm = kept.head_norm
    assert norm is None or (norm.bias is None and norm.weight.shape == (heads - lines // 2, head_dim))
    # Pairs are complex numbers to PyTorch and two neighbours to Triton, which has no such type.
    turns = None if kept.turns is None else torch.view_as_real(kept.turns.contiguous())
    keep_rows[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        kept.cache,
        kept.slots,
        qkv if turns is None else turns,
        qkv if norm is None else norm.weight.contiguous(),
        0.0 if norm is None else norm.eps,
        **keep_constants(heads, lines, block_tokens, head_dim, is_turned=turns is not None, is_normed=norm is not None),
    )


def keep_constants(
    heads: int, lines: int, block_tokens: int, head_dim: int, *, is_turned: bool, is_normed: bool
) -> dict[str, int]:
    """What `keep_rows` is compiled for. Args: heads: of queries, keys and values; lines: of keys and values."""
    return {
        "heads": heads - lines,
        "kv_heads": lines // 2,
        "block_tokens": block_tokens,
        "head_dim": head_dim,
        "is_turned": is_turned,
        "is_normed": is_normed,
        "block_heads": _HEADS,
        "half": triton.next_power_of_2(head_dim) // 2,
    }


def norm_warps(width: int) -> int:
    """16 numbers of a row to a thread, as far as there are threads."""
    return min(16, max(1, triton.next_power_of_2(width) // 512))
