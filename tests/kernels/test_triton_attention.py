"""The GPU's attention gives the same bits in any batch and grid. Right numbers are tested in test_attention.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from orca.kernels.contract.recording import RecordingSize, RequestLines, StepDescription
from orca.kernels.contract.reference import ContextRow, DistanceBias, ModelSizes, attend_reference
from orca.kernels.gpu import attention as gpu_attention
from orca.kernels.gpu.attention import SPLIT, WIDE_SPLIT, TritonAttention, parts_max, shape_of, split_of
from orca.kernels.gpu.attention_item import PARTS_MAX, AttentionItem
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.gpu.recording import GraphRecorder
from support.kernels.attention_steps import random_bias, random_cross_step, random_step, view_of
from support.kernels.gpu import DEVICE

# Contexts of one part and of several, cut and not, and one that ends where a part does; a short chunk of a long one.
STEP = [(3 * SPLIT + 9, 1), (40, 40), (SPLIT, 1), (2 * SPLIT, 2), (7, 1), (WIDE_SPLIT + 77, 19)]


def attention(
    rows: list[ContextRow], tables: Tensor, cache: Tensor, kv_of_query: list[int], window: int | None = None
) -> TritonAttention:
    _, lines, block_tokens, head_dim = cache.shape
    seen = view_of(
        tables.to(DEVICE), kv_of_query, head_dim, cache.dtype, block_tokens, kv_heads=lines // 2, window=window
    )
    return TritonAttention(rows, seen)


def items_of(geometry: TritonAttention) -> list[AttentionItem]:
    many, *_ = geometry.items[0].tolist()
    return [AttentionItem(*item) for item in geometry.items[1 : 1 + many].tolist()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, SPLIT + 3])
def test_a_token_gets_the_same_bits_alone_and_among_others(window: int | None) -> None:
    qkv, cache, rows, tables = random_step(STEP, 4, 2, 16, torch.float32, 16)
    qkv, cache = qkv.to(DEVICE), cache.to(DEVICE)
    together = attention(rows, tables, cache, [0, 0, 1, 1], window)(qkv, cache, 0.3)
    for row in rows:
        own = qkv[row.first : row.first + row.count].contiguous()
        alone = attention([replace(row, first=0)], tables, cache, [0, 0, 1, 1], window)(own, cache, 0.3)
        assert torch.equal(alone, together[row.first : row.first + row.count]), f"context {row.end}"


@pytest.mark.slow
def test_the_number_of_programs_changes_nothing_and_a_launch_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, cache, rows, tables = random_step(STEP, 4, 2, 16, torch.float32, 16)
    qkv, cache = qkv.to(DEVICE), cache.to(DEVICE)
    outputs = []
    for programs in (1, 2, 7, 100):
        monkeypatch.setattr(gpu_attention, "grid_size", lambda _, programs=programs: programs)
        geometry = attention(rows, tables, cache, [0, 0, 1, 1])
        outputs += [geometry(qkv, cache, 0.3), geometry(qkv, cache, 0.3)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("heads", [20, 48])
def test_more_query_heads_per_kv_head_than_a_tile_has_equal_the_reference(heads: int) -> None:
    qkv, cache, rows, tables = random_step([(SPLIT + 5, 1), (4, 4)], heads, 1, 16, torch.float32, 16)
    output = attention(rows, tables, cache.to(DEVICE), [0] * heads)(qkv.to(DEVICE), cache.to(DEVICE), 0.3)
    expected = attend_reference(qkv[:, :heads], cache, rows, tables, [0] * heads, scale=0.3)
    torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.slow
def test_a_context_has_at_most_the_maximum_of_parts() -> None:
    longest = PARTS_MAX.value * SPLIT
    qkv, cache, rows, tables = random_step([(longest, 1), (longest + 1, 1)], 2, 1, 16, torch.float32, 16)
    geometry = attention(rows, tables, cache, [0, 0])
    items = items_of(geometry)
    assert [item.parts for item in items if item.first == 0] == [PARTS_MAX.value] * PARTS_MAX.value
    assert {item.end - item.begin for item in items if item.first == 1} == {2 * SPLIT, 1}
    output = geometry(qkv.to(DEVICE), cache.to(DEVICE), 0.3)
    expected = attend_reference(qkv[:, :2], cache, rows, tables, [0, 0], scale=0.3)
    torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, WIDE_SPLIT])
def test_a_chunk_with_few_queries_and_a_long_context_is_split(window: int | None) -> None:
    end = 2 * WIDE_SPLIT + 5
    qkv, cache, rows, tables = random_step([(end, 40)], 1, 1, 16, torch.float32, 16)
    whole = attention([replace(rows[0], count=end, position=0)], tables, cache, [0], window)
    assert all(item.part == -1 for item in items_of(whole))
    geometry = attention(rows, tables, cache, [0], window)
    first = [item for item in items_of(geometry) if item.first == 0]
    assert len(first) == first[0].parts > 1
    assert max(item.end - item.begin for item in first) <= WIDE_SPLIT
    output = geometry(qkv.to(DEVICE), cache.to(DEVICE), 0.3)
    expected = attend_reference(qkv[:, :1], cache, rows, tables, [0], scale=0.3, window=window)
    torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)


def test_a_short_row_with_many_keys_of_a_source_is_split() -> None:
    keys = 2 * WIDE_SPLIT + 5
    query, cache, rows, tables = random_cross_step([(keys, 40, 3), (3 * SPLIT + 9, 1, 0)], 1, 1, 16, torch.float32, 16)
    bias = random_bias(1, 1500, 1450)
    seen = replace(view_of(tables.to(DEVICE), [0], 16, torch.float32, 16), is_causal=False)
    geometry = TritonAttention(rows, seen)
    assert all(item.parts > 1 for item in items_of(geometry))
    there = DistanceBias(bias.table.to(DEVICE), bias.zero)
    output = geometry(query.flatten(1).to(DEVICE), cache.to(DEVICE), 0.3, there)
    expected = attend_reference(query, cache, rows, tables, [0], scale=0.3, is_causal=False, bias=bias)
    torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("window", "is_causal"), [(None, True), (3, True), (5 * SPLIT + 7, True), (None, False)])
def test_items_built_on_the_device_equal_those_built_on_the_host(window: int | None, is_causal: bool) -> None:
    ends = [1, SPLIT, SPLIT + 1, 70, PARTS_MAX.value * SPLIT, PARTS_MAX.value * SPLIT + 1, 3 * PARTS_MAX.value * SPLIT]
    rows = [ContextRow(place, 1, end - 1 if is_causal else 7, place, keys=end) for place, end in enumerate(ends)]
    tables = torch.zeros(len(rows), ends[-1] // 16, dtype=torch.int32, device=DEVICE)
    seen = view_of(tables, [0, 0, 1, 1], 16, torch.float32, 16, window=window, is_causal=is_causal)
    there = torch.arange(len(rows), device=DEVICE)
    recorder = GraphRecorder(DEVICE)
    inputs = recorder.inputs(
        RecordingSize(8, None),
        RequestLines(seen.tables, there, there, seen.tables, torch.tensor(ends, device=DEVICE)),
        slots=sum(ends),
        block_tokens=16,
    )
    made = inputs.attention(seen)
    inputs.put(StepDescription(np.array([(row.line, row.position, 1, 0, 1, 1) for row in rows]), len(rows)))
    inputs.build()
    expected = items_of(TritonAttention(rows, seen))
    # Their parts have room for one token instead of a tile's, and behind them is a row of padding.
    room = shape_of(seen.dtype, seen.head_dim).narrow // 2
    own = [
        AttentionItem(*item[:6])
        if item.part < 0
        else item._replace(part=item.part * room, first_part=item.first_part * room)
        for item in items_of(made)[:-1]
    ]
    assert own == expected
    assert items_of(made)[-1][:6] == (len(rows), 1, 0, 0, 0, 0)


def test_attention_of_encoder_and_decoder_is_launched_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()

    def attend(qkv: Tensor, *arguments: Any) -> None:
        bias, _, is_causal = arguments[7:10]
        launched.add(("causal" if is_causal else "all keys", qkv.shape[1], bias is not None))

    monkeypatch.setattr(gpu_attention, "_attend", attend)
    decoder = ModelSizes(
        dtype=torch.float32,
        weight_dtype=torch.float32,
        table_dtype=torch.float32,
        device=DEVICE,
        hidden=16,
        heads=3,
        kv_heads=3,
        head_dim=16,
        kv_of_query=[0, 1, 2],
        windows=[None],
        has_cross_attention=True,
        has_distance_bias=True,
    )
    TritonKernels().prepare(decoder)
    assert launched == {("causal", 9, True), ("all keys", 3, False)}
    launched.clear()
    TritonKernels().prepare(replace(decoder, is_causal=False, has_cross_attention=False))
    assert launched == {("all keys", 9, True)}


def test_the_buffer_holds_all_parts_that_rows_can_have() -> None:
    for ends in ([SPLIT + 1] * 5, [1] * 5, [PARTS_MAX.value * SPLIT + 1] * 3, [9 * PARTS_MAX.value * SPLIT] * 2):
        parts = [triton.cdiv(end, split_of(end, SPLIT)) for end in ends]
        assert max(parts) <= PARTS_MAX.value
        assert sum(parts) <= parts_max(sum(ends), len(ends))
    assert parts_max(5 * (SPLIT + 1), 5) == 10  # no more than there are
