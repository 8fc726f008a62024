"""Ragged paged attention as one Triton launch over all rows of a step (ORCA, section 5: thread blocks of one kernel
belong to different requests).

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)]) v[j, g(h)]        (reference.py has the meaning)

A program owns one tile: up to block_m consecutive tokens of one request, for one query head. It walks the request's
context block_n positions at a time, from the first that any token of the tile sees, with a running maximum and sum
(online softmax, accumulated in float32). Positions are turned into cache slots by `slots`, so keys and values may lie
anywhere; they are read once per tile and query head.

    qkv    [tokens, query heads + 2 x kv heads, head_dim]   read: the queries
    cache  [blocks, 2 x kv heads, block_tokens, head_dim]   read: per tile and head, 2 x context x head_dim elements
    slots  [sum of context lengths] int64                   cache slot of each position, row after row
    tiles  [tiles, 4] int32                                 first flat token, tokens, position of the first, row's slots
    out    [tokens, query heads, head_dim]                  written once

Scores and sums are elementwise products, exact in float32; tensor cores (tl.dot) and measuring come with the kernels
for GPUs. No stage uses it yet.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.reference import ContextRow


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    qkv,
    cache,
    slots,
    tiles,
    kv_of_query,
    out,
    scale,
    window,
    stride_token,
    stride_block,
    stride_out,
    kv_heads,
    block_tokens,
    head_dim,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """One tile and query head. Strides are in elements; heads and dimensions are contiguous in that order."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    position = tl.load(tiles + tile * 4 + 2)
    row_slots = slots + tl.load(tiles + tile * 4 + 3).to(tl.int64)
    kv_head = tl.load(kv_of_query + head)

    token = tl.arange(0, block_m)
    dim = tl.arange(0, block_d)
    is_token = token < count
    is_dim = dim < head_dim
    own = position + token
    query_at = qkv + (first + token)[:, None] * stride_token + head * head_dim + dim[None, :]
    query = tl.load(query_at, mask=is_token[:, None] & is_dim[None, :], other=0.0).to(tl.float32) * scale

    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    summed = tl.zeros((block_m, block_d), tl.float32)
    # The last token of the tile sees up to itself; the first one decides how far back anything is seen.
    end = position + count
    begin = tl.maximum(position - window + 1, 0) // block_n * block_n
    for start in range(begin, end, block_n):
        seen = start + tl.arange(0, block_n)
        slot = tl.load(row_slots + seen, mask=seen < end, other=0)
        line = slot // block_tokens * stride_block + (kv_head * block_tokens + slot % block_tokens) * head_dim
        key_at = cache + line[:, None] + dim[None, :]
        is_stored = (seen < end)[:, None] & is_dim[None, :]
        key = tl.load(key_at, mask=is_stored, other=0.0).to(tl.float32)
        value = tl.load(key_at + kv_heads * block_tokens * head_dim, mask=is_stored, other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * key[None, :, :], axis=2)
        is_seen = (seen[None, :] <= own[:, None]) & (seen[None, :] > own[:, None] - window) & is_token[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, axis=1))
        # A token that has seen nothing yet keeps minus infinity; subtracting that from itself would be NaN.
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(largest - base)
        total = total * kept + tl.sum(weights, axis=1)
        summed = summed * kept[:, None] + tl.sum(weights[:, :, None] * value[None, :, :], axis=1)
        largest = raised

    result = summed / tl.where(is_token, total, 1.0)[:, None]
    out_at = out + (first + token)[:, None] * stride_out + head * head_dim + dim[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_token[:, None] & is_dim[None, :])


def triton_attend(
    qkv: Tensor,
    cache: Tensor,
    rows: Sequence[ContextRow],
    kv_of_query: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    block_m: int = 4,
    block_n: int = 16,
) -> Tensor:
    """Attention of all rows of a step in one launch.

    Args:
        qkv: [tokens, query heads + 2 x kv heads, head_dim], contiguous.
        cache: [blocks, 2 x kv heads, block_tokens, head_dim] (paged.py), contiguous, the step's own keys and values
            written already.
        rows: the requests of the step; together they cover each flat token once.
        kv_of_query: for each query head the KV head it reads.
        scale: factor of the scores.
        window: positions a token sees, itself included; None sees all before it.
        block_m: tokens of a tile; block_n: positions read at once. Powers of two.
    Returns: [tokens, query heads, head_dim] in the dtype of `qkv`.
    """
    heads, head_dim, kv_heads = len(kv_of_query), qkv.shape[2], cache.shape[1] // 2
    assert qkv.is_contiguous()
    assert cache.is_contiguous()
    assert qkv.shape[1] == heads + 2 * kv_heads
    assert cache.shape[3] == head_dim
    tiles: list[tuple[int, int, int, int]] = []
    slots_before = 0
    for row in rows:
        position = len(row.slots) - row.count
        tiles += [
            (row.first + done, min(block_m, row.count - done), position + done, slots_before)
            for done in range(0, row.count, block_m)
        ]
        slots_before += len(row.slots)
    device = qkv.device
    out = torch.empty(qkv.shape[0], heads, head_dim, dtype=qkv.dtype, device=device)
    _attend[(len(tiles), heads)](
        qkv,
        cache,
        torch.cat([row.slots for row in rows]).to(device),
        torch.tensor(tiles, dtype=torch.int32, device=device),
        torch.tensor(kv_of_query, dtype=torch.int32, device=device),
        out,
        scale,
        window if window is not None else slots_before + 1,  # wider than any context: sees all
        qkv.stride(0),
        cache.stride(0),
        out.stride(0),
        kv_heads,
        cache.shape[2],
        head_dim,
        block_m=block_m,
        block_n=block_n,
        block_d=triton.next_power_of_2(head_dim),
    )
    return out
