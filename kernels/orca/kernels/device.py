"""The kernels of a device: all operations of a model's layers except matrix products, on the requests of a step in one
flat tensor (selective batching, ORCA, section 3, S2).

plain.py computes everything with PyTorch's own operations, on any device; faster versions are tested against it. The
kernels for CPUs are in cpu/; their matrix products (cpu/product/) are one of the layouts of a weight
(worker/weights/linear.py). The kernels for GPUs are in gpu/; `python -m orca.bench.gpu` checks and times them on a
GPU.
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
"""The lowest compute capability whose tensor cores multiply bfloat16 (Ampere)."""


class Sampler(Protocol):
    """Draws tokens on the device, for requests whose sampling settings the device holds."""

    lines: SamplingLines

    def sample(self, logits: Tensor, lines: Tensor, indices: Tensor) -> Tensor:
        """Draw one token for each row, count it, and write it to `lines.last_tokens`.

        Args:
            logits: [rows, vocab] float32, contiguous.
            lines: [rows] int32, the line of each row's request; rows with -1 are skipped.
            indices: [rows] int64, the index of the token among the generated tokens of the request.
        Returns: [rows] int64.
        """
        ...


class Kernels(Protocol):
    """The operations of one kind of device."""

    def prepare(self, sizes: ModelSizes) -> bool:
        """Compile all kernels that a model needs, so that no step waits for the compiler.

        Returns: whether a process that starts now and finds everything compiled may round differently from this one.
        """
        ...

    def attention(self, rows: Sequence[ContextRow], view: AttentionView) -> RaggedAttention:
        """Prepare ragged paged attention for one step (reference.py defines the result).

        Args:
            rows: the requests of the step; together they cover each flat token once.
        """
        ...

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the kernels called inside it when it ends, or earlier.

        Inside, only kernels may read what kernels write, and no kernel may get a view of it. Tensors from outside must
        live until the end.
        """
        ...

    def recorder(self, device: torch.device) -> Recorder | None:
        """Return the recorder that captures steps and replays them; None if the device cannot do that."""
        ...

    def sampler(self, vocab: int, device: torch.device) -> Sampler | None:
        """Return the sampler that draws tokens on the device; None if the host draws them."""
        ...

    def increment(self, at: int) -> None:
        """Add one to the 64-bit number at a host address after all earlier kernels have run.

        On devices other than CPUs the addition follows the order in which kernels are launched.
        """
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows]. Args: x: [rows, ...], contiguous; rows: [many] int64, all valid. Returns: [many, ...]."""
        ...

    def embed(
        self,
        table: Tensor,
        ids: Tensor,
        places: Tensor | None,
        positions: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> Tensor:
        """Return scale x table[ids], plus places[positions] if `places` is given; product and sum are rounded once.

        Args:
            table: [vocab, hidden], contiguous.
            ids: [tokens] int64, all valid.
            places: [positions, hidden], contiguous, the position embeddings of models that learn them.
            positions: [tokens] int64.
            dtype: dtype of places and result. The table has the same dtype, or half precision beside float32.
        Returns: [tokens, hidden].
        """
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of the largest number in each row of x [rows, width] float32, as [rows] int64.

        In a row with NaN it is the first index of a NaN.
        """
        ...

    def mask_tokens(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of tokens that a mask leaves out to minus infinity, in place.

        Args:
            logits: [rows, vocab] float32, contiguous.
            rows: [masked] int64, the row of each mask, each at most once.
            masks: [masked, words] int32, a bit for each token, the lowest one first: set if the token may be drawn.
        """
        ...

    def write_kv(self, qkv: Tensor, kv: KvWrite, bias: Tensor | None = None) -> None:
        """Normalise and rotate (RoPE) the step's queries and keys, and write its keys and values into the cache.

        Args:
            qkv: [tokens, query heads + 2 x kv heads, head_dim], contiguous; changed in place. The keys and values of
                cross attention come without queries.
            bias: [(query heads + 2 x kv heads) x head_dim]; it is added first, and the sum is rounded.
        """
        ...

    def normalise(self, x: Tensor, norm: NormParameters) -> Tensor:
        """Return RMSNorm or LayerNorm of each row of x [tokens, hidden], contiguous."""
        ...

    def add_normalise(self, x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
        """Compute x += added + bias in place, and return the norm of the new x.

        The sum is taken in float32 from left to right and rounded once, to x's dtype, before the norm reads it. The
        result is bit-identical to `normalise` of the new x.

        Args:
            x, added: [tokens, hidden], contiguous, not overlapping.
            bias: [hidden].
        Returns: [tokens, hidden], in new memory.
        """
        ...

    def activate(
        self, x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return activation(x + bias).

        Args:
            x: [tokens, width], contiguous.
            bias: [width].
            out: memory for the result, which may be x itself; default: new memory.
        Returns: [tokens, width].
        """
        ...

    def gated(self, gate_up: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
        """Return activation(gate) * up.

        Args:
            gate_up: [tokens, 2 x width], contiguous.
            bias: [2 x width], added to gate and up first.
        Returns: [tokens, width].
        """
        ...


def kernels_of(device: torch.device) -> Kernels:
    """Return the fastest kernels for a device, or those that `use_kernels` has set."""
    return _overrides.get(device.type) or _fastest(device)


@contextmanager
def use_kernels(device_type: str, kernels: Kernels) -> Iterator[None]:
    """Use other kernels for all devices of a type inside this block, so that kernels can be compared."""
    before = _overrides.get(device_type)
    _overrides[device_type] = kernels
    try:
        yield
    finally:
        del _overrides[device_type]
        if before is not None:
            _overrides[device_type] = before


_overrides: dict[str, Kernels] = {}


@cache
def _fastest(device: torch.device) -> Kernels:
    if device.type == "cpu":
        # The import of Numba takes 0.25 s, which other devices need not wait for.
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
    """Return the reason why a GPU cannot use the Triton kernels; None if it can.

    Args:
        capability: compute capability of the GPU; None if PyTorch finds no GPU.
    """
    if capability is None:
        return "PyTorch finds no GPU"
    if not has_triton:
        return "the package triton is not installed"
    if capability < CAPABILITY_MIN:
        least, own = (".".join(map(str, version)) for version in (CAPABILITY_MIN, capability))
        return f"kernels are for compute capability {least} and above, this GPU has {own}"
    return None
