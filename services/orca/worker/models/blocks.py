"""The building blocks of all models. Everything works on one flat [tokens, hidden] tensor (selective batching, ORCA,
section 3, S2); only `Attention` knows that the tokens belong to different requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import KvWrite, NormParameters, RaggedAttention
from orca.kernels.device import kernels_of
from orca.worker.models.weights import Weights
from orca.worker.parallel.shard import SingleRank, TensorGroup
from orca.worker.weights.linear import Linear, PanelLinear
from orca.worker.weights.norms import Norm


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


def _add(x: Tensor, linear: Linear, features: Tensor, step: StepContext, then: Norm | None = None) -> Tensor | None:
    """x [tokens, hidden] += a row-parallel linear of features, summed over the ranks; in place.

    Returns: `then` of x, where it is had in the same go (Linear.add_to).
    """
    if isinstance(step.group, SingleRank):
        return linear.add_to(x, features, then)
    return linear.add_outputs(x, step.group.all_reduce(linear(features)), then)


class Part(Protocol):
    """Of a model."""

    only_kernels: bool
    """Whether it may stand in a block of kernels (device.Kernels.deferred), where its rank is alone in the stage."""

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor: ...


class Layer(Part, Protocol):
    """A layer of a stage."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """x [tokens, hidden], changed in place; the model's last layer returns those rows that are wanted."""
        ...

    def keep(self, x: Tensor, step: StepContext) -> None:
        """Put keys and values of x [tokens, hidden] into the cache, and stop behind that: all that the model's last
        layer has to do where no row is wanted."""
        ...


class Attention:
    """x + attention(norm(x)): fused query-key-value projection, rotation, cache, ragged attention, output projection.

    Args:
        norm: before it; None where the model has it elsewhere.
        qkv: column-parallel; this rank's query heads, then its key heads, then its value heads.
        out: row-parallel.
        index: of the layer inside the stage.
        head_norm: of query and key heads (Qwen3's q_norm and k_norm, stacked).
    """

    def __init__(
        self,
        norm: Norm | None,
        qkv: Linear,
        out: Linear,
        *,
        index: int,
        scale: float,
        window: int | None,
        head_norm: NormParameters | None = None,
    ) -> None:
        self._norm = norm
        self._qkv = qkv
        self._out = out
        self._index = index
        self._scale = scale
        self._window = window
        self._head_norm = head_norm
        self.only_kernels = isinstance(qkv, PanelLinear) and isinstance(out, PanelLinear)

    def __call__(self, x: Tensor, step: StepContext, then: Norm | None = None) -> tuple[Tensor, Tensor | None]:
        """x [tokens, hidden], changed in place; of the model's last layer those rows that are wanted (`WantedRows`).

        Args:
            then: the norm that comes behind it, if there is one.
        Returns: x, and `then` of it, where that is had in the same go; else None.
        """
        qkv, cache, attention = self.keep(x, step), step.caches[self._index], step.attention
        if (wanted := step.wanted_of(self._index)) is not None:
            kernels = kernels_of(x.device)
            qkv, x = kernels.take_rows(qkv, wanted.rows), kernels.take_rows(x, wanted.rows)
            attention = wanted.attention
        return x, _add(x, self._out, attention[self._window](qkv, cache, self._scale), step, then)

    def keep(self, x: Tensor, step: StepContext) -> Tensor:
        """Layer.keep. Returns: the projection, [tokens, query heads + 2 x kv heads, head_dim]."""
        return self._qkv.kept(self._norm, x, KvWrite(step.caches[self._index], step.slots, step.turns, self._head_norm))


class MLP:
    """x + down(act(up(norm(x)))), in place."""

    def __init__(self, norm: Norm | None, up: Linear, down: Linear, activation: str) -> None:
        self.norm, self._up, self._down, self._activation = norm, up, down, ACTIVATIONS[activation]
        self.only_kernels = isinstance(up, PanelLinear) and isinstance(down, PanelLinear)

    def __call__(self, x: Tensor, step: StepContext, normed: Tensor | None = None) -> Tensor:
        """Args: normed: norm(x), where it is at hand."""
        norm, rows = (self.norm, x) if normed is None else (None, normed)
        _add(x, self._down, self._up.activated(norm, rows, self._activation), step)
        return x


class GatedMLP:
    """x + down(act(gate(norm(x))) * up(norm(x))), in place; gate and up are one product.

    Args:
        gate_up: a gated one where `is_silu(activation)`.
    """

    def __init__(self, norm: Norm, gate_up: Linear, down: Linear, activation: str) -> None:
        self.norm, self._gate_up, self._down, self._activation = norm, gate_up, down, ACTIVATIONS[activation]
        is_gated = is_silu(activation)
        self.only_kernels = is_gated and isinstance(gate_up, PanelLinear) and isinstance(down, PanelLinear)

    def __call__(self, x: Tensor, step: StepContext, normed: Tensor | None = None) -> Tensor:
        """Args: normed: norm(x), where it is at hand."""
        norm, rows = (self.norm, x) if normed is None else (None, normed)
        if self._activation is Activation.SILU:
            features = self._gate_up.gated(norm, rows)
        else:
            gate, up = self._gate_up.after(norm, rows).chunk(2, dim=-1)
            features = self._activation(gate).mul_(up)
        _add(x, self._down, features, step)
        return x


class Embedding:
    """Vocabulary-parallel lookup: each rank knows some tokens, the sum over the ranks knows all.

    Besides, the rows of positions where a model learns these.

    Args:
        is_tied: the head's matrix is the same. Where this rank has it, too, it is loaded here: `head`.
    """

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int, *, is_tied: bool) -> None:
        self._taken = weights.shard.slice(vocab_size, "vocabulary entries")
        self.head: Linear | None = None
        if is_tied and weights.shard.is_last:
            self.head, self._table = weights.tied(name, (vocab_size, dim), self._taken)
        else:
            self._table = weights.table(name, (vocab_size, dim), self._taken)
        self._is_whole = weights.shard.tensor == 1

    def __call__(self, ids: Tensor, step: StepContext, places: Tensor | None = None) -> Tensor:
        """[tokens] to [tokens, dim]. Args: places: [positions, dim], of learned positions."""
        if self._is_whole:
            return self._table.embed(ids, places, step.positions)
        first, last = self._taken
        is_elsewhere = (ids < first) | (ids >= last)
        rows = self._table.embed((ids - first).masked_fill_(is_elsewhere, 0), None, step.positions)
        embedded = step.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0.0))
        return embedded if places is None else embedded.add_(places.index_select(0, step.positions))


HEAD = "lm_head.weight"
"""The head's own weight, in the checkpoints of all families. Tied to the embedding it is that one's."""


class Head:
    """Logits over the whole vocabulary, each rank computing its own part.

    Args:
        tied: what the embedding has loaded (`Embedding.head`).
    """

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int, tied: Linear | None) -> None:
        self._sizes = weights.shard.sizes(vocab_size)
        taken = weights.shard.slice(vocab_size, "vocabulary entries")
        if name != HEAD:
            weights.checkpoint.refuse_other(HEAD, name, (vocab_size, dim), taken)
        if tied is not None:
            self._linear = weights.listed(tied)
        else:
            self._linear = weights.whole(name, (vocab_size, dim), taken)
        self.only_kernels = isinstance(self._linear, PanelLinear)

    def __call__(self, norm: Norm | None, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] to [rows, vocab] in float32; of several ranks all are rounded to x's dtype before."""
        if isinstance(step.group, SingleRank):
            return self._linear.wide(norm, x)
        return step.group.all_gather_last(self._linear.after(norm, x), self._sizes).float()


def scaled(span: tuple[int, int], factor: int, offset: int = 0) -> tuple[int, int]:
    """[first, last) of heads as [first, last) of features, `factor` to a head."""
    return offset + span[0] * factor, offset + span[1] * factor


def is_silu(activation: str) -> bool:
    return ACTIVATIONS[activation] is Activation.SILU


ACTIVATIONS: Mapping[str, Activation] = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
