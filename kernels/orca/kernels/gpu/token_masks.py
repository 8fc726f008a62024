"""Token masks on a GPU: one launch sets the logits that the masks of a step leave out to minus infinity."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.gpu.torch_operator import operator

BLOCK = 1024
"""Tokens that a program looks at."""


def mask_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See device.Kernels.mask_tokens."""
    _mask_tokens(logits, rows, masks)


@operator("logits")
def _mask_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    assert logits.is_contiguous()
    assert masks.is_contiguous()
    assert masks.dtype == torch.int32
    vocab, (masked, words) = logits.shape[1], masks.shape
    assert words * 32 >= vocab
    if masked:
        grid = masked, triton.cdiv(vocab, BLOCK)
        mask_rows[grid](logits, rows, masks, vocab, words, block=BLOCK, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def mask_rows(logits, rows, masks, vocab, words, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mask one block of one row. logits [rows, vocab]; rows [masked] int64; masks [masked, words] int32."""
    place = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    is_mine = token < vocab
    word = tl.load(masks + place * words + token // 32, mask=is_mine, other=0)
    is_left_out = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows + place)
    tl.store(logits + row * vocab + token, float("-inf"), mask=is_mine & is_left_out)
