"""What an MLP does to each number between its products."""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(IntEnum):
    """Kernels are given the number (panel.py, `ACTIVATE`)."""

    RELU = 0
    GELU = 1
    """x times the normal distribution's share below x."""
    GELU_TANH = 2
    """GELU, nearly, by tanh (GPT-2)."""
    QUICK_GELU = 3
    """GELU, roughly: x * sigmoid(1.702 x)."""
    SILU = 4

    def __call__(self, x: Tensor) -> Tensor:
        """In PyTorch's own operations."""
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
