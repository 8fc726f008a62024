"""Measure attention on this processor beside PyTorch's: python -m orca.bench.parts.attention

It runs whole prompts of some lengths, in float32 and bfloat16, with OMP_NUM_THREADS threads, and prints microseconds
per layer. Our attention reads the blocks of the cache; PyTorch's (scaled_dot_product_attention) reads contiguous keys
and values. The two take turns. The output shows the median of all turns, the least in brackets, and our time as a share
of PyTorch's. Results are compared first. There is no target.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import AttentionView, ContextRow
from orca.kernels.device import kernels_of

HEAD_DIM, BLOCK_TOKENS, SCALE = 64, 16, 64**-0.5
SHAPES = [(128, 8, 8), (512, 8, 8), (1024, 8, 8), (2048, 8, 2)]
"""Tokens, query heads, KV heads."""
_TURNS, _TURN_S = 9, 0.1


def both(
    tokens: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return our attention and PyTorch's, for the same prompt."""
    qkv, cache, view = _prompt(tokens, heads, kv_heads, dtype)
    attention = kernels_of(view.device).attention([ContextRow(0, tokens, 0, 0)], view)
    query, keys, values = (part.transpose(0, 1).contiguous() for part in qkv.split((heads, kv_heads, kv_heads), dim=1))

    def theirs() -> Tensor:
        attended = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=SCALE, enable_gqa=heads > kv_heads
        )
        return attended[0].transpose(0, 1).flatten(1)

    return lambda: attention(qkv, cache, SCALE), theirs


def _prompt(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, AttentionView]:
    """Return qkv of a whole prompt, the cache that holds it in scattered blocks, and its view."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(-(-tokens // BLOCK_TOKENS), generator=generator).int()
    qkv = torch.randn(tokens, heads + 2 * kv_heads, HEAD_DIM, generator=generator).to(dtype)
    cache = torch.zeros(len(table), 2 * kv_heads, BLOCK_TOKENS, HEAD_DIM, dtype=dtype)
    TokenSlots.of_positions(table, 0, tokens, BLOCK_TOKENS).write(cache, qkv[:, heads:])
    view = AttentionView(
        kv_of_query=[head * kv_heads // heads for head in range(heads)],
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        tables=table[None],
        block_tokens=BLOCK_TOKENS,
        window=None,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return qkv, cache, view


def turn_us(call: Callable[[], Tensor]) -> float:
    """Return the microseconds of a call, measured over as many calls as fill a turn."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < _TURN_S:
        call()
        calls += 1
    return 1e6 * (time.perf_counter() - start) / calls


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, heads, kv_heads in SHAPES:
            ours, theirs = both(tokens, heads, kv_heads, dtype)
            tolerance = 2e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours(), theirs(), atol=tolerance, rtol=tolerance)
            turns = [(turn_us(ours), turn_us(theirs)) for _ in range(_TURNS)]
            medians, least = ([of(side) for side in zip(*turns, strict=True)] for of in (statistics.median, min))
            name = f"{str(dtype).removeprefix('torch.')}, {tokens} tokens, {heads} heads, {kv_heads} of KV"
            ratio = medians[0] / medians[1]
            figures = " ".join(
                f"{who} {one:7.0f} ({low:.0f})"
                for who, one, low in zip(("ours", "theirs"), medians, least, strict=True)
            )
            print(f"{name:44} {figures}  {ratio:.2f}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
