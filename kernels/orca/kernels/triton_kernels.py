"""The kernels of GPUs (device.py): Triton, which compiles each for what it meets first and keeps it on the disk.

`kernels_of` does not give them yet: what compiles in the middle of a step can take longer than a rank may be silent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from orca.kernels import triton_rows, triton_sampling
from orca.kernels.plain import PlainKernels
from orca.kernels.reference import ContextRow, Sight
from orca.kernels.sampling_lines import SamplingLines
from orca.kernels.triton_attention import TritonAttention
from orca.kernels.triton_recording import GraphRecorder


class TritonKernels(PlainKernels):
    """For tensors of float32, bfloat16 and float16. What PyTorch does in one kernel of its own stays with it."""

    def attention(self, rows: Sequence[ContextRow], seen: Sight) -> TritonAttention:  # type: ignore[override]
        return TritonAttention(rows, seen)

    def recorder(self, device: torch.device) -> GraphRecorder:  # type: ignore[override]
        return GraphRecorder(device)

    def sampler(self, vocab: int, device: torch.device) -> "TritonSampler":  # type: ignore[override]
        return TritonSampler(vocab, device)

    keep = staticmethod(triton_rows.keep)  # type: ignore[assignment]
    normalise = staticmethod(triton_rows.normalise)  # type: ignore[assignment]
    gated_silu = staticmethod(triton_rows.gated_silu)  # type: ignore[assignment]


class TritonSampler:
    """As device.Sampler."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.lines = SamplingLines(1, vocab, device)

    def sample(self, logits: Tensor, lines: Tensor, indices: Tensor) -> Tensor:
        tokens = torch.zeros_like(indices)
        triton_sampling.sample(logits, lines, indices, self.lines, tokens, logits.new_empty(len(logits)))
        return tokens
