"""What is recorded once runs on other numbers: the inputs of a step out of what a device keeps of the requests."""

import numpy as np
import pytest
import torch
from attention_steps import random_step
from torch import Tensor

from orca.kernels.device import kernels_of
from orca.kernels.recording import Lines, Recorder
from orca.kernels.reference import ContextRow, Sight, attend_reference

CPU = torch.device("cpu")
BLOCK_TOKENS = 4
HEADS = [0, 0, 1, 1]


def recorder() -> Recorder:
    found = kernels_of(CPU).recorder()
    assert found is not None
    return found


def lines_of(tables: Tensor) -> Lines:
    return Lines(tables, fed=100 + torch.arange(len(tables)), prompts=torch.ones(len(tables), dtype=torch.int64))


def sight(tables: Tensor, window: int | None = None) -> Sight:
    return Sight(
        kv_of_query=HEADS,
        kv_heads=2,
        head_dim=12,
        tables=tables,
        block_tokens=BLOCK_TOKENS,
        window=window,
        dtype=torch.float32,
        device=CPU,
    )


def test_inputs_are_made_of_what_is_told_and_kept() -> None:
    tables = torch.full((5, 3), -1).int()
    tables[3] = torch.tensor([7, 2, -1])
    inputs = recorder().inputs(3, lines_of(tables), BLOCK_TOKENS)
    inputs.put(np.array([(3, 9, 55, 6), (0, 0, -1, 4), (4, 7, -1, 1)]))
    _, run = recorder().record(inputs.lay_out)
    run()
    assert inputs.ids.tolist() == [55, 100, 104]
    assert inputs.positions.tolist() == [9, 0, 7]
    assert inputs.slots.tolist() == [6 * 4 + 1, 4 * 4 + 0, 1 * 4 + 3]
    assert tables.tolist() == [[4, -1, -1], [-1] * 3, [-1] * 3, [7, 2, 6], [-1, 1, -1]]


@pytest.mark.parametrize("window", [None, 3])
def test_a_recording_computes_the_step_that_it_is_told_of(window: int | None) -> None:
    qkv, cache, rows, tables = random_step([(5, 1), (17, 1), (1, 1), (16, 1)], 4, 2, 12, torch.float32, BLOCK_TOKENS)
    lines = lines_of(tables.clone())
    inputs = recorder().inputs(len(rows), lines, BLOCK_TOKENS)
    attention = inputs.attention(sight(lines.tables, window))

    def compute() -> Tensor:
        inputs.lay_out()
        return attention(qkv, cache, 0.3)

    output, run = recorder().record(compute)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        chosen = [rows[place] for place in order]
        inputs.put(
            np.array([(row.line, row.position, 1, tables[row.line, row.position // BLOCK_TOKENS]) for row in chosen])
        )
        output.fill_(float("nan"))
        run()
        own = [ContextRow(place, 1, row.position, row.line) for place, row in enumerate(chosen)]
        expected = attend_reference(qkv[:, :4], cache, own, tables, HEADS, scale=0.3, window=window)
        torch.testing.assert_close(output, expected.flatten(1), atol=2e-6, rtol=2e-6)
