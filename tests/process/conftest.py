"""Triton kernels run in Triton's interpreter if there is no GPU. Each test leaves PyTorch's gradients as they were."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.kernels.interpreted_triton import interpret_without_gpu

interpret_without_gpu()


@pytest.fixture(autouse=True)
def gradients_as_before() -> Iterator[None]:
    """Turn gradients on again: benchmarks turn them off for their process, which is that of the next tests here."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(True)
