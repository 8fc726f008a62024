"""The kernels of a device: what the layers of a model need beside matrix products, with all requests of a step in one
flat tensor (selective batching, ORCA, section 3, S2).

plain.py computes everything with PyTorch's own operations, on any device, and is what faster versions are tested
against. Those of CPUs are in numba_attention.py and numba_rows.py; their matrix products, in numba_product.py, are a
layout of weights (worker/linear.py). Those of GPUs, in triton_attention.py and triton_rows.py, wait for their first run
on one (`python -m orca.kernels.bench`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from orca.kernels.plain import PlainKernels
from orca.kernels.recording import Recorder
from orca.kernels.reference import ContextRow, Kept, RaggedAttention, RowNorm, Sight
from orca.kernels.sampling_lines import SamplingLines


class Sampler(Protocol):
    """Draws tokens where the logits are, for requests whose sampling the device knows."""

    lines: SamplingLines

    def sample(self, logits: Tensor, lines: Tensor, indices: Tensor) -> Tensor:
        """One token for each row; it is counted, and fed on in `lines.fed`.

        Args:
            logits: [rows, vocab] float32, contiguous.
            lines: [rows] int32; rows of -1 are passed over.
            indices: [rows] int64, of the token among those that are generated for the request.
        Returns: [rows] int64.
        """
        ...


class Kernels(Protocol):
    def prepare(self, dtype: torch.dtype, head_dim: int) -> None:
        """Compile what a model needs, so that its first step does not wait for it."""
        ...

    def attention(self, rows: Sequence[ContextRow], seen: Sight) -> RaggedAttention:
        """Ragged paged attention (reference.py: its meaning).

        Args:
            rows: the requests of the step; together they cover each flat token once.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """A block at whose end the kernels that are called in it are run, if not before.

        Inside only kernels may touch what they write, and none may be given a view of it. What they are given from
        outside lives until the end.
        """
        ...

    def recorder(self, device: torch.device) -> Recorder | None:
        """How steps are recorded and run again; None where they cannot be."""
        ...

    def sampler(self, vocab: int, device: torch.device) -> Sampler | None:
        """What draws tokens on the device; None where the host does."""
        ...

    def count(self, at: int) -> None:
        """Add one to the number of 64 bits at an address of the host, when the kernels that were called before have run
        (on other devices: have been ordered)."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [rows, ...], contiguous, at these places [many] int64, which must be there: [many, ...]."""
        ...

    def embed(self, table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor) -> Tensor:
        """table[ids] (+ places[positions]), the sum rounded once.

        Args:
            table: [vocab, hidden], contiguous; ids: [tokens] int64, which must be there.
            places: [positions, hidden] likewise, of models that learn their positions; positions: [tokens] int64.
        Returns: [tokens, hidden].
        """
        ...

    def largest(self, x: Tensor) -> Tensor:
        """The first place of the largest number of each row of x [rows, width] float32: [rows] int64."""
        ...

    def keep(self, qkv: Tensor, kept: Kept) -> None:
        """Normalise and turn the step's queries and keys, and put its keys and values into the cache.

        Args:
            qkv: [tokens, query heads + 2 x kv heads, head_dim], contiguous; changed in place.
        """
        ...

    def normalise(self, x: Tensor, norm: RowNorm) -> Tensor:
        """RMSNorm or LayerNorm of each row of x [tokens, hidden], contiguous."""
        ...

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. Args: gate_up: [tokens, 2 x width], contiguous. Returns: [tokens, width]."""
        ...


@cache
def kernels_of(device: torch.device) -> Kernels:
    """The fastest that there are for a device."""
    if device.type == "cpu":
        # Numba takes a quarter of a second to import, which other devices need not wait for.
        from orca.kernels.numba_kernels import CpuKernels

        return CpuKernels()
    return PlainKernels()
