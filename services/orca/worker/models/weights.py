"""Reads a rank's weights in the shapes that the building blocks want: split, fused, and packed.

A column-parallel linear holds some output features of the whole, a row-parallel one some input features; the outputs of
the latter are partial sums, so its bias is kept by rank 0 only (ORCA, section 4.1: intra-layer parallelism).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orca.worker.parallel.shard import Shard
from orca.worker.weights.linear import Linear, Packing
from orca.worker.weights.loader import Slice, Tensors
from orca.worker.weights.table import PlainTable, Table

SHARED_BYTES_MIN = 64 << 20
"""Of an embedding that is looked up in the panels of its head. Each word of a row lies in a line of its own there: that
costs a model of 24 M parameters, whose table has 18 MiB in bfloat16, 3 % of its speed."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Output features [first, last) of the linear `name`, which has `total` of them."""

    name: str
    total: int
    taken: tuple[int, int]
    pairs: int | None = None  # size of heads of which dimensions j and j + size / 2 are made neighbours (rotary.py)


class Weights:
    """A checkpoint as one rank reads it. Remembers what it handed out, `linears` in the order of their use.

    Args:
        matrix_dtype: what matrices are read in and embeddings lie in; layouts of linears are `packing`'s.
    """

    def __init__(self, checkpoint: Tensors, shard: Shard, packing: Packing, matrix_dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.shard = shard
        self._packing = packing
        self._matrix_dtype = matrix_dtype
        self.linears: list[Linear] = []
        self._tensors: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Memory of all weights handed out; what embedding and head share counts once."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        return tensors + sum(linear.bytes for linear in self.linears)

    def tensor(self, name: str, shape: tuple[int, ...], *slices: Slice) -> Tensor:
        """A tensor or a part of it, as it is."""
        tensor = self.checkpoint.read(name, shape, *slices)
        self._tensors.append(tensor)
        return tensor

    def table(self, name: str, shape: tuple[int, int], *slices: Slice) -> Table:
        """An embedding."""
        return self._own_table(self.checkpoint.read(name, shape, *slices, dtype=self._matrix_dtype))

    def tied(self, name: str, shape: tuple[int, int], *slices: Slice) -> tuple[Linear, Table]:
        """A matrix that is a linear, to be `listed` where it is used, and an embedding: in memory once, if rows can be
        looked up in the linear's layout, and it is large or they lie there as an embedding's do."""
        view = self._view(name, shape, *slices)
        linear = self._of_view(view)
        table = linear.table
        is_plain = isinstance(table, PlainTable) and linear.weight.dtype == view.dtype
        if table is None or not (is_plain or linear.bytes >= SHARED_BYTES_MIN):
            table = self._own_table(view.clone())
        self.checkpoint.give_back()
        return linear, table

    def _own_table(self, weight: Tensor) -> Table:
        self._tensors.append(weight)
        return PlainTable(weight, self.checkpoint.dtype)

    def full(self, value: float, shape: tuple[int, ...]) -> Tensor:
        """A tensor that the checkpoint leaves out (Checkpoint.full)."""
        tensor = self.checkpoint.full(value, shape)
        self._tensors.append(tensor)
        return tensor

    def columns(
        self,
        parts: Sequence[Columns],
        inputs: int,
        *,
        has_bias: bool,
        is_transposed: bool = False,
        is_gated: bool = False,
    ) -> Linear:
        """A column-parallel linear: the parts' output features, stacked, over all `inputs`.

        Args:
            is_transposed: the checkpoint stores [in, out] (GPT-2's Conv1D).
            is_gated: the parts are gate and up, wanted as silu(gate) * up.
        """
        weights = [
            self._view(f"{part.name}.weight", (inputs, part.total), None, part.taken).t()
            if is_transposed
            else _in_order(self._view(f"{part.name}.weight", (part.total, inputs), part.taken), part)
            for part in parts
        ]
        biases = [
            _in_order(self.checkpoint.view(f"{part.name}.bias", (part.total,), part.taken), part)
            for part in parts
            if has_bias
        ]
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
        self.checkpoint.give_back()
        return self.linear(weight, bias, is_gated=is_gated)

    def rows(
        self,
        name: str,
        outputs: int,
        total: int,
        taken: tuple[int, int],
        *,
        has_bias: bool,
        is_transposed: bool = False,
    ) -> Linear:
        """A row-parallel linear: all `outputs` over input features [first, last) of `total`; its results are summed."""
        bias = self.checkpoint.read(f"{name}.bias", (outputs,)) if has_bias else None
        own_bias = bias if self.shard.rank == 0 else None
        if is_transposed:
            weight = self._view(f"{name}.weight", (total, outputs), taken).t().contiguous()
            self.checkpoint.give_back()
            return self.linear(weight, own_bias)
        return self.whole(f"{name}.weight", (outputs, total), None, taken, bias=own_bias)

    def whole(self, name: str, shape: tuple[int, int], *slices: Slice, bias: Tensor | None = None) -> Linear:
        """A linear of one tensor [out, in]: only layouts that keep it as it is copy it."""
        linear = self.listed(self._of_view(self._view(name, shape, *slices), bias))
        self.checkpoint.give_back()
        return linear

    def _view(self, name: str, shape: tuple[int, int], *slices: Slice) -> Tensor:
        return self.checkpoint.view(name, shape, *slices, dtype=self._matrix_dtype)

    def _of_view(self, view: Tensor, bias: Tensor | None = None) -> Linear:
        linear = self._packing.linear(view, bias)
        if linear.weight is view:
            linear.weight = view.clone()
        return linear

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> Linear:
        """A linear of a weight [out, in] at hand, packed where that is faster."""
        return self.listed(self._packing.linear(weight, bias, is_gated=is_gated))

    def listed(self, linear: Linear) -> Linear:
        """The linear, as the next one in the order of their use."""
        self.linears.append(linear)
        return linear


def _in_order(features: Tensor, part: Columns) -> Tensor:
    return features if part.pairs is None else paired(features, part.pairs)


def paired(features: Tensor, head_dim: int) -> Tensor:
    """Features [heads x head_dim, ...] with dimensions j and j + head_dim / 2 of each head as neighbours."""
    halves = features.view(-1, 2, head_dim // 2, *features.shape[1:])
    return halves.transpose(1, 2).reshape(features.shape)
