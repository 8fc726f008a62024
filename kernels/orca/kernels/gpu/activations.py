"""Activations and gates of an MLP on a GPU. The bias of the first product is added first.

    activate  reads x once, writes as much           activation(x + bias)
    gated     reads gate and up once, writes half    activation(gate + gate's bias) * (up + up's bias)

A program computes a block of one token's numbers, in float32, rounded once. The formulas avoid cancellation and
overflow. Sigmoids use whichever of e^t and e^-t is small. The tail of the normal distribution uses erfc, because
1 + erf loses all digits there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.gpu.torch_operator import operator

BLOCK = 1024
"""Numbers that a program computes."""
_RELU, _GELU, _GELU_TANH, _QUICK_GELU, _SILU = (
    tl.constexpr(int(each))
    for each in (Activation.RELU, Activation.GELU, Activation.GELU_TANH, Activation.QUICK_GELU, Activation.SILU)
)


@triton.jit  # type: ignore[untyped-decorator]
def activate_rows(  # type: ignore[no-untyped-def]
    x, bias, out, width, activation: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr
):
    """Compute out = activation(x + bias).

    x, out [tokens, width], possibly the same memory; bias [width]. activation: number of an Activation.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_mine = column < width
    at = token * width + column
    row = tl.load(x + at, mask=is_mine, other=0.0).to(tl.float32)
    if has_bias:
        row += tl.load(bias + column, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(out + at, _activate(row, activation).to(out.dtype.element_ty), mask=is_mine)


@triton.jit  # type: ignore[untyped-decorator]
def gate_rows(  # type: ignore[no-untyped-def]
    gate_up, bias, gated, width, activation: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr
):
    """Compute gated = activation(gate) * up.

    gate_up [tokens, 2 x width], bias [2 x width], gated [tokens, width]. activation: number of an Activation.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_mine = column < width
    at = gate_up + token * 2 * width + column
    gate = tl.load(at, mask=is_mine, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_mine, other=0.0).to(tl.float32)
    if has_bias:
        gate += tl.load(bias + column, mask=is_mine, other=0.0).to(tl.float32)
        up += tl.load(bias + width + column, mask=is_mine, other=0.0).to(tl.float32)
    result = _activate(gate, activation) * up
    tl.store(gated + token * width + column, result.to(gated.dtype.element_ty), mask=is_mine)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(x, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    if activation == _RELU:
        result = tl.where(x < 0, 0.0, x)  # NaN stays
    elif activation == _GELU:
        result = _gelu(x)
    elif activation == _GELU_TANH:
        # x (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x^3)
        result = _sigmoid_product(x, x * (1.5957691216057308 + 0.07135481627159854 * x * x))
    elif activation == _QUICK_GELU:
        result = _sigmoid_product(x, 1.702 * x)
    else:
        tl.static_assert(activation == _SILU)
        result = _sigmoid_product(x, x)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid_product(x, of):  # type: ignore[no-untyped-def]
    """Return x / (1 + e^-of)."""
    power = tl.exp(-tl.abs(of))
    return x * tl.where(of < 0, power, 1.0) / (1.0 + power)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu(x):  # type: ignore[no-untyped-def]
    """Return GELU of x.

    The tail of the normal distribution beyond |x| is erfc(|x| / sqrt(2)) / 2, by a Chebyshev fit with a relative error
    of at most 1.2e-7 (Press et al., Numerical Recipes, section 6.2).
    """
    far = tl.abs(x) * 0.7071067811865476
    near = 1.0 / (1.0 + 0.5 * far)
    sum_ = 0.17087277 * near - 0.82215223
    sum_ = sum_ * near + 1.48851587
    sum_ = sum_ * near - 1.13520398
    sum_ = sum_ * near + 0.27886807
    sum_ = sum_ * near - 0.18628806
    sum_ = sum_ * near + 0.09678418
    sum_ = sum_ * near + 0.37409196
    sum_ = sum_ * near + 1.00002368
    beyond = 0.5 * near * tl.exp(sum_ * near - 1.26551223 - far * far)
    return x * tl.where(x > 0, 1.0 - beyond, beyond)


def activate(x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See device.Kernels.activate."""
    assert x.is_contiguous()
    assert bias is None or (bias.shape == x.shape[1:] and bias.is_contiguous())
    out = torch.empty_like(x) if out is None else out
    assert out.is_contiguous()
    assert out.shape == x.shape
    if out is x:
        _activate_in_place(x, bias, int(activation))
    else:
        _activate_into(x, bias, out, int(activation))
    return out


def gated(gate_up: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
    """See device.Kernels.gated."""
    assert gate_up.is_contiguous()
    assert bias is None or (bias.shape == gate_up.shape[1:] and bias.is_contiguous())
    made = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _gate(gate_up, bias, made, int(activation))
    return made


@operator("x")
def _activate_in_place(x: Tensor, bias: Tensor | None, activation: int) -> None:
    _launch(x, bias, x, activation)


@operator("out")
def _activate_into(x: Tensor, bias: Tensor | None, out: Tensor, activation: int) -> None:
    _launch(x, bias, out, activation)


def _launch(x: Tensor, bias: Tensor | None, out: Tensor, activation: int) -> None:
    tokens, width = x.shape
    if tokens:
        activate_rows[(tokens, triton.cdiv(width, BLOCK))](
            x, x if bias is None else bias, out, width, activation=activation, has_bias=bias is not None, block=BLOCK
        )


@operator("made")
def _gate(gate_up: Tensor, bias: Tensor | None, made: Tensor, activation: int) -> None:
    tokens, width = made.shape
    if tokens:
        gate_rows[(tokens, triton.cdiv(width, BLOCK))](
            gate_up,
            gate_up if bias is None else bias,
            made,
            width,
            activation=activation,
            has_bias=bias is not None,
            block=BLOCK,
        )
