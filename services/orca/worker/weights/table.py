"""Matrices of which rows are looked up: the embeddings of tokens."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from orca.kernels.device import kernels_of


class Table(Protocol):
    def embed(self, ids: Tensor, places: Tensor | None, positions: Tensor) -> Tensor:
        """The rows `ids` (+ places[positions]) in the dtype of activations (device.Kernels.embed)."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A weight [rows, width] as it is, or in half precision where activations are float32."""

    weight: Tensor
    dtype: torch.dtype  # of activations

    def embed(self, ids: Tensor, places: Tensor | None, positions: Tensor) -> Tensor:
        return kernels_of(self.weight.device).embed(self.weight, ids, places, positions, self.dtype)
