"""Requests that begin with the same KV blocks: all keys and values of a step are written before attention reads any.

So a row may read blocks that other rows of the same step fill (scheduler/policy/prefixes.py).
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orca.kernels.contract.recording import RecordingSize, RequestLines, StepDescription
from orca.kernels.contract.reference import ContextRow, KvWrite
from orca.kernels.cpu.product.product import PackedWeight
from orca.kernels.cpu.team.team import deferred
from orca.kernels.gpu.kernels import TritonKernels
from support.kernels.attention_steps import HEADS, random_step, view_of
from support.kernels.gpu import DEVICE, GpuKernels
from support.kernels.rows import CPU, PLAIN, some
from support.kernels.shared_blocks import BLOCK_TOKENS, STEPS, SharedStep
from support.kernels.torch_threads import computing_threads
from support.pairs import covered

KINDS: dict[str, Any] = {"cpu": CPU, "plain": PLAIN, "gpu": GpuKernels()}
ORDERS = ("older first", "younger first")
SCALE = 0.3


def step_of(
    name: str,
    order: str = ORDERS[0],
    heads: str = "grouped",
    *,
    head_dim: int = 16,
    has_turns: bool = False,
) -> SharedStep:
    running = [line for line, each in enumerate(STEPS[name]) if each.count]
    places = running if order == "older first" else running[::-1]
    kv_heads = max(HEADS[heads]) + 1
    return SharedStep(STEPS[name], places, len(HEADS[heads]), kv_heads, head_dim, torch.float32, has_turns)


def expect(output: Tensor, expected: Tensor) -> None:
    """Sums of some products of order 1 in another order: some units of 2^-24."""
    torch.testing.assert_close(output.cpu(), expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize(
    ("name", "order", "heads", "window", "has_turns", "kind"),
    covered(
        {
            "name": list(STEPS),
            "order": list(ORDERS),
            "heads": ["one", "border-of-ranks"],
            "window": [None, 6],
            "has_turns": [False, True],
            "kind": list(KINDS),
        },
        2,
    ),
)
def test_rows_read_the_blocks_of_others_as_each_request_alone_would(
    name: str, order: str, heads: str, window: int | None, has_turns: bool, kind: str
) -> None:
    step = step_of(name, order, heads, has_turns=has_turns)
    expected = step.expected(HEADS[heads], scale=SCALE, window=window)
    before, qkv, kernels = step.cache.clone(), step.qkv.clone(), KINDS[kind]
    view = view_of(step.tables, HEADS[heads], 16, torch.float32, BLOCK_TOKENS, kv_heads=step.kv_heads, window=window)
    attention = kernels.attention(step.rows, view)
    kernels.write_kv(qkv, step.kept)
    expect(attention(qkv, step.cache, SCALE), expected)
    # No row has changed a slot of an earlier step, nor one of another request.
    others = torch.ones(before.shape[0] * BLOCK_TOKENS, dtype=torch.bool)
    others[step.slots] = False
    others = others.view(-1, 1, BLOCK_TOKENS, 1).expand_as(before)
    assert torch.equal(step.cache[others].nan_to_num(), before[others].nan_to_num())
    assert torch.equal(step.cache[others].isnan(), before[others].isnan())


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_recorded_step_reads_shared_blocks_and_keeps_the_tables(kind: str) -> None:
    step, heads = step_of("one token each"), HEADS["grouped"]
    device, kernels = (DEVICE, TritonKernels()) if kind == "gpu" else (torch.device("cpu"), CPU)
    tables = step.tables.clone()
    if kind == "gpu":  # the recording puts the block of each row into its line; on a CPU the host has done so
        for row in step.rows:
            tables[row.line, row.position // BLOCK_TOKENS] = -1
    # A line before those of requests: a row of padding, whose line is -1, must not write there.
    guarded = torch.cat((torch.full_like(tables[:1], -7), tables)).to(device)
    tables, cache, count = guarded[1:], step.cache.to(device), len(step.rows)
    qkv = torch.zeros(8, *step.qkv.shape[1:], device=device)  # twice as many rows: the rest is padding
    qkv[:count] = step.qkv.to(device)
    numbers = torch.zeros(len(tables), dtype=torch.int64, device=device)
    recorder = kernels.recorder(device)
    assert recorder is not None
    slots = len(cache) * BLOCK_TOKENS
    inputs = recorder.inputs(
        RecordingSize(8, None), RequestLines(tables, numbers, numbers), slots=slots, block_tokens=BLOCK_TOKENS
    )
    attention = inputs.attention(view_of(tables, heads, 16, torch.float32, BLOCK_TOKENS))

    def compute() -> tuple[Tensor | None, ...]:
        inputs.build([qkv])
        kernels.write_kv(qkv, KvWrite(cache, inputs.slots, None))
        return (attention(qkv, cache, SCALE),)

    (output,), replay = recorder.record(compute)
    assert output is not None
    said = [(row.line, row.position, 1, step.tables[row.line, row.position // BLOCK_TOKENS], 1, 1) for row in step.rows]
    inputs.put(StepDescription(np.array(said), count))
    expected = step.expected(heads, scale=SCALE, window=None)
    for _ in range(2):
        output.fill_(float("nan"))
        replay()
        expect(output[:count], expected)
        assert torch.equal(tables.cpu(), step.tables)
        assert set(guarded[0].tolist()) == {-7}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("head_dim", [16, 10])  # written by the product itself, and by a kernel behind it
def test_all_threads_of_a_cpu_write_before_any_of_them_reads(head_dim: int, threads: int) -> None:
    """No Python runs between the kernels of a block. A row that reads a slot too early gets NaN."""
    step = step_of("tiles", "younger first", head_dim=head_dim)
    heads = HEADS["grouped"]
    panels = PackedWeight(some(step.qkv[0].numel(), 24, dtype=torch.float32, seed=8))
    x = some(len(step.qkv), 24, dtype=torch.float32, seed=9) / 5
    step.qkv = panels.product(x).view_as(step.qkv)
    expected = step.expected(heads, scale=SCALE, window=None)
    attention = CPU.attention(step.rows, view_of(step.tables, heads, head_dim, torch.float32, BLOCK_TOKENS))
    with computing_threads(threads):
        for _ in range(20):
            cache = step.cache.clone()
            with deferred():
                qkv = panels.write_kv_product(x, None, KvWrite(cache, step.slots, None))
                output = attention(qkv, cache, SCALE)
            expect(output, expected)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 80)])
def test_attention_of_a_cpu_gives_a_row_the_same_bits_behind_any_prefix(dtype: torch.dtype, head_dim: int) -> None:
    """A prefix that is found only makes a row shorter. `head_dim` is a multiple of 8 (cpu/attention/tile.py)."""
    heads = HEADS["grouped"]
    qkv, cache, rows, tables = random_step([(61, 61), (9, 9)], len(heads), 2, head_dim, dtype, BLOCK_TOKENS)
    view = view_of(tables, heads, head_dim, dtype, BLOCK_TOKENS)
    whole = CPU.attention(rows, view)(qkv, cache, SCALE)
    for found in range(BLOCK_TOKENS, rows[0].count, BLOCK_TOKENS):
        row = ContextRow(0, rows[0].count - found, found, rows[0].line)
        behind = CPU.attention([row], view)(qkv[found : rows[0].count].contiguous(), cache, SCALE)
        assert torch.equal(behind, whole[found : rows[0].count])
