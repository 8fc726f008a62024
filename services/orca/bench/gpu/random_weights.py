"""Weights without a file: each tensor of a Llama or a T5 is generated on the device, from a seed and its name.

So a stage, any slice of it, a plain reference and a Hugging Face model have the same weights without keeping them
twice. Their scales, and the reasons, are in random_scales.py.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from orca.bench.random_scales import EMBEDDING_DEVIATION, GAIN
from orca.worker.weights.loader import Slice

_NORM_DEVIATION = 0.1
"""Standard deviation of the weights of norms from one. With exact ones, a norm that is left out would not show."""
_T5_QUERIES = 64**-0.5
"""Scale of T5's queries: one through the root of the head size that its large models have."""


class RandomTensors:
    """Random tensors under every name (worker.weights.loader.Tensors).

    Args:
        seed: decides the numbers of a tensor together with its name. Devices of one kind make the same numbers.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.bytes_read = 0
        self.expected_bytes = 0
        self.dtype = dtype
        self.device = device
        self._seed = seed

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.dtype

    def prefix(self, candidates: Sequence[str], name: str, instead: str | None = None) -> str:  # noqa: ARG002
        """Return the first prefix: it has all of them."""
        return candidates[0]

    def read(self, name: str, shape: tuple[int, ...], *slices: Slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor, or a part of it. Args: slices: one for each leading dimension."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        mean, deviation = _distribution(name, shape)
        made.normal_(mean, deviation, generator=self._numbers(name))
        index = tuple(slice(None) if part is None else slice(*part) for part in slices)
        return made[index].contiguous() if index else made

    view = read

    def full(self, value: float, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, value, dtype=self.dtype, device=self.device)

    def give_back(self) -> None:
        """Do nothing: no file is mapped."""

    def stored_bytes(self, prefixes: Iterable[str]) -> int:  # noqa: ARG002 - none are stored
        return 0

    def other_than(
        self,
        tied: str,  # noqa: ARG002
        names: Iterable[str],  # noqa: ARG002
        shape: tuple[int, ...],  # noqa: ARG002
        *slices: Slice,  # noqa: ARG002
    ) -> str | None:
        """Return None: no file has another tensor."""
        return None

    def __contains__(self, name: str) -> bool:
        """Return False: what a model may have or not, it does not have."""
        return False

    def refuse_unread(self, prefix: str, ignored: Sequence[str] = ()) -> None:
        """Do nothing: no file has a tensor that was not read."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _numbers(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and standard deviation of a tensor's numbers. Matrices are [out, in]."""
    if len(shape) == 1:
        return 1.0, _NORM_DEVIATION
    if name.endswith(("embed_tokens.weight", "shared.weight")):
        return 0.0, EMBEDDING_DEVIATION
    if name.endswith("relative_attention_bias.weight"):
        return 0.0, 1.0
    # T5 does not scale its scores, so its queries are small.
    return 0.0, GAIN / math.sqrt(shape[1]) * (_T5_QUERIES if name.endswith(".q.weight") else 1.0)
