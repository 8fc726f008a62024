"""A rank's weights in the shapes that the building blocks want: split, fused, and laid out.

A column-parallel linear holds some output features of the whole, a row-parallel one some input features. The outputs of
the latter are partial sums, so only rank 0 keeps its bias (ORCA, section 4.1: intra-layer parallelism).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orca.worker.parallel.shard import Shard
from orca.worker.weights.layout_choice import LayoutChooser
from orca.worker.weights.linear import Linear, PlainTable, Table
from orca.worker.weights.loader import Slice, Tensors

SHARED_BYTES_MIN = 64 << 20
"""Least size of an embedding that is looked up in the panels of its head. There, each number of a row lies in a cache
line of its own: that costs a model of 24 M parameters, whose table has 18 MiB in bfloat16, 3 % of its speed."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Output features [first, last) of the linear `name`, which has `total` of them."""

    name: str
    total: int
    span: tuple[int, int]
    pairs: int | None = None  # size of heads whose dimensions j and j + size / 2 become neighbours (rotary.py)


class RankWeights:
    """A checkpoint as one rank reads it. `linears` lists its linears in the order of their use.

    Args:
        matrix_dtype: of matrices as they are read, and of embeddings; `layouts` decides how linears are laid out.
    """

    def __init__(self, checkpoint: Tensors, shard: Shard, layouts: LayoutChooser, matrix_dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.shard = shard
        self._layouts = layouts
        self._matrix_dtype = matrix_dtype
        self.linears: list[Linear] = []
        self._tensors: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Memory of all weights; a matrix that embedding and head share counts once."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        return tensors + sum(linear.bytes for linear in self.linears)

    def tensor(self, name: str, shape: tuple[int, ...], *slices: Slice) -> Tensor:
        """Read a tensor, or a part of it, as it is."""
        tensor = self.checkpoint.read(name, shape, *slices)
        self._tensors.append(tensor)
        return tensor

    def table(self, name: str, shape: tuple[int, int], *slices: Slice) -> Table:
        """Read an embedding."""
        return self._plain_table(self.checkpoint.read(name, shape, *slices, dtype=self._matrix_dtype))

    def tied_table(
        self, name: str, shape: tuple[int, int], *slices: Slice, bias: Tensor | None = None
    ) -> tuple[Linear, Table]:
        """Read a matrix that is both a linear, to `register` at its use, and an embedding.

        The two share memory if rows can be looked up in the linear's layout. The matrix must also be large, or its rows
        lie there as in an embedding of its own.

        Args: bias: of the linear.
        """
        view = self._view(name, shape, *slices)
        linear = self._lay_out(view, bias)
        table = linear.table
        is_plain = isinstance(table, PlainTable) and linear.weight.dtype == view.dtype
        if table is None or not (is_plain or linear.bytes >= SHARED_BYTES_MIN):
            table = self._plain_table(view.clone())
        self.checkpoint.give_back()
        return linear, table

    def full(self, value: float, shape: tuple[int, ...]) -> Tensor:
        """Make a tensor that the checkpoint leaves out (Checkpoint.full)."""
        tensor = self.checkpoint.full(value, shape)
        self._tensors.append(tensor)
        return tensor

    def made(self, tensor: Tensor) -> Tensor:
        """Take a tensor that is computed and not read, in the checkpoint's dtype and on its device."""
        return self.full(0.0, tuple(tensor.shape)).copy_(tensor)

    def column_linear(
        self,
        parts: Sequence[Columns],
        inputs: int,
        *,
        has_bias: bool,
        is_transposed: bool = False,
        is_gated: bool = False,
    ) -> Linear:
        """Read a column-parallel linear: the parts' output features, stacked, over all `inputs`.

        Args:
            is_transposed: the checkpoint stores [in, out] (GPT-2's Conv1D).
            is_gated: the parts are gate and up, wanted as activation(gate) * up.
        """
        weights = [
            self._view(f"{part.name}.weight", (inputs, part.total), None, part.span).t()
            if is_transposed
            else _in_order(self._view(f"{part.name}.weight", (part.total, inputs), part.span), part)
            for part in parts
        ]
        biases = [
            _in_order(self.checkpoint.view(f"{part.name}.bias", (part.total,), part.span), part)
            for part in parts
            if has_bias
        ]
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
        self.checkpoint.give_back()
        return self.register(self._layouts.linear(weight, bias, is_gated=is_gated))

    def row_linear(
        self,
        name: str,
        outputs: int,
        total: int,
        span: tuple[int, int],
        *,
        has_bias: bool,
        is_transposed: bool = False,
    ) -> Linear:
        """Read a row-parallel linear: all `outputs` over input features [first, last) of `total`.

        Its results are summed over the ranks.
        """
        bias = self.checkpoint.read(f"{name}.bias", (outputs,)) if has_bias else None
        own_bias = bias if self.shard.rank == 0 else None
        if is_transposed:
            weight = self._view(f"{name}.weight", (total, outputs), span).t().contiguous()
            self.checkpoint.give_back()
            return self.register(self._layouts.linear(weight, own_bias))
        return self.whole_linear(f"{name}.weight", (outputs, total), None, span, bias=own_bias)

    def whole_linear(self, name: str, shape: tuple[int, int], *slices: Slice, bias: Tensor | None = None) -> Linear:
        """Read a linear of one tensor [out, in]; only layouts that keep the tensor as it is copy it."""
        linear = self.register(self._lay_out(self._view(name, shape, *slices), bias))
        self.checkpoint.give_back()
        return linear

    def register(self, linear: Linear) -> Linear:
        """Add a linear to `linears` as the next one in the order of their use, and return it."""
        self.linears.append(linear)
        return linear

    def _plain_table(self, weight: Tensor) -> Table:
        self._tensors.append(weight)
        return PlainTable(weight, self.checkpoint.dtype)

    def _view(self, name: str, shape: tuple[int, int], *slices: Slice) -> Tensor:
        return self.checkpoint.view(name, shape, *slices, dtype=self._matrix_dtype)

    def _lay_out(self, view: Tensor, bias: Tensor | None = None) -> Linear:
        linear = self._layouts.linear(view, bias)
        if linear.weight is view:
            linear.weight = view.clone()
        return linear


def _in_order(features: Tensor, part: Columns) -> Tensor:
    return features if part.pairs is None else neighbouring_pairs(features, part.pairs)


def neighbouring_pairs(features: Tensor, head_dim: int) -> Tensor:
    """Reorder features [heads x head_dim, ...] so that dimensions j and j + head_dim / 2 of a head are neighbours."""
    halves = features.view(-1, 2, head_dim // 2, *features.shape[1:])
    return halves.transpose(1, 2).reshape(features.shape)
