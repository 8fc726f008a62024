"""The activation functions of an MLP."""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(IntEnum):
    """An activation function. Kernels get its number (panel.py, `ACTIVATE`)."""

    RELU = 0
    GELU = 1
    """x * P(X <= x) with X normally distributed."""
    GELU_TANH = 2
    """A close approximation of GELU by tanh (GPT-2)."""
    QUICK_GELU = 3
    """A rough approximation of GELU: x * sigmoid(1.702 x)."""
    SILU = 4

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the function with PyTorch's own operations."""
        match self:
            case Activation.RELU:
                return F.relu(x)
            case Activation.GELU:
                return F.gelu(x)
            case Activation.GELU_TANH:
                return F.gelu(x, approximate="tanh")
            case Activation.QUICK_GELU:
                return x * torch.sigmoid(1.702 * x)
            case Activation.SILU:
                return F.silu(x)
