"""RMSNorm and LayerNorm of each row on a GPU, and the addition before a norm.

    normalise      reads x once, writes its norm once
    add_normalise  reads x and the addend once, writes the sum and its norm once

A program computes one row, which stays in its registers, in float32. A sum is rounded to x's dtype before the norm
reads it, and both functions use the same code for the norm. So the result is bit-identical to an addition and a norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.contract.reference import NormParameters
from orca.kernels.gpu.torch_operator import operator

WIDTH_MAX = 16384
"""Longest row that fits into a program's registers (tests/support/kernels/compile_triton.py), as in Llama 3.1 405B."""


@triton.jit  # type: ignore[untyped-decorator]
def normalise_rows(  # type: ignore[no-untyped-def]
    x,
    added,
    added_bias,
    weight,
    bias,
    normed,
    width,
    eps,
    is_added: tl.constexpr,
    has_added_bias: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    """Compute one row. x, added, normed [tokens, width]; added_bias, weight, bias [width]. block: at least width."""
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    is_mine = column < width
    row = tl.load(x + at + column, mask=is_mine, other=0.0).to(tl.float32)
    if is_added:
        row += tl.load(added + at + column, mask=is_mine, other=0.0).to(tl.float32)
        if has_added_bias:
            row += tl.load(added_bias + column, mask=is_mine, other=0.0).to(tl.float32)
        rounded = row.to(x.dtype.element_ty)
        tl.store(x + at + column, rounded, mask=is_mine)
        row = rounded.to(tl.float32)
    scaled = tl.load(weight + column, mask=is_mine, other=0.0).to(tl.float32)
    if has_bias:
        row = tl.where(is_mine, row - tl.sum(row) / width, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(row * row) / width + eps)
    result = row * factor * scaled
    if has_bias:
        result += tl.load(bias + column, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(normed + at + column, result.to(normed.dtype.element_ty), mask=is_mine)


def normalise(x: Tensor, norm: NormParameters) -> Tensor:
    """See device.Kernels.normalise."""
    normed = _new_output(x, norm)
    if x.shape[0]:
        _normalise(x, norm.weight, norm.bias, normed, norm.eps)
    return normed


def add_normalise(x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
    """See device.Kernels.add_normalise."""
    assert added.shape == x.shape
    assert added.dtype == x.dtype
    assert added.is_contiguous()
    assert bias is None or (bias.shape == x.shape[1:] and bias.is_contiguous())
    normed = _new_output(x, norm)
    if x.shape[0]:
        _add_normalise(x, added, bias, norm.weight, norm.bias, normed, norm.eps)
    return normed


def _new_output(x: Tensor, norm: NormParameters) -> Tensor:
    """Return memory for the norm of rows x."""
    assert x.is_contiguous()
    assert x.shape[1] <= WIDTH_MAX, f"a row of {x.shape[1]} numbers: more than the registers hold"
    for each in (norm.weight, norm.bias):
        assert each is None or (each.shape == x.shape[1:] and each.is_contiguous())
    return torch.empty_like(x)


@operator("normed")
def _normalise(x: Tensor, weight: Tensor, bias: Tensor | None, normed: Tensor, eps: float) -> None:
    _launch(x, None, None, weight, bias, normed, eps)


@operator("x", "normed")
def _add_normalise(
    x: Tensor,
    added: Tensor,
    added_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    normed: Tensor,
    eps: float,
) -> None:
    _launch(x, added, added_bias, weight, bias, normed, eps)


def _launch(
    x: Tensor,
    added: Tensor | None,
    added_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    normed: Tensor,
    eps: float,
) -> None:
    tokens, width = x.shape
    normalise_rows[(tokens,)](
        x,
        x if added is None else added,
        weight if added_bias is None else added_bias,
        weight,
        weight if bias is None else bias,
        normed,
        width,
        eps,
        is_added=added is not None,
        has_added_bias=added_bias is not None,
        has_bias=bias is not None,
        block=triton.next_power_of_2(width),
        num_warps=warps_of(width),
    )


def warps_of(width: int) -> int:
    """Return the number of warps with 16 numbers of a row per thread, but at most 16 warps."""
    return min(16, max(1, triton.next_power_of_2(width) // 512))
