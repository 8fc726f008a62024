"""Memory for weights: zeros, apart from each other, and given back."""

import weakref

import pytest
import torch

from orca.kernels.cpu import huge_pages
from orca.kernels.cpu.huge_pages import WeightMemory


def test_weights_are_zeros_that_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK_BYTES", 1 << 16)
    weights = WeightMemory()
    shapes = [(100, 30), (1,), (0, 5), (64, 256), (3, 70, 2), (30_000,), (4096,)]  # the fourth takes a piece, two more
    tensors = [weights.zeros(shape, torch.float32) for shape in shapes]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert not any(tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_weight_has_its_dtype(dtype: torch.dtype) -> None:
    assert WeightMemory().zeros((3, 5), dtype).dtype == huge_pages.zeros((3, 5), dtype).dtype == dtype


def test_a_memory_block_is_freed_with_its_last_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK_BYTES", 1 << 16)
    weights = WeightMemory()
    one, other = (weights.zeros((1 << 13,), torch.float32) for _ in range(2))
    pages = weakref.ref(weights._pages)
    weights.zeros((1,), torch.float32)  # in the next piece
    del one
    assert pages() is not None
    del other
    assert pages() is None
