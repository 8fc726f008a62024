"""What is done to each token's activations before a linear."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from orca.kernels.device import kernels_of
from orca.kernels.reference import RowNorm

Norm = Callable[[Tensor], Tensor]


class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, size: int, eps: float) -> None:
        self._weight, self._bias, self._size, self._eps = weight, bias, (size,), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._size, self._weight, self._bias, self._eps)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, accumulated in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.rows = RowNorm(weight, eps)
        self._kernels = kernels_of(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.rows.weight, self.rows.eps)
