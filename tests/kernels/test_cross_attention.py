"""Attention that is not causal (encoder, cross attention), and the bias of distances: the reference by hand, then every
faster version against the reference."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import ContextRow, DistanceBias, KvWrite, attend_reference
from orca.kernels.device import kernels_of
from orca.kernels.plain import PlainKernels
from support.kernels.attention_steps import (
    CROSS_STEPS,
    HEADS,
    STEPS,
    random_bias,
    random_cross_step,
    random_step,
    view_of,
)
from support.kernels.gpu import GpuKernels
from support.kernels.torch_threads import computing_threads
from support.pairs import covered

pytestmark = pytest.mark.covered(2)

KINDS: dict[str, Any] = {"cpu": kernels_of(torch.device("cpu")), "plain": PlainKernels(), "gpu": GpuKernels()}

# Zero at both ends, in the middle and outside of the columns, and so many columns that none is clamped.
BIASES = {
    "none": None,
    "of-encoder": (9, 4),
    "zero-first": (6, 0),
    "zero-last": (6, 5),
    "one-column": (1, 0),
    "wide": (1300, 650),
    "unclamped-past": (601, 600),
}


def bias_of(name: str, heads: int) -> DistanceBias | None:
    columns = BIASES[name]
    return None if columns is None else random_bias(heads, *columns)


def ragged(
    kind: str,
    rows: list[ContextRow],
    tables: Tensor,
    kv_of_query: list[int],
    cache: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
) -> Any:
    _, lines, block_tokens, head_dim = cache.shape
    seen = view_of(
        tables,
        kv_of_query,
        head_dim,
        cache.dtype,
        block_tokens,
        kv_heads=lines // 2,
        window=window,
        is_causal=is_causal,
    )
    return KINDS[kind].attention(rows, seen)


def of_ones(
    pairs: list[tuple[float, float]], rows: list[ContextRow], tables: list[list[int]], **options: Any
) -> Tensor:
    """The reference for queries of 1, one head of one dimension, and blocks of one slot with these keys and values."""
    cache = torch.tensor(pairs)[:, :, None, None]
    tokens = sum(row.count for row in rows)
    return attend_reference(torch.ones(tokens, 1, 1), cache, rows, torch.tensor(tables).int(), [0], **options).flatten()


def test_reference_sees_later_keys_if_it_is_not_causal() -> None:
    pairs = [(0.0, 1.0), (0.0, 3.0), (0.0, 8.0)]
    output = of_ones(pairs, [ContextRow(0, 3, 0, 0, keys=3)], [[0, 1, 2]], scale=1.0, is_causal=False)
    assert output.tolist() == pytest.approx([4.0, 4.0, 4.0])


def test_reference_sees_the_keys_of_its_row_only() -> None:
    pairs = [(0.0, 1.0), (0.0, 3.0), (math.nan, math.nan), (0.0, 7.0)]
    rows = [ContextRow(0, 1, 50, 1, keys=2), ContextRow(1, 2, 0, 0, keys=1)]
    output = of_ones(pairs, rows, [[3, 2], [0, 1]], scale=1.0, is_causal=False)
    assert output.tolist() == pytest.approx([2.0, 7.0, 7.0])


def test_reference_adds_the_bias_of_a_distance_after_the_scale() -> None:
    third = math.log(3.0)
    bias = DistanceBias(torch.tensor([[third, 0.0, 0.0]]), zero=1)  # distances up to -1, 0, from 1 on
    pairs = [(0.0, 4.0), (0.0, 8.0), (0.0, 12.0)]
    output = of_ones(pairs, [ContextRow(0, 3, 0, 0, keys=3)], [[0, 1, 2]], scale=0.5, is_causal=False, bias=bias)
    assert output.tolist() == pytest.approx([8.0, (4 * 3 + 8 + 12) / 5, (4 * 3 + 8 * 3 + 12) / 7])
    causal = of_ones(pairs, [ContextRow(0, 3, 0, 0)], [[0, 1, 2]], scale=0.5, bias=bias)
    assert causal.tolist() == pytest.approx([4.0, (4 * 3 + 8) / 4, (4 * 3 + 8 * 3 + 12) / 7])


def test_reference_clamps_distances_to_the_columns_of_each_head() -> None:
    cache = torch.tensor([[[[0.0]], [[4.0]]], [[[0.0]], [[8.0]]]])
    bias = DistanceBias(torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(3.0)]]), zero=5)
    rows = [ContextRow(0, 1, 5, 0, keys=2)]  # columns 0 and 1
    options: dict[str, Any] = {"scale": 1.0, "is_causal": False, "bias": bias}
    output = attend_reference(torch.ones(1, 2, 1), cache, rows, torch.tensor([[0, 1]]).int(), [0, 0], **options)
    assert output.flatten().tolist() == pytest.approx([5.0, 7.0])
    for position in (0, 900):  # both keys have the last column, or the first one
        there = [replace(rows[0], position=position)]
        output = attend_reference(torch.ones(1, 2, 1), cache, there, torch.tensor([[0, 1]]).int(), [0, 0], **options)
        assert output.flatten().tolist() == pytest.approx([6.0, 6.0])


@pytest.mark.parametrize(
    ("step", "heads", "bias", "kind"),
    covered({"step": list(CROSS_STEPS), "heads": list(HEADS), "bias": list(BIASES), "kind": list(KINDS)}, 2),
)
def test_attention_that_is_not_causal_equals_the_reference(step: str, heads: str, bias: str, kind: str) -> None:
    kv_of_query, added = HEADS[heads], bias_of(bias, len(HEADS[heads]))
    query, cache, rows, tables = random_cross_step(
        CROSS_STEPS[step], len(kv_of_query), max(kv_of_query) + 1, 10, torch.float32
    )
    output = ragged(kind, rows, tables, kv_of_query, cache)(query, cache, 0.3, added)
    expected = attend_reference(query, cache, rows, tables, kv_of_query, scale=0.3, is_causal=False, bias=added)
    # Sums of at most 600 products of order 1 in another order: some units of 2^-24.
    torch.testing.assert_close(output, expected.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("block_tokens", [16, 32, 8])
@pytest.mark.parametrize(
    ("heads", "head_dim", "bias"),
    covered({"heads": list(HEADS), "head_dim": [10, 16, 64, 70], "bias": ["none", "of-encoder", "wide"]}, 2),
)
def test_the_attention_of_an_encoder_equals_the_reference(
    heads: str, head_dim: int, bias: str, block_tokens: int
) -> None:
    """Sources that end anywhere in a block, and before and behind a chunk; what lies behind them is NaN."""
    kv_of_query, added, lengths = HEADS[heads], bias_of(bias, len(HEADS[heads])), (1, 15, 16, 17, 133, 256, 300)
    query, cache, rows, tables = random_cross_step(
        [(n, n, 0) for n in lengths], len(kv_of_query), max(kv_of_query) + 1, head_dim, torch.float32, block_tokens
    )
    seen = view_of(tables, kv_of_query, head_dim, torch.float32, block_tokens, is_causal=False)
    scale = head_dim**-0.5
    attention = KINDS["cpu"].attention(rows, replace(seen, is_encoder=True))
    assert attention._turns == (block_tokens != 8)
    with computing_threads(2):
        output = attention(query, cache, scale, added)
    expected = attend_reference(query, cache, rows, tables, kv_of_query, scale=scale, is_causal=False, bias=added)
    torch.testing.assert_close(output, expected.flatten(1), atol=3e-6, rtol=3e-6)
    for row in rows:
        own = query[row.first : row.first + row.count].contiguous()
        alone = KINDS["cpu"].attention([replace(row, first=0)], replace(seen, is_encoder=True))
        assert torch.equal(alone(own, cache, scale, added), output[row.first : row.first + row.count])


@pytest.mark.parametrize(
    ("step", "heads", "bias", "kind", "window"),
    covered(
        {
            "step": ["one-row", "long-row", "decode", "prefill", "chunk", "mixed"],
            "heads": list(HEADS),
            "bias": [bias for bias in BIASES if bias != "none"],
            "kind": list(KINDS),
            "window": [None, 6],
        },
        2,
    ),
)
def test_causal_attention_with_a_bias_equals_the_reference(
    step: str, heads: str, bias: str, kind: str, window: int | None
) -> None:
    kv_of_query, added = HEADS[heads], bias_of(bias, len(HEADS[heads]))
    qkv, cache, rows, tables = random_step(STEPS[step], len(kv_of_query), max(kv_of_query) + 1, 10, torch.float32)
    output = ragged(kind, rows, tables, kv_of_query, cache, is_causal=True, window=window)(qkv, cache, 0.3, added)
    query = qkv[:, : len(kv_of_query)]
    expected = attend_reference(query, cache, rows, tables, kv_of_query, scale=0.3, window=window, bias=added)
    torch.testing.assert_close(output, expected.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_output_alone_and_among_others(dtype: torch.dtype) -> None:
    """A source or a target has the same bits in any batch, in any tile and on any number of threads."""
    kv_of_query, bias = [0, 1, 1, 1, 2], random_bias(5, 40, 20)
    query, cache, rows, tables = random_cross_step([(300, 300, 0), (9, 9, 0), (257, 1, 5)], 5, 3, 64, dtype)
    with computing_threads(2):
        together = ragged("cpu", rows, tables, kv_of_query, cache)(query, cache, 0.125, bias)
    expected = attend_reference(query, cache, rows, tables, kv_of_query, scale=0.125, is_causal=False, bias=bias)
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(together, expected.flatten(1), atol=tolerance, rtol=tolerance)
    with computing_threads(1):
        for row in rows:
            own = query[row.first : row.first + row.count].contiguous()
            alone = ragged("cpu", [replace(row, first=0)], tables, kv_of_query, cache)(own, cache, 0.125, bias)
            assert torch.equal(alone, together[row.first : row.first + row.count])
            for token in (*range(0, row.count, 7), row.count - 1):
                here = slice(row.first + token, row.first + token + 1)
                single = [ContextRow(0, 1, row.position + token, row.line, row.keys)]
                alone = ragged("cpu", single, tables, kv_of_query, cache)(query[here], cache, 0.125, bias)
                assert torch.equal(alone, together[here])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_biased_token_of_a_chunk_gets_the_output_of_a_single_token(dtype: torch.dtype) -> None:
    """A target begins with a chunk after a re-claim; its tokens ran one by one before."""
    kv_of_query, bias = [0, 1, 1, 1, 2], random_bias(5, 40, 39)
    qkv, cache, rows, tables = random_step([(300, 70), (9, 9)], 5, 3, 64, dtype)
    together = ragged("cpu", rows, tables, kv_of_query, cache, is_causal=True)(qkv, cache, 0.125, bias)
    expected = attend_reference(qkv[:, :5], cache, rows, tables, kv_of_query, scale=0.125, bias=bias)
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(together, expected.flatten(1), atol=tolerance, rtol=tolerance)
    for row in rows:
        for token in range(row.count):
            here = slice(row.first + token, row.first + token + 1)
            single = [ContextRow(0, 1, row.position + token, row.line)]
            alone = ragged("cpu", single, tables, kv_of_query, cache, is_causal=True)(qkv[here], cache, 0.125, bias)
            assert torch.equal(alone, together[here])


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_a_source_are_written_without_queries(kind: str) -> None:
    """The products of cross attention with the encoder's output are keys and values only."""
    slots = torch.tensor([7, 2, 12])
    cache, kv, bias = torch.zeros(4, 2 * 2, 4, 8), torch.randn(3, 2 * 2, 8), torch.randn(2 * 2 * 8)
    expected = kv + bias.view(4, 8)
    KINDS[kind].write_kv(kv, KvWrite(cache, slots, None), bias)
    assert torch.equal(TokenSlots.of(slots, 4).read(cache), expected)
    assert cache.count_nonzero() == expected.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_reads_its_keys_from_the_cache(kind: str) -> None:
    """The rows of an encoder hold keys and values as well; only the cache is read, by encoder and cross attention."""
    query, cache, rows, tables = random_cross_step(CROSS_STEPS["encoder"], 3, 2, 10, torch.float32)
    qkv = torch.cat((query, torch.full((len(query), 4, 10), math.nan)), dim=1)
    attention = ragged(kind, rows, tables, [0, 1, 1], cache)
    of_cache = attention(query, cache, 0.3, None)
    assert torch.equal(attention(qkv, cache, 0.3, None), of_cache)
    assert torch.equal(attention(query.flatten(1), cache, 0.3, None), of_cache)


@pytest.mark.parametrize(
    ("step", "head_dim", "dtype", "bias", "kind"),
    covered(
        {
            "step": list(CROSS_STEPS),
            "head_dim": [12, 64],
            "dtype": [torch.bfloat16, torch.float16],
            "bias": ["none", "wide"],
            "kind": list(KINDS),
        },
        2,
    ),
)
def test_half_precision_equals_the_reference_within_its_rounding(
    step: str, head_dim: int, dtype: torch.dtype, bias: str, kind: str
) -> None:
    kv_of_query, scale, added = [0, 0, 1, 1], head_dim**-0.5, bias_of(bias, 4)
    query, cache, rows, tables = random_cross_step(CROSS_STEPS[step], 4, 2, head_dim, dtype)
    output = ragged(kind, rows, tables, kv_of_query, cache)(query, cache, scale, added)
    expected = attend_reference(query, cache, rows, tables, kv_of_query, scale=scale, is_causal=False, bias=added)
    # As in test_attention.py.
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    torch.testing.assert_close(output, expected.flatten(1), atol=tolerance, rtol=tolerance)
