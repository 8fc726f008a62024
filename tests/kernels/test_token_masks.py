"""Token masks: kernels leave out the same tokens, in the masked rows alone, also in a last word that is not full."""

import numpy as np
import pytest
import torch

from orca.kernels.cpu.kernels import CpuKernels
from orca.kernels.device import Kernels
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.plain import PlainKernels
from support.kernels.gpu import DEVICE

KERNELS = {"plain": PlainKernels(), "cpu": CpuKernels(), "gpu": TritonKernels()}


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1023, 1025, 2500])
@pytest.mark.parametrize("name", KERNELS)
def test_tokens_that_a_mask_leaves_out_are_minus_infinity(name: str, vocab: int) -> None:
    kernels: Kernels = KERNELS[name]  # type: ignore[assignment]
    there = torch.device("cpu") if name == "cpu" else DEVICE
    chance = np.random.default_rng(vocab)
    allowed = chance.random((3, vocab)) < 0.5
    bits = np.zeros((3, -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = allowed
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(5, vocab)
    logits[4, 0] = float("nan")
    rows = [4, 0, 3]
    expected = logits.clone()
    for row, each in zip(rows, torch.from_numpy(allowed), strict=True):
        expected[row, ~each] = float("-inf")
    found = logits.to(there)
    kernels.mask_tokens(found, torch.tensor(rows, device=there), torch.from_numpy(masks).to(there))
    assert torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("name", KERNELS)
def test_no_mask_changes_nothing(name: str) -> None:
    kernels: Kernels = KERNELS[name]  # type: ignore[assignment]
    there = torch.device("cpu") if name == "cpu" else DEVICE
    logits = torch.randn(2, 40, device=there)
    found = logits.clone()
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=there)
    kernels.mask_tokens(found, torch.zeros(0, dtype=torch.int64, device=there), nothing)
    assert torch.equal(found, logits)
