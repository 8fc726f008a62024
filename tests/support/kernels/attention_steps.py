"""Steps for attention tests: rows of every kind over scattered blocks, and maps from query heads to KV heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import AttentionView, ContextRow, DistanceBias

BLOCK_TOKENS = 4


def random_step(
    shapes: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[Tensor, Tensor, list[ContextRow], Tensor]:
    """A step of rows (context, count) over scattered blocks; every slot that no row owns holds NaN.

    Returns: qkv, cache, rows, tables.
    """
    generator = torch.Generator().manual_seed(3)
    blocks = sum(-(-context // block_tokens) for context, _ in shapes) + 2
    shuffled = torch.randperm(blocks, generator=generator).int()
    tables = torch.full((len(shapes), max(-(-context // block_tokens) for context, _ in shapes)), -1).int()
    qkv = torch.randn(sum(count for _, count in shapes), heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    cache = torch.full((blocks, 2 * kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype)
    rows, first, taken = [], 0, 0
    for line, (context, count) in enumerate(shapes):
        used = -(-context // block_tokens)
        tables[line, :used] = shuffled[taken : taken + used]
        kv = torch.randn(context, 2 * kv_heads, head_dim, generator=generator).to(dtype)
        kv[-count:] = qkv[first : first + count, heads:]
        TokenSlots.of_positions(tables[line], 0, context, block_tokens).write(cache, kv)
        rows.append(ContextRow(first, count, context - count, line))
        first, taken = first + count, taken + used
    return qkv, cache, rows, tables


def random_cross_step(
    shapes: Sequence[tuple[int, int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[Tensor, Tensor, list[ContextRow], Tensor]:
    """A step of rows (keys, count, position) whose keys are all in the cache; every slot of no key holds NaN.

    With (n, n, 0) it is the step of an encoder, whose own keys are in the cache too.

    Returns: queries, cache, rows, tables of the keys.
    """
    sources = [(keys, 1) for keys, _, _ in shapes]
    _, cache, _, tables = random_step(sources, heads, kv_heads, head_dim, dtype, block_tokens)
    rows, first = [], 0
    for line, (keys, count, position) in enumerate(shapes):
        rows.append(ContextRow(first, count, position, line, keys))
        first += count
    generator = torch.Generator().manual_seed(4)
    return torch.randn(first, heads, head_dim, generator=generator).to(dtype), cache, rows, tables


def random_bias(heads: int, distances: int, zero: int) -> DistanceBias:
    """A bias of order 1."""
    return DistanceBias(torch.randn(heads, distances, generator=torch.Generator().manual_seed(5)), zero)


def view_of(
    tables: Tensor,
    kv_of_query: Sequence[int],
    head_dim: int,
    dtype: torch.dtype,
    block_tokens: int,
    *,
    kv_heads: int | None = None,
    window: int | None = None,
    is_causal: bool = True,
) -> AttentionView:
    """Args: kv_heads: as many as queries read by default."""
    return AttentionView(
        kv_of_query=kv_of_query,
        kv_heads=max(kv_of_query) + 1 if kv_heads is None else kv_heads,
        head_dim=head_dim,
        tables=tables,
        block_tokens=block_tokens,
        window=window,
        dtype=dtype,
        device=tables.device,
        is_causal=is_causal,
    )


STEPS = {
    # Several tiles, which cross chunks of 256 positions; a whole prompt that ends behind one.
    "tiles": [(300, 70), (545, 65), (288, 288)],
    "one-row": [(1, 1)],
    "long-row": [(300, 1)],
    "decode": [(5, 1), (17, 1), (1, 1), (16, 1)],
    "very-unlike": [(2, 1), (900, 1), (3, 1), (700, 1), (40, 1), (1, 1)],
    "prefill": [(6, 6), (2, 2)],
    "chunk": [(9, 4), (20, 3)],
    "mixed": [(7, 7), (12, 1), (30, 5), (1, 1), (40, 1)],
}
CROSS_STEPS = {
    # Rows (keys, count, position): keys that end at the borders of chunks, and rows of several tiles.
    "encoder": [(40, 40, 0), (1, 1, 0), (2, 2, 0), (17, 17, 0)],
    "decode": [(1, 1, 0), (5, 1, 300), (255, 1, 7), (256, 1, 30), (257, 1, 256), (600, 1, 2)],
    "first-target-rows": [(40, 2, 0), (1, 40, 3), (300, 35, 0), (7, 1, 0)],
    "one-key": [(1, 1, 5)],
}
HEADS = {
    "one": [0],
    "each-its-own": [0, 1, 2],
    "grouped": [0, 0, 1, 1],
    "all-on-one": [0, 0, 0],
    "border-of-ranks": [0, 1, 1, 1, 2],
}
