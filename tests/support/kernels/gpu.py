"""The GPU's kernels for tests whose tensors lie on the CPU: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import (
    AttentionView,
    ContextRow,
    DistanceBias,
    KvWrite,
    NormParameters,
    RaggedAttention,
)
from orca.kernels.gpu.kernels import TritonKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 in a dtype, as kernels on DEVICE round: Triton's interpreter cuts off what bfloat16 has no room for."""
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        numbers = (numbers.view(torch.int32) >> 16 << 16).view(torch.float32)
    return numbers.to(dtype)


class GpuKernels:
    """TritonKernels that take what they are given to the GPU, and bring back what it becomes."""

    def __init__(self) -> None:
        self._kernels = TritonKernels()

    def attention(self, rows: Sequence[ContextRow], seen: AttentionView) -> RaggedAttention:
        attention = self._kernels.attention(rows, replace(_there(seen), device=DEVICE))

        def attend(qkv: Tensor, cache: Tensor, scale: float, bias: DistanceBias | None = None) -> Tensor:
            there = None if bias is None else _there(bias)
            return attention(qkv.to(DEVICE), cache.to(DEVICE), scale, there).cpu()

        return attend

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._kernels.take_rows(x.to(DEVICE), rows.to(DEVICE)).cpu()

    def normalise(self, x: Tensor, norm: NormParameters) -> Tensor:
        return self._kernels.normalise(x.to(DEVICE), _there(norm)).cpu()

    def add_normalise(self, x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
        there = x.to(DEVICE)
        normed = self._kernels.add_normalise(there, added.to(DEVICE), _there(norm), _moved(bias))
        x.copy_(there)
        return normed.cpu()

    def activate(
        self, x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        there = x.to(DEVICE)
        result = self._kernels.activate(there, activation, _moved(bias), there if out is x else _moved(out)).cpu()
        return result if out is None else out.copy_(result)

    def gated(self, gate_up: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
        return self._kernels.gated(gate_up.to(DEVICE), activation, _moved(bias)).cpu()

    def write_kv(self, qkv: Tensor, kept: KvWrite, bias: Tensor | None = None) -> None:
        there, kept_there = qkv.to(DEVICE), _there(kept)
        self._kernels.write_kv(there, kept_there, _moved(bias))
        qkv.copy_(there)
        kept.cache.copy_(kept_there.cache)


def _moved(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


def _there(record: Any) -> Any:
    """A record with its tensors on the GPU."""
    moved = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Tensor):
            moved[each.name] = value.to(DEVICE)
        elif isinstance(value, NormParameters):
            moved[each.name] = _there(value)
    return replace(record, **moved)
