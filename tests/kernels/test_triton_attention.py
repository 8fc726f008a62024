"""What the GPU's attention promises beside right numbers (test_attention.py): the same bits in any batch and grid."""

from dataclasses import replace

import pytest
import torch
from attention_steps import random_step
from gpu import DEVICE
from torch import Tensor

from orca.kernels import triton_attention
from orca.kernels.reference import ContextRow, Sight, attend_reference
from orca.kernels.triton_attention import SPLIT, TritonAttention

# Contexts of one part and of several, cut and not, and one that ends where a part does.
STEP = [(3 * SPLIT + 9, 1), (40, 40), (SPLIT, 1), (2 * SPLIT, 2), (7, 1)]


def attention(
    rows: list[ContextRow], tables: Tensor, cache: Tensor, kv_of_query: list[int], window: int | None = None
) -> TritonAttention:
    seen = Sight(
        kv_of_query=kv_of_query,
        kv_heads=cache.shape[1] // 2,
        head_dim=cache.shape[3],
        tables=tables.to(DEVICE),
        block_tokens=cache.shape[2],
        window=window,
        dtype=cache.dtype,
        device=DEVICE,
    )
    return TritonAttention(rows, seen)


@pytest.mark.parametrize("window", [None, SPLIT + 3])
def test_a_token_gets_the_same_bits_alone_and_among_others(window: int | None) -> None:
    qkv, cache, rows, tables = random_step(STEP, 4, 2, 16, torch.float32, 16)
    qkv, cache = qkv.to(DEVICE), cache.to(DEVICE)
    together = attention(rows, tables, cache, [0, 0, 1, 1], window)(qkv, cache, 0.3)
    for row in rows:
        own = qkv[row.first : row.first + row.count].contiguous()
        alone = attention([replace(row, first=0)], tables, cache, [0, 0, 1, 1], window)(own, cache, 0.3)
        assert torch.equal(alone, together[row.first : row.first + row.count]), f"context {row.end}"


def test_the_number_of_programs_changes_nothing_and_a_launch_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, cache, rows, tables = random_step(STEP, 4, 2, 16, torch.float32, 16)
    qkv, cache = qkv.to(DEVICE), cache.to(DEVICE)
    outputs = []
    for programs in (1, 2, 7, 100):
        monkeypatch.setattr(triton_attention, "programs", lambda _, programs=programs: programs)
        geometry = attention(rows, tables, cache, [0, 0, 1, 1])
        outputs += [geometry(qkv, cache, 0.3), geometry(qkv, cache, 0.3)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("heads", [20, 48])
def test_more_query_heads_to_a_kv_head_than_a_tile_has(heads: int) -> None:
    qkv, cache, rows, tables = random_step([(SPLIT + 5, 1), (4, 4)], heads, 1, 16, torch.float32, 16)
    output = attention(rows, tables, cache.to(DEVICE), [0] * heads)(qkv.to(DEVICE), cache.to(DEVICE), 0.3)
    expected = attend_reference(qkv[:, :heads], cache, rows, tables, [0] * heads, scale=0.3)
    torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)
