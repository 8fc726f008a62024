"""The whole numbers of the models that check the server: their arithmetic, and how float32 tensors carry them.

With p = 2^31 - 1, fold(x) = x^5 mod p maps the numbers below p to each other one to one (5 and p - 1 share no factor),
in no visible order. A state is a number below p. It travels between layers, stages and ranks as two halves of 16 bits,
because float32 holds whole numbers up to 2^24.
"""

import torch
from torch import Tensor

from orca.core.domain.errors import ModelError
from orca.worker.models.blocks import StepContext
from orca.worker.models.chains.chain_config import CHAIN_CHOICES
from orca.worker.models.weights import RankWeights

PRIME = 2**31 - 1
_HALF_BITS = 16
_KEPT_MASK = 255
_IMPOSSIBLE = -10_000.0  # a logit out of reach of any logit_bias


class WholeHead:
    """Equal logits for the 16 tokens that the last state chooses; each rank computes its part of the vocabulary."""

    def __init__(self, weights: RankWeights, vocab_size: int) -> None:
        self._salt = whole_numbers(weights, "head.salt", 1)
        self._places = vocab_size - CHAIN_CHOICES + 1
        first, last = weights.shard.slice(vocab_size, "vocabulary entries")
        self._ids = torch.arange(first, last, device=self._salt.device)
        self._sizes = weights.shard.sizes(vocab_size)

    def logits(self, states: Tensor, step: StepContext) -> Tensor:
        """Map [rows] to [rows, vocab] in float32."""
        first = fold(states + self._salt) % self._places
        distance = self._ids - first[:, None]
        is_chosen = (distance >= 0) & (distance < CHAIN_CHOICES)
        logits = torch.zeros(is_chosen.shape, device=states.device).masked_fill_(~is_chosen, _IMPOSSIBLE)
        return step.group.all_gather_last(logits, self._sizes)


def fold(numbers: Tensor) -> Tensor:
    """Return x^5 mod p; products of two numbers below p = 2^31 - 1 fit into 63 bits."""
    base = numbers % PRIME
    square = base * base % PRIME
    return square * square % PRIME * base % PRIME


def kept_hashes(states: Tensor, keep: Tensor) -> Tensor:
    """Return the numbers that a layer keeps in the cache: [tokens] with [channels] gives [tokens, channels]."""
    return fold(states[:, None] + keep) & _KEPT_MASK


def halves(numbers: Tensor) -> Tensor:
    """Return [tokens] int64 below p as [tokens, 2] float32."""
    return torch.stack((numbers >> _HALF_BITS, numbers & ((1 << _HALF_BITS) - 1)), dim=-1).float()


def joined(pairs: Tensor) -> Tensor:
    """Return [tokens, 2] as [tokens] int64. The halves of a sum are the sums of the halves."""
    high, low = pairs.long().unbind(dim=-1)
    return (high << _HALF_BITS) + low


def sum_over_ranks(parts: Tensor, step: StepContext) -> Tensor:
    """Return the sum of the ranks' numbers [tokens], each of them modulo p."""
    return joined(step.group.all_reduce(halves(parts % PRIME)))


def whole_numbers(weights: RankWeights, name: str, size: int, span: tuple[int, int] | None = None) -> Tensor:
    """Read a weight, or a part of it, as int64.

    Raises: ModelError if the stages compute in a dtype that would round it.
    """
    tensor = weights.tensor(name, (size,), span)
    if tensor.dtype != torch.float32:
        raise ModelError(f"a chain model computes whole numbers, which only float32 holds; dtype is {tensor.dtype}")
    return tensor.long()
