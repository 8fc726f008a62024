"""The Triton kernel against the reference: in the interpreter, or on a GPU where there is one."""

import pytest
import torch
from attention_steps import HEADS, STEPS, random_step

from orca.kernels.reference import attend_reference
from orca.kernels.triton_attention import triton_attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("window", [None, 1, 6], ids=lambda window: f"window-{window}")
@pytest.mark.parametrize("heads", ["grouped", "border-of-ranks"])
@pytest.mark.parametrize("step", ["one-row", "decode", "prefill", "chunk", "mixed"])
def test_one_launch_equals_the_reference(step: str, heads: str, window: int | None) -> None:
    kv_of_query = HEADS[heads]
    qkv, cache, rows = random_step(STEPS[step], len(kv_of_query), max(kv_of_query) + 1, 10, torch.float32)
    query = qkv[:, : len(kv_of_query)]
    expected = attend_reference(query, cache, rows, kv_of_query, scale=0.3, window=window)
    output = triton_attend(qkv.to(DEVICE), cache.to(DEVICE), rows, kv_of_query, scale=0.3, window=window)
    # Products and sums in float32 on both sides, in another order.
    torch.testing.assert_close(output.cpu(), expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize(("block_m", "block_n"), [(1, 4), (2, 8), (8, 32)])
def test_the_size_of_the_tiles_does_not_change_the_result(block_m: int, block_n: int) -> None:
    qkv, cache, rows = random_step(STEPS["mixed"], 4, 2, 12, torch.float32)
    expected = attend_reference(qkv[:, :4], cache, rows, [0, 0, 1, 1], scale=0.3, window=9)
    output = triton_attend(
        qkv.to(DEVICE), cache.to(DEVICE), rows, [0, 0, 1, 1], scale=0.3, window=9, block_m=block_m, block_n=block_n
    )
    torch.testing.assert_close(output.cpu(), expected, atol=4e-6, rtol=4e-6)
