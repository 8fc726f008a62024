"""The building blocks of all models. Everything works on one flat [tokens, hidden] tensor (selective batching, ORCA,
section 3, S2); only `Attention` knows that the tokens belong to different requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.device import RaggedAttention, kernels_of
from orca.worker.linear import Linear
from orca.worker.models.weights import Weights
from orca.worker.shard import Heads, TensorGroup


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The tokens of a step whose logits are wanted, where these are not all: behind its keys and values the model's
    last layer has nothing to do for the others."""

    rows: Tensor  # [wanted]: flat rows
    attention: Mapping[int | None, RaggedAttention]  # of these rows alone, by sliding window


@dataclass(slots=True, kw_only=True)
class StepContext:
    """What the layers need to know of a step, built before its activations arrive."""

    group: TensorGroup
    caches: Sequence[Tensor]  # per layer of the stage: [blocks, 2 x kv heads, block_tokens, head_dim]
    slots: Tensor  # [tokens]: where each token's keys and values go
    positions: Tensor  # [tokens]
    attention: Mapping[int | None, RaggedAttention]  # by sliding window
    turns: Tensor | None = None  # of the tokens' positions (rotary.py), where the model uses RoPE
    wanted: WantedRows | None = None  # on the last stage; None: all rows

    def wanted_of(self, index: int) -> WantedRows | None:
        """What the stage's layer `index` may confine itself to, once it has kept keys and values; None: all rows."""
        return self.wanted if index == len(self.caches) - 1 else None


class LayerNorm:
    def __init__(self, weight: Tensor | None, bias: Tensor | None, size: int, eps: float) -> None:
        self._weight, self._bias, self._size, self._eps = weight, bias, (size,), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._size, self._weight, self._bias, self._eps)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, accumulated in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._kernels = weight, eps, kernels_of(weight.device)

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[tokens, hidden]; with `added`, x becomes x + added first, in place."""
        return self._kernels.rms_norm(x, self._weight, self._eps, added)


class Attention:
    """Attention of one layer: fused query-key-value projection, rotation, cache, ragged attention, output projection.

    Args:
        qkv: column-parallel; this rank's query heads, then its key heads, then its value heads.
        out: row-parallel.
        index: of the layer inside the stage.
        head_norm: per head of q and k, [query heads + kv heads, head_dim] (Qwen3's q_norm and k_norm, stacked).
    """

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        heads: Heads,
        head_dim: int,
        *,
        index: int,
        scale: float,
        window: int | None,
        head_norm: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        self._qkv = qkv
        self._out = out
        self._head_dim = head_dim
        self._num_turned = heads.num_query + heads.num_kv
        self._index = index
        self._scale = scale
        self._window = window
        self._head_norm = head_norm
        self._norm_eps = norm_eps
        self._kernels = kernels_of(qkv.weight.device)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Attention of x [tokens, hidden], already summed over the ranks.

        Returns: [tokens, hidden]; of the model's last layer [wanted, hidden] (`rows_after`).
        """
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        if self._head_norm is not None:
            turned = qkv[:, : self._num_turned]
            normed = F.rms_norm(turned, (self._head_dim,), None, self._norm_eps)
            torch.mul(normed, self._head_norm, out=turned)
        cache = step.caches[self._index]
        self._kernels.keep(qkv, cache, step.slots, step.turns)
        attention = step.attention
        if (wanted := step.wanted_of(self._index)) is not None:
            qkv, attention = qkv.index_select(0, wanted.rows), wanted.attention
        return step.group.all_reduce(self._out(attention[self._window](qkv, cache, self._scale)))

    def rows_after(self, x: Tensor, step: StepContext) -> Tensor:
        """Those of x [tokens, hidden] that the layer goes on with behind this attention."""
        wanted = step.wanted_of(self._index)
        return x if wanted is None else x.index_select(0, wanted.rows)


class MLP:
    """down(act(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self._up, self._down, self._act = up, down, _ACT[activation]

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return step.group.all_reduce(self._down(self._act(self._up(x))))


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self._gate_up, self._down, self._act = gate_up, down, _ACT[activation]
        self._kernels = kernels_of(gate_up.weight.device)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        gate_up = self._gate_up(x)
        if self._act is F.silu:
            return step.group.all_reduce(self._down(self._kernels.gated_silu(gate_up)))
        gate, up = gate_up.chunk(2, dim=-1)
        return step.group.all_reduce(self._down(self._act(gate).mul_(up)))


class Embedding:
    """Vocabulary-parallel lookup: each rank knows some tokens, the sum over the ranks knows all."""

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int) -> None:
        first, last = weights.shard.slice(vocab_size, "vocabulary entries")
        self.weight = weights.tensor(name, (vocab_size, dim), (first, last))
        self._first = first
        self._is_whole = weights.shard.tensor == 1

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        if self._is_whole:
            return self.weight.index_select(0, ids)
        local = ids - self._first
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = self.weight.index_select(0, local.masked_fill_(is_elsewhere, 0))
        return step.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0.0))


class Head:
    """Logits over the whole vocabulary, each rank computing its own part."""

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int, tied: Embedding | None) -> None:
        self._sizes = weights.shard.sizes(vocab_size)
        if tied is not None:
            weight = tied.weight
        else:
            taken = weights.shard.slice(vocab_size, "vocabulary entries")
            weight = weights.checkpoint.read(name, (vocab_size, dim), taken)
        self._linear = weights.linear(weight)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] to [rows, vocab] in float32."""
        return step.group.all_gather_last(self._linear(x), self._sizes).float()


def scaled(span: tuple[int, int], factor: int, offset: int = 0) -> tuple[int, int]:
    """[first, last) of heads as [first, last) of features, `factor` to a head."""
    return offset + span[0] * factor, offset + span[1] * factor


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "swish": F.silu,
}
