"""What is done to each token's activations before a linear, or behind it."""

from torch import Tensor

from orca.kernels.contract.reference import NormParameters
from orca.kernels.device import kernels_of


class Norm:
    """RMSNorm or LayerNorm of rows [tokens, hidden]."""

    def __init__(self, rows: NormParameters) -> None:
        self.rows = rows
        self._kernels = kernels_of(rows.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.normalise(x, self.rows)
