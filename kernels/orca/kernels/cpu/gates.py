"""Activations and gates of an MLP on a CPU (see device.py). Each is one launch, with a task per token.

    activate  reads x once, writes as much
    gated     reads gate and up once, writes half as much

Products with packed weights apply the same functions to their own sums (panel.py).
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, literally, njit
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.cpu.activations import activation_of
from orca.kernels.cpu.rows import address_of
from orca.kernels.cpu.team.intrinsics import FAST, KERNEL_TYPES, from_float32, next_task, pointer, to_float32
from orca.kernels.cpu.team.team import Kernel, new_empty, row_count


def activate(x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    tokens, width = row_count(x), x.shape[1]
    out = new_empty(x.dtype, tokens, width) if out is None else out
    assert bias is None or (bias.shape == (width,) and bias.dtype == x.dtype and bias.is_contiguous())
    assert x.is_contiguous()
    assert out.shape == x.shape
    assert out.is_contiguous()
    _activated(x.dtype, activation)(len(x), x.data_ptr(), address_of(bias), out.data_ptr(), tokens, width)
    return out


@cache
def _activated(dtype: torch.dtype, activation: Activation) -> Kernel:
    kind, number = KERNEL_TYPES[dtype], int(activation)

    def body(args: Any) -> None:
        tokens, width = args[5], args[6]
        x, out = carray(pointer(args[2], kind), (tokens, width)), carray(pointer(args[4], kind), (tokens, width))
        bias = carray(pointer(args[3], kind), (width,))
        token = next_task(args)
        while token < tokens:
            for d in range(width):
                added = to_float32(bias[d]) if args[3] != 0 else np.float32(0.0)
                out[token, d] = from_float32(activation_of(to_float32(x[token, d]) + added, number), kind)
            token = next_task(args)

    return Kernel(f"activate-{activation.name}-{dtype}", body)


def gated(gate_up: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
    assert gate_up.is_contiguous()
    assert bias is None or (bias.shape == gate_up.shape[1:] and bias.dtype == gate_up.dtype and bias.is_contiguous())
    tokens, width = row_count(gate_up), gate_up.shape[1] // 2
    made = new_empty(gate_up.dtype, tokens, width)
    gated_kernel(gate_up.dtype, activation)(
        len(gate_up), gate_up.data_ptr(), address_of(bias), made.data_ptr(), tokens, width
    )
    return made


@cache
def gated_kernel(dtype: torch.dtype, activation: Activation) -> Kernel:
    kind, number = KERNEL_TYPES[dtype], int(activation)

    def body(args: Any) -> None:
        tokens, width = args[5], args[6]
        gate_up = carray(pointer(args[2], kind), (tokens, 2, width))
        bias = carray(pointer(args[3], kind), (2, width))
        made = carray(pointer(args[4], kind), (tokens, width))
        token = next_task(args)
        while token < tokens:
            if args[3] == 0:
                _gate(made[token], gate_up[token, 0], gate_up[token, 1], kind, number)
            else:
                _gate_with_bias(made[token], gate_up[token], bias, kind, number)
            token = next_task(args)

    return Kernel(f"gated-{activation.name}-{dtype}", body)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _gate(made: Any, gate: Any, up: Any, kind: Any, number: Any) -> None:
    for d in range(len(made)):
        made[d] = from_float32(activation_of(to_float32(gate[d]), literally(number)) * to_float32(up[d]), kind)


@njit(**FAST)  # type: ignore[untyped-decorator]
def _gate_with_bias(made: Any, gate_up: Any, bias: Any, kind: Any, number: Any) -> None:
    for d in range(len(made)):
        gate, up = (
            to_float32(gate_up[0, d]) + to_float32(bias[0, d]),
            to_float32(gate_up[1, d]) + to_float32(bias[1, d]),
        )
        made[d] = from_float32(activation_of(gate, literally(number)) * up, kind)
