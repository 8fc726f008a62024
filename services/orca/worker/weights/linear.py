"""y = x W^T + b, with the weight laid out for the machine that it runs on.

At a batch of some dozens of rows, a plain matrix product spends much of its time rearranging the weight. Our own kernel
(product.py), oneDNN and MKL can rearrange it once, at load. Each of them is a layout, a class here; layout_choice.py
picks one for each shape of weight. A packed weight replaces the plain one.

Beside the product, models ask a linear for the operations right before and after it: norm, activation, sum, cache. Some
layouts do these in the same kernel.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters
from orca.kernels.cpu import huge_pages
from orca.kernels.device import kernels_of

# Row count that oneDNN and MKL pack a weight for; MKL's packing serves no other count.
_PACKED_ROWS = 16


class Norm:
    """RMSNorm or LayerNorm of rows [tokens, hidden]."""

    def __init__(self, rows: NormParameters) -> None:
        self.rows = rows
        self._kernels = kernels_of(rows.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.normalise(x, self.rows)


class Table(Protocol):
    """A matrix whose rows are looked up: the embeddings of tokens."""

    def embed(self, ids: Tensor, places: Tensor | None, positions: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale x the rows `ids` (+ places[positions]) in the dtype of activations (device.Kernels.embed)."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A weight [rows, width] as it is, or in half precision beside float32 activations."""

    weight: Tensor
    dtype: torch.dtype  # of activations

    def embed(self, ids: Tensor, places: Tensor | None, positions: Tensor, scale: float = 1.0) -> Tensor:
        return kernels_of(self.weight.device).embed(self.weight, ids, places, positions, self.dtype, scale)


class Linear:
    """The plain layout: a weight [out, in] and perhaps a bias [out].

    Other layouts override the operations that they do in the same kernel as the product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight = weight
        self.bias = bias

    @property
    def bytes(self) -> int:
        return _bytes(self.weight) + (0 if self.bias is None else _bytes(self.bias))

    @property
    def table(self) -> Table | None:
        """The rows of the weight, for an embedding that is the same matrix; None if the layout cannot look them up."""
        return PlainTable(self.weight, self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [rows, out] for rows x [rows, in]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, to: Tensor, x: Tensor, then: Norm | None = None) -> Tensor | None:
        """Add the outputs for x to `to` [rows, out], in place.

        Args:
            then: the norm that the model applies to the sum next, if there is one.
        Returns: that norm of the sum if the layout computes it in the same kernel; otherwise None, and the caller
            computes it.
        """
        return self.add_outputs(to, self(x), then)

    def add_outputs(self, to: Tensor, outputs: Tensor, then: Norm | None = None) -> Tensor | None:  # noqa: ARG002
        """Do the same as `add_to` with outputs that are computed already, and summed over ranks."""
        to.add_(outputs)
        return None

    def apply(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Return the outputs for norm(x)."""
        return self(x if norm is None else norm(x))

    def apply_float32(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Return the outputs in float32, not rounded to x's dtype first if the layout can avoid that."""
        return self.apply(norm, x).float()

    def apply_activated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(`apply`)."""
        return activation(self.apply(norm, x))

    def apply_gated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [rows, out / 2], for outputs that are gate and up."""
        return kernels_of(x.device).gated(self.apply(norm, x), activation)

    def apply_to_cache(self, norm: Norm | None, x: Tensor, kept: KvWrite) -> Tensor:
        """Put keys and values into the KV cache.

        Returns: the outputs, [rows, query heads + 2 x kv heads, head_dim], rotated.
        """
        qkv = self.apply(norm, x).view(x.shape[0], -1, kept.cache.shape[3])
        kernels_of(x.device).write_kv(qkv, kept)
        return qkv


class PanelLinear(Linear):
    """The layout of our own CPU kernel: the weight in panels. One kernel does the product and all around it.

    Args:
        dtype: of rows and results: the weight's (None), or float32 beside a weight that stays in half precision.
        is_gated: `apply_gated` is called as well.
        memory: for the weight; None allocates it anywhere.
    Raises: ValueError if the kernel cannot multiply this many inputs.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_gated: bool = False,
        memory: huge_pages.WeightMemory | None = None,
    ) -> None:
        # Numba takes a quarter of a second to import, which other devices need not wait for.
        from orca.kernels.cpu.product.product import PackedWeight

        super().__init__(weight)
        stored, scale = self._stored(weight)
        self._panels = PackedWeight(
            stored, bias, scale=scale, dtype=dtype or weight.dtype, is_gated=is_gated, memory=memory
        )
        self.weight = self._panels.weight

    def _stored(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the numbers for the panels, and the scale of each output if it has one."""
        return weight, None

    @property
    def bytes(self) -> int:
        return self._panels.bytes

    @property
    def table(self) -> Table | None:
        return self._panels if self._panels.keeps_rows else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._panels.product(x)

    def add_to(self, to: Tensor, x: Tensor, then: Norm | None = None) -> None:  # noqa: ARG002
        self._panels.add_product(x, to)

    def apply(self, norm: Norm | None, x: Tensor) -> Tensor:
        return self._panels.product(x, _row_norm(norm))

    def apply_float32(self, norm: Norm | None, x: Tensor) -> Tensor:
        return self._panels.float32_product(x, _row_norm(norm))

    def apply_activated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        return self._panels.product(x, _row_norm(norm), activation)

    def apply_gated(self, norm: Norm | None, x: Tensor, activation: Activation) -> Tensor:
        return self._panels.gated_product(x, activation, _row_norm(norm))

    def apply_to_cache(self, norm: Norm | None, x: Tensor, kept: KvWrite) -> Tensor:
        return self._panels.write_kv_product(x, _row_norm(norm), kept)


def _row_norm(norm: Norm | None) -> NormParameters | None:
    return None if norm is None else norm.rows


class OneDnnLinear(Linear):
    """oneDNN's blocked layout, which serves any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)

    @property
    def table(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


class MklLinear(Linear):
    """MKL's layout for 16 rows. Fewer rows are padded; more use the plain weight, which is kept beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)

    @property
    def bytes(self) -> int:
        return super().bytes + _bytes(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > _PACKED_ROWS:
            return super().__call__(x)
        padded = x if rows == _PACKED_ROWS else F.pad(x, (0, 0, 0, _PACKED_ROWS - rows))
        y: Tensor = torch.ops.mkl._mkl_linear(padded, self._packed, self.weight, self.bias, _PACKED_ROWS)
        return y[:rows]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
