"""One launch on a GPU for a step's queries, keys and values before attention. It adds the bias of their product,
applies head norm and rotation (RoPE), and writes keys and values into the cache.

    qkv        [tokens, query heads + 2 x kv heads, head_dim]   read once; changed parts are written once
    cache      [blocks, 2 x kv heads, block_tokens, head_dim]   the tokens' keys and values are written once
    slots      [tokens] int64, -1 for none                      read once by each program of a token
    rotations  [tokens, head_dim / 2] complex64                 read once by each program of a token

A program computes some heads of one token, in float32. The result is rounded to qkv's dtype after bias, after the norm
and after the rotation, as in separate kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.contract.reference import KvWrite
from orca.kernels.gpu.torch_operator import operator

_HEADS = 8
"""Heads per program."""


# One kernel for blocks of any size: the block size is known only after models are loaded and kernels compiled.
@triton.jit(do_not_specialize=["block_tokens"])  # type: ignore[untyped-decorator]
def write_kv_rows(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    cache,
    slots,
    rotations,
    head_norm,
    block_tokens,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    has_bias: tl.constexpr,
    has_rotary: tl.constexpr,
    is_normed: tl.constexpr,
    block_heads: tl.constexpr,
    half: tl.constexpr,
):
    """Process some heads of one token as pairs of neighbouring dimensions.

    heads: number of query heads; after them come kv_heads of keys, then kv_heads of values. half: at least
    head_dim / 2. bias [heads + 2 x kv_heads, head_dim]; head_norm [heads + kv_heads, head_dim].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    is_head = head < heads + 2 * kv_heads
    # Queries and keys are normalised and rotated; keys and values go into the cache.
    is_rotated = head < heads + kv_heads
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
        weight = tl.load(head_norm + of_head, mask=is_rotated[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
        changed = (changed * factor[:, None] * weight).to(row.dtype).to(tl.float32)
    if has_rotary:
        even, odd = tl.split(tl.reshape(changed, (block_heads, half, 2)))
        rotation_at = rotations + token * head_dim + 2 * pair
        cos = tl.load(rotation_at, mask=2 * pair < head_dim, other=0.0)[None, :]
        sin = tl.load(rotation_at + 1, mask=2 * pair < head_dim, other=0.0)[None, :]
        joined = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        changed = tl.reshape(joined, (block_heads, 2 * half))
    if is_normed or has_rotary:
        row = tl.where(is_rotated[:, None], changed.to(row.dtype), row)
    if has_bias:
        tl.store(at, row, mask=is_mine)
    elif is_normed or has_rotary:
        tl.store(at, row, mask=is_mine & is_rotated[:, None])
    slot = tl.load(slots + token)
    line = head - heads
    cache_line = (slot // block_tokens * (2 * kv_heads) + line) * block_tokens + slot % block_tokens
    to = cache + cache_line[:, None] * head_dim + dim[None, :]
    # Padding rows of a recorded step have no slot (inputs.py).
    if slot >= 0:
        tl.store(to, row, mask=is_mine & (line >= 0)[:, None])


def write_kv(qkv: Tensor, kv: KvWrite, bias: Tensor | None = None) -> None:
    """See device.Kernels.write_kv."""
    assert qkv.is_contiguous()
    assert kv.cache.is_contiguous()
    tokens, heads, head_dim = qkv.shape
    lines = kv.cache.shape[1]
    assert kv.slots.shape == (tokens,)
    assert bias is None or (bias.shape == (heads * head_dim,) and bias.is_contiguous())
    norm = kv.head_norm
    assert norm is None or (norm.bias is None and norm.weight.shape == (heads - lines // 2, head_dim))
    # PyTorch stores pairs as complex numbers; Triton has no complex type and reads two neighbours.
    rotations = None if kv.rotations is None else torch.view_as_real(kv.rotations.contiguous())
    weight, eps = (None, 0.0) if norm is None else (norm.weight.contiguous(), norm.eps)
    if bias is None and rotations is None and norm is None:
        _write_kv(qkv, kv.cache, kv.slots)
    else:
        _rotate_and_write_kv(qkv, bias, kv.cache, kv.slots, rotations, weight, eps)


@operator("cache")
def _write_kv(qkv: Tensor, cache: Tensor, slots: Tensor) -> None:
    _launch(qkv, None, cache, slots, None, None, 0.0)


@operator("qkv", "cache")
def _rotate_and_write_kv(
    qkv: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    rotations: Tensor | None,
    head_norm: Tensor | None,
    eps: float,
) -> None:
    _launch(qkv, bias, cache, slots, rotations, head_norm, eps)


def _launch(
    qkv: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    rotations: Tensor | None,
    head_norm: Tensor | None,
    eps: float,
) -> None:
    (tokens, heads, head_dim), (lines, block_tokens) = qkv.shape, cache.shape[1:3]
    if not tokens:
        return
    write_kv_rows[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        qkv if bias is None else bias,
        cache,
        slots,
        qkv if rotations is None else rotations,
        qkv if head_norm is None else head_norm,
        block_tokens,
        eps,
        **constants_of(
            heads,
            lines,
            head_dim,
            has_bias=bias is not None,
            has_rotary=rotations is not None,
            is_normed=head_norm is not None,
        ),
    )


def constants_of(
    heads: int, lines: int, head_dim: int, *, has_bias: bool, has_rotary: bool, is_normed: bool
) -> dict[str, int]:
    """Return the compile-time constants of `write_kv_rows`.

    Args:
        heads: heads of queries, keys and values together.
        lines: heads of keys and values together.
    """
    return {
        "heads": heads - lines,
        "kv_heads": lines // 2,
        "head_dim": head_dim,
        "has_bias": has_bias,
        "has_rotary": has_rotary,
        "is_normed": is_normed,
        "block_heads": _HEADS,
        "half": triton.next_power_of_2(head_dim) // 2,
    }
