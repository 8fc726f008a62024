"""What an MLP does between its products, on a CPU (device.py has the meaning), one launch each, a token a task:

    activated   reads x once, writes as much
    gated_silu  reads gate and up once, writes half as much

Products in panels do the same with their own sums (panel.py).
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.cpu.activations import activation_of, silu
from orca.kernels.cpu.rows import address_of
from orca.kernels.cpu.team.intrinsics import BITS_OF, FAST, elements, narrow, take, wide
from orca.kernels.cpu.team.team import Kernel, new_empty, rows_of


def activate(x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    tokens, width = rows_of(x), x.shape[1]
    out = new_empty(x.dtype, tokens, width) if out is None else out
    assert bias is None or (bias.shape == (width,) and bias.dtype == x.dtype and bias.is_contiguous())
    assert x.is_contiguous()
    assert out.shape == x.shape
    assert out.is_contiguous()
    _activated(x.dtype, activation)(len(x), x.data_ptr(), address_of(bias), out.data_ptr(), tokens, width)
    return out


@cache
def _activated(dtype: torch.dtype, activation: Activation) -> Kernel:
    kind, number = BITS_OF[dtype], int(activation)

    def body(args: Any) -> None:
        tokens, width = args[5], args[6]
        x, out = carray(elements(args[2], kind), (tokens, width)), carray(elements(args[4], kind), (tokens, width))
        bias = carray(elements(args[3], kind), (width,))
        token = take(args)
        while token < tokens:
            for d in range(width):
                added = wide(bias[d]) if args[3] != 0 else np.float32(0.0)
                out[token, d] = narrow(activation_of(wide(x[token, d]) + added, number), kind)
            token = take(args)

    return Kernel(f"activated-{activation.name}-{dtype}", body)


def gated_silu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    assert gate_up.is_contiguous()
    assert bias is None or (bias.shape == gate_up.shape[1:] and bias.dtype == gate_up.dtype and bias.is_contiguous())
    tokens, width = rows_of(gate_up), gate_up.shape[1] // 2
    gated = new_empty(gate_up.dtype, tokens, width)
    gated_silu_kernel(gate_up.dtype)(
        len(gate_up), gate_up.data_ptr(), address_of(bias), gated.data_ptr(), tokens, width
    )
    return gated


@cache
def gated_silu_kernel(dtype: torch.dtype) -> Kernel:
    kind = BITS_OF[dtype]

    def body(args: Any) -> None:
        tokens, width = args[5], args[6]
        gate_up = carray(elements(args[2], kind), (tokens, 2, width))
        bias = carray(elements(args[3], kind), (2, width))
        gated = carray(elements(args[4], kind), (tokens, width))
        token = take(args)
        while token < tokens:
            if args[3] == 0:
                _gate(gated[token], gate_up[token, 0], gate_up[token, 1], kind)
            else:
                _gate_sums(gated[token], gate_up[token], bias, kind)
            token = take(args)

    return Kernel(f"gated_silu-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _gate(gated: Any, gate: Any, up: Any, kind: Any) -> None:
    for d in range(len(gated)):
        gated[d] = narrow(silu(wide(gate[d])) * wide(up[d]), kind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _gate_sums(gated: Any, gate_up: Any, bias: Any, kind: Any) -> None:
    for d in range(len(gated)):
        gate, up = wide(gate_up[0, d]) + wide(bias[0, d]), wide(gate_up[1, d]) + wide(bias[1, d])
        gated[d] = narrow(silu(gate) * up, kind)
