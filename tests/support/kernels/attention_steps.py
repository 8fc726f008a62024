"""Steps for attention tests: rows of every kind over scattered blocks, and maps from query heads to KV heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import AttentionView, ContextRow

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


def view_of(
    tables: Tensor,
    kv_of_query: Sequence[int],
    head_dim: int,
    dtype: torch.dtype,
    block_tokens: int,
    *,
    kv_heads: int | None = None,
    window: int | None = None,
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
HEADS = {
    "one": [0],
    "each-its-own": [0, 1, 2],
    "grouped": [0, 0, 1, 1],
    "all-on-one": [0, 0, 0],
    "border-of-ranks": [0, 1, 1, 1, 2],
}
