"""Rows of numbers for tests of kernels, and how alike two results are."""

import torch
from torch import Tensor

from orca.kernels.device import kernels_of
from orca.kernels.plain import PlainKernels

CPU, PLAIN = kernels_of(torch.device("cpu")), PlainKernels()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return seeded random numbers of this shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(one: Tensor, other: Tensor, *, roundings: int) -> None:
    """Equal but for some roundings to the dtype."""
    unit = torch.finfo(one.dtype).eps
    torch.testing.assert_close(one, other, atol=roundings * unit, rtol=roundings * unit)
