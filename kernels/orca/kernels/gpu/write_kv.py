"""What is done to a step's queries, keys and values before attention, on a GPU, in one go: the bias of their product,
head norm, rotation (RoPE), and keys and values into the cache.

    qkv     [tokens, query heads + 2 x kv heads, head_dim]   read once; what is changed of it is written once
    cache   [blocks, 2 x kv heads, block_tokens, head_dim]   the tokens' keys and values are written once
    slots   [tokens] int64, or -1 for none                   read once for each program of a token
    turns   [tokens, head_dim / 2] complex64                 the same

A program has some heads of one token. All is computed in float32 and rounded to qkv's dtype after each of bias, norm
and turn, as it would be were these kernels of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.contract.reference import KvWrite
from orca.kernels.gpu.torch_operator import operator

_HEADS = 8
"""Heads of a program."""


# Of blocks of any size: their number of tokens is known only after models are loaded and kernels compiled.
@triton.jit(do_not_specialize=["block_tokens"])  # type: ignore[untyped-decorator]
def keep_rows(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    cache,
    slots,
    turns,
    head_norm,
    block_tokens,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    has_bias: tl.constexpr,
    is_turned: tl.constexpr,
    is_normed: tl.constexpr,
    block_heads: tl.constexpr,
    half: tl.constexpr,
):
    """Heads as pairs of neighbouring dimensions. half: at least head_dim / 2.

    heads: of queries; behind them come kv_heads of keys, then of values.
    bias [heads + 2 x kv_heads, head_dim]; head_norm [heads + kv_heads, head_dim].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    is_head = head < heads + 2 * kv_heads
    # Norm and turn are of queries and keys; keys and values go into the cache.
    is_turning = head < heads + kv_heads
    pair = tl.arange(0, half)
    dim = tl.arange(0, 2 * half)
    is_dim = dim < head_dim
    is_mine = is_head[:, None] & is_dim[None, :]
    at = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * head_dim + dim[None, :]
    of_head = head[:, None] * head_dim + dim[None, :]
    row = tl.load(at, mask=is_mine, other=0.0)
    if has_bias:
        row = (row.to(tl.float32) + tl.load(bias + of_head, mask=is_mine, other=0.0).to(tl.float32)).to(row.dtype)
    changed = row.to(tl.float32)
    if is_normed:
        factor = 1.0 / tl.sqrt(tl.sum(changed * changed, axis=1) / head_dim + eps)
        weight = tl.load(head_norm + of_head, mask=is_turning[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
        changed = (changed * factor[:, None] * weight).to(row.dtype).to(tl.float32)
    if is_turned:
        even, odd = tl.split(tl.reshape(changed, (block_heads, half, 2)))
        turn_at = turns + token * head_dim + 2 * pair
        cos = tl.load(turn_at, mask=2 * pair < head_dim, other=0.0)[None, :]
        sin = tl.load(turn_at + 1, mask=2 * pair < head_dim, other=0.0)[None, :]
        joined = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        changed = tl.reshape(joined, (block_heads, 2 * half))
    if is_normed or is_turned:
        row = tl.where(is_turning[:, None], changed.to(row.dtype), row)
    if has_bias:
        tl.store(at, row, mask=is_mine)
    elif is_normed or is_turned:
        tl.store(at, row, mask=is_mine & is_turning[:, None])
    slot = tl.load(slots + token)
    line = head - heads
    cache_line = (slot // block_tokens * (2 * kv_heads) + line) * block_tokens + slot % block_tokens
    to = cache + cache_line[:, None] * head_dim + dim[None, :]
    # Rows that fill a recorded step up have no slot (inputs.py).
    if slot >= 0:
        tl.store(to, row, mask=is_mine & (line >= 0)[:, None])


def write_kv(qkv: Tensor, kept: KvWrite, bias: Tensor | None = None) -> None:
    """As device.Kernels.keep."""
    assert qkv.is_contiguous()
    assert kept.cache.is_contiguous()
    tokens, heads, head_dim = qkv.shape
    lines = kept.cache.shape[1]
    assert kept.slots.shape == (tokens,)
    assert bias is None or (bias.shape == (heads * head_dim,) and bias.is_contiguous())
    norm = kept.head_norm
    assert norm is None or (norm.bias is None and norm.weight.shape == (heads - lines // 2, head_dim))
    # Pairs are complex numbers to PyTorch and two neighbours to Triton, which has no such type.
    turns = None if kept.turns is None else torch.view_as_real(kept.turns.contiguous())
    weight, eps = (None, 0.0) if norm is None else (norm.weight.contiguous(), norm.eps)
    if bias is None and turns is None and norm is None:
        _keep(qkv, kept.cache, kept.slots)
    else:
        _turn_and_keep(qkv, bias, kept.cache, kept.slots, turns, weight, eps)


@operator("cache")
def _keep(qkv: Tensor, cache: Tensor, slots: Tensor) -> None:
    _launch(qkv, None, cache, slots, None, None, 0.0)


@operator("qkv", "cache")
def _turn_and_keep(
    qkv: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    turns: Tensor | None,
    head_norm: Tensor | None,
    eps: float,
) -> None:
    _launch(qkv, bias, cache, slots, turns, head_norm, eps)


def _launch(
    qkv: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    turns: Tensor | None,
    head_norm: Tensor | None,
    eps: float,
) -> None:
    (tokens, heads, head_dim), (lines, block_tokens) = qkv.shape, cache.shape[1:3]
    if not tokens:
        return
    keep_rows[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        qkv if bias is None else bias,
        cache,
        slots,
        qkv if turns is None else turns,
        qkv if head_norm is None else head_norm,
        block_tokens,
        eps,
        **constants_of(
            heads,
            lines,
            head_dim,
            has_bias=bias is not None,
            is_turned=turns is not None,
            is_normed=head_norm is not None,
        ),
    )


def constants_of(
    heads: int, lines: int, head_dim: int, *, has_bias: bool, is_turned: bool, is_normed: bool
) -> dict[str, int]:
    """What `keep_rows` is compiled for. Args: heads: of queries, keys and values; lines: of keys and values."""
    return {
        "heads": heads - lines,
        "kv_heads": lines // 2,
        "head_dim": head_dim,
        "has_bias": has_bias,
        "is_turned": is_turned,
        "is_normed": is_normed,
        "block_heads": _HEADS,
        "half": triton.next_power_of_2(head_dim) // 2,
    }
