"""The kernels of a device: what the layers of a model need beside matrix products, with all requests of a step in one
flat tensor (selective batching, ORCA, section 3, S2).

plain.py computes everything with PyTorch's own operations, on any device, and is what faster versions are tested
against. Those of CPUs are in attention.py and rows.py; their matrix products, in product.py, are a
layout of weights (worker/weights/linear.py). Those of GPUs are listed in kernels.py; they wait for their first run on a
GPU (`python -m orca.bench.gpu`).
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.recording import Recorder
from orca.kernels.contract.reference import (
    AttentionView,
    ContextRow,
    KvWrite,
    ModelSizes,
    NormParameters,
    RaggedAttention,
)
from orca.kernels.contract.sampling_lines import SamplingLines
from orca.kernels.plain import PlainKernels

log = logging.getLogger(__name__)

CAPABILITY_MIN = (8, 0)
"""Of a GPU: the first whose tensor cores multiply bfloat16 (Ampere)."""


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
    def prepare(self, sizes: ModelSizes) -> bool:
        """Compile what a model needs, so that none of its steps waits for it.

        Returns: whether a process that begins now, and finds all of it compiled, may round otherwise than this one.
        """
        ...

    def attention(self, rows: Sequence[ContextRow], seen: AttentionView) -> RaggedAttention:
        """Ragged paged attention (reference.py: its meaning).

        Args:
            rows: the requests of the step; together they cover each flat token once.
        """
        ...

    def deferred(self) -> AbstractContextManager[None]:
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

    def increment(self, at: int) -> None:
        """Add one to the number of 64 bits at an address of the host, when the kernels that were called before have run
        (on other devices: have been ordered)."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [rows, ...], contiguous, at these places [many] int64, which must be there: [many, ...]."""
        ...

    def embed(self, table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """table[ids] (+ places[positions]), the sum rounded once.

        Args:
            table: [vocab, hidden], contiguous; ids: [tokens] int64, which must be there.
            places: [positions, hidden] likewise, of models that learn their positions; positions: [tokens] int64.
            dtype: of places and results; of the table, too, or it is of half precision and the others float32.
        Returns: [tokens, hidden].
        """
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """The first place of the largest number of each row of x [rows, width] float32: [rows] int64."""
        ...

    def write_kv(self, qkv: Tensor, kept: KvWrite, bias: Tensor | None = None) -> None:
        """Normalise and turn the step's queries and keys, and put its keys and values into the cache.

        Args:
            qkv: [tokens, query heads + 2 x kv heads, head_dim], contiguous; changed in place.
            bias: [(query heads + 2 x kv heads) x head_dim], added first, and the sum rounded.
        """
        ...

    def normalise(self, x: Tensor, norm: NormParameters) -> Tensor:
        """RMSNorm or LayerNorm of each row of x [tokens, hidden], contiguous."""
        ...

    def add_normalise(self, x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
        """x += added + bias, in place, and the norm of the new x.

        The sum is taken in float32 from left to right and rounded once, to x's dtype, before the norm reads it: what
        comes back has the bits that `normalise` gives for the new x.

        Args:
            x, added: [tokens, hidden], contiguous, apart from each other.
            bias: [hidden].
        Returns: [tokens, hidden], memory of its own.
        """
        ...

    def activate(
        self, x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """activation(x + bias).

        Args:
            x: [tokens, width], contiguous.
            bias: [width].
            out: memory for it, which may be x itself; its own by default.
        Returns: [tokens, width].
        """
        ...

    def gated_silu(self, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu(gate) * up.

        Args:
            gate_up: [tokens, 2 x width], contiguous.
            bias: [2 x width], added to both before.
        Returns: [tokens, width].
        """
        ...


def kernels_of(device: torch.device) -> Kernels:
    """The fastest that there are for a device, or what `use_kernels` says."""
    return _said.get(device.type) or _fastest(device)


@contextmanager
def use_kernels(device_type: str, kernels: Kernels) -> Iterator[None]:
    """Others for all devices of a type, of whoever asks inside: to compare kernels with each other."""
    before = _said.get(device_type)
    _said[device_type] = kernels
    try:
        yield
    finally:
        del _said[device_type]
        if before is not None:
            _said[device_type] = before


_said: dict[str, Kernels] = {}


@cache
def _fastest(device: torch.device) -> Kernels:
    if device.type == "cpu":
        # Numba takes a quarter of a second to import, which other devices need not wait for.
        from orca.kernels.cpu.kernels import CpuKernels

        return CpuKernels()
    if device.type != "cuda":
        return PlainKernels()
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    if reason := reason_against_triton(capability, has_triton=find_spec("triton") is not None):
        log.warning("%s computes with PyTorch's own operations: %s", device, reason)
        return PlainKernels()
    from orca.kernels.gpu.kernels import TritonKernels

    return TritonKernels()


def reason_against_triton(capability: tuple[int, int] | None, *, has_triton: bool) -> str | None:
    """Why a GPU gets no kernels in Triton; None where it does.

    Args:
        capability: its compute capability; None where PyTorch finds no GPU.
    """
    if capability is None:
        return "PyTorch finds no GPU"
    if not has_triton:
        return "the package triton is not installed"
    if capability < CAPABILITY_MIN:
        least, own = (".".join(map(str, each)) for each in (CAPABILITY_MIN, capability))
        return f"kernels are for compute capability {least} and above, this GPU has {own}"
    return None
