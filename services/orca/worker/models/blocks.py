"""The building blocks of all models. Everything works on one flat [tokens, hidden] tensor (selective batching, ORCA,
section 3, S2); only `Attention` and `CrossAttention` know that the tokens belong to different requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.reference import DistanceBias, KvWrite, NormParameters, RaggedAttention
from orca.kernels.device import kernels_of
from orca.worker.models.weights import RankWeights
from orca.worker.parallel.shard import SingleRank, TensorGroup
from orca.worker.weights.linear import Linear, Norm, PanelLinear


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The tokens whose logits a step needs, if it does not need all. The model's last layer puts the keys and values of
    the other tokens into the cache and computes nothing more for them."""

    rows: Tensor  # [wanted]: flat rows
    attention: Mapping[int | None, RaggedAttention]  # of these rows alone, by sliding window
    cross: RaggedAttention | None = None  # of these rows alone, over their sources


@dataclass(slots=True, kw_only=True)
class CrossContext:
    """The facts about a step that cross attention needs: targets read the keys and values of their sources."""

    attention: RaggedAttention  # of the step's target tokens
    slots: Tensor | None = None  # [source tokens]: where the keys and values of the step's sources go; None: no sources
    memory: Tensor | None = None  # [source tokens, hidden]: the encoder output of these sources


@dataclass(slots=True, kw_only=True)
class StepContext:
    """The facts about a step that layers need, built before its activations arrive."""

    group: TensorGroup
    caches: Sequence[Tensor]  # for each layer of the stage: [blocks, 2 x kv heads, block_tokens, head_dim]
    slots: Tensor  # [tokens]: where each token's keys and values go
    positions: Tensor  # [tokens]
    attention: Mapping[int | None, RaggedAttention]  # by sliding window
    turns: Tensor | None = None  # rotations of the tokens' positions (rotary.py), if the model uses RoPE
    wanted: WantedRows | None = None  # on the last stage; None: all rows
    cross: CrossContext | None = None  # of a decoder that has an encoder

    def wanted_rows(self, index: int) -> WantedRows | None:
        """Return the rows that the stage's layer `index` computes beyond keys and values; None: all rows."""
        return self.wanted if index == len(self.caches) - 1 else None


def _add_outputs(x: Tensor, linear: Linear, features: Tensor, step: StepContext, then: Norm | None) -> Tensor | None:
    """Add a row-parallel linear of features, summed over the ranks, to x [tokens, hidden], in place.

    Returns: `then` of x if it is computed in the same kernel (Linear.add_to); otherwise None.
    """
    if isinstance(step.group, SingleRank):
        return linear.add_to(x, features, then)
    return linear.add_outputs(x, step.group.all_reduce(linear(features)), then)


class ModelPart(Protocol):
    """A part of a model: embedding, layer or head."""

    only_kernels: bool
    """True if the part may run in a block of kernels (device.Kernels.deferred) when its rank is alone in the stage."""

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor: ...


class Layer(ModelPart, Protocol):
    """A layer of a stage."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Change x [tokens, hidden] in place and return it; the model's last layer returns the wanted rows only."""
        ...

    def keep(self, x: Tensor, step: StepContext) -> None:
        """Put keys and values of x [tokens, hidden] into the cache and do no more: the work of the model's last layer
        in a step that needs no logits."""
        ...


class Attention:
    """x + attention(norm(x)): fused query-key-value projection, rotation, cache, ragged attention, output projection.

    Args:
        norm: before it; None if the model has it elsewhere.
        qkv: column-parallel; this rank's query heads, then its key heads, then its value heads.
        out: row-parallel.
        index: of the layer inside the stage.
        head_norm: of query and key heads (Qwen3's q_norm and k_norm, stacked).
        bias: of scores, by distance (T5).
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
        bias: DistanceBias | None = None,
    ) -> None:
        self._norm = norm
        self._qkv = qkv
        self._out = out
        self._index = index
        self._scale = scale
        self._window = window
        self._head_norm = head_norm
        self._bias = bias
        self.only_kernels = isinstance(qkv, PanelLinear) and isinstance(out, PanelLinear)

    def __call__(self, x: Tensor, step: StepContext, then: Norm | None = None) -> tuple[Tensor, Tensor | None]:
        """Change x [tokens, hidden] in place; in the model's last layer, only the wanted rows (`WantedRows`).

        Args:
            then: the norm that the model applies next, if there is one.
        Returns: x, and `then` of x if it is computed in the same kernel; otherwise None.
        """
        qkv, cache, attention = self.keep(x, step), step.caches[self._index], step.attention
        if (wanted := step.wanted_rows(self._index)) is not None:
            kernels = kernels_of(x.device)
            qkv, x = kernels.take_rows(qkv, wanted.rows), kernels.take_rows(x, wanted.rows)
            attention = wanted.attention
        attended = attention[self._window](qkv, cache, self._scale, self._bias)
        return x, _add_outputs(x, self._out, attended, step, then)

    def keep(self, x: Tensor, step: StepContext) -> Tensor:
        """Put keys and values into the cache (Layer.keep).

        Returns: the projection, [tokens, query heads + 2 x kv heads, head_dim].
        """
        kept = KvWrite(step.caches[self._index], step.slots, step.turns, self._head_norm)
        return self._qkv.apply_to_cache(self._norm, x, kept)


class CrossAttention:
    """x + attention(norm(x)) of target tokens over the encoder output of their source.

    The keys and values of a source are computed once, in the step that brings it, and lie in the cache of self
    attention, in blocks of their own.

    Args:
        norm: before it; None if the model has it elsewhere.
        query: column-parallel; this rank's query heads.
        kv: column-parallel; this rank's key heads, then its value heads.
        out: row-parallel.
        index: of the layer inside the stage.
    """

    def __init__(self, norm: Norm | None, query: Linear, kv: Linear, out: Linear, *, index: int, scale: float) -> None:
        self.norm = norm
        self._query, self._kv, self._out = query, kv, out
        self._index, self._scale = index, scale
        self.only_kernels = all(isinstance(linear, PanelLinear) for linear in (query, kv, out))

    def __call__(
        self, x: Tensor, step: StepContext, then: Norm | None = None, normed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Change x [tokens, hidden] in place, which has only the wanted rows in the model's last layer (`WantedRows`).

        Args:
            then: the norm that the model applies next, if there is one.
            normed: norm(x) if it is computed already.
        Returns: x, and `then` of x if it is computed in the same kernel; otherwise None.
        """
        assert step.cross is not None
        self.keep(step)
        wanted = step.wanted_rows(self._index)
        attention = step.cross.attention if wanted is None else wanted.cross
        assert attention is not None
        norm, rows = (self.norm, x) if normed is None else (None, normed)
        attended = attention(self._query.apply(norm, rows), step.caches[self._index], self._scale)
        return x, _add_outputs(x, self._out, attended, step, then)

    def keep(self, step: StepContext) -> None:
        """Put the keys and values of the step's sources into the cache."""
        cross = step.cross
        if cross is not None and cross.memory is not None and cross.slots is not None:
            self._kv.apply_to_cache(None, cross.memory, KvWrite(step.caches[self._index], cross.slots, None))


class MLP:
    """x + down(act(up(norm(x)))), in place."""

    def __init__(self, norm: Norm | None, up: Linear, down: Linear, activation: str) -> None:
        self.norm, self._up, self._down, self._activation = norm, up, down, ACTIVATIONS[activation]
        self.only_kernels = isinstance(up, PanelLinear) and isinstance(down, PanelLinear)

    def __call__(self, x: Tensor, step: StepContext, normed: Tensor | None = None) -> Tensor:
        """Args: normed: norm(x) if it is computed already."""
        norm, rows = (self.norm, x) if normed is None else (None, normed)
        _add_outputs(x, self._down, self._up.apply_activated(norm, rows, self._activation), step, None)
        return x


class GatedMLP:
    """x + down(act(gate(norm(x))) * up(norm(x))), in place; gate and up are one product.

    Args:
        gate_up: a gated linear.
    """

    def __init__(self, norm: Norm, gate_up: Linear, down: Linear, activation: str) -> None:
        self.norm, self._gate_up, self._down, self._activation = norm, gate_up, down, ACTIVATIONS[activation]
        self.only_kernels = isinstance(gate_up, PanelLinear) and isinstance(down, PanelLinear)

    def __call__(self, x: Tensor, step: StepContext, normed: Tensor | None = None) -> Tensor:
        """Args: normed: norm(x) if it is computed already."""
        norm, rows = (self.norm, x) if normed is None else (None, normed)
        _add_outputs(x, self._down, self._gate_up.apply_gated(norm, rows, self._activation), step, None)
        return x


class Embedding:
    """Vocabulary-parallel lookup: each rank knows some tokens, and the sum over the ranks knows all.

    It also adds the rows of positions if the model learns these.

    Args:
        is_tied: the head's matrix is the same. If this rank has the head as well, it is loaded here: `head`.
        scale: factor of the rows, before positions are added.
        head_bias: of this rank's logits, for a tied head.
    """

    def __init__(
        self,
        weights: RankWeights,
        name: str,
        vocab_size: int,
        dim: int,
        *,
        is_tied: bool,
        scale: float = 1.0,
        head_bias: Tensor | None = None,
    ) -> None:
        self._scale = scale
        self._span = weights.shard.slice(vocab_size, "vocabulary entries")
        self.head: Linear | None = None
        if is_tied and weights.shard.is_last:
            self.head, self._table = weights.tied_table(name, (vocab_size, dim), self._span, bias=head_bias)
        else:
            self._table = weights.table(name, (vocab_size, dim), self._span)
        self._is_whole = weights.shard.tensor == 1

    def __call__(self, ids: Tensor, step: StepContext, places: Tensor | None = None) -> Tensor:
        """Map [tokens] to [tokens, dim]. Args: places: [positions, dim], the rows of learned positions."""
        if self._is_whole:
            return self._table.embed(ids, places, step.positions, self._scale)
        first, last = self._span
        is_elsewhere = (ids < first) | (ids >= last)
        rows = self._table.embed((ids - first).masked_fill_(is_elsewhere, 0), None, step.positions, self._scale)
        embedded = step.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0.0))
        return embedded if places is None else embedded.add_(places.index_select(0, step.positions))


HEAD = "lm_head.weight"
"""The head's own weight, in the checkpoints of all families. A head that is tied to the embedding uses that one's."""


class Head:
    """Logits over the whole vocabulary, each rank computing its own part.

    Args:
        tied: the linear that the embedding has loaded (`Embedding.head`), with its bias.
        bias: of this rank's logits, for a head that is loaded here.
    """

    def __init__(
        self,
        weights: RankWeights,
        name: str,
        vocab_size: int,
        dim: int,
        tied: Linear | None,
        bias: Tensor | None = None,
    ) -> None:
        self._sizes = weights.shard.sizes(vocab_size)
        span = weights.shard.slice(vocab_size, "vocabulary entries")
        if tied is not None:
            self._linear = weights.register(tied)
        else:
            self._linear = weights.whole_linear(name, (vocab_size, dim), span, bias=bias)
        self.only_kernels = isinstance(self._linear, PanelLinear)

    def __call__(self, norm: Norm | None, x: Tensor, step: StepContext) -> Tensor:
        """Map [rows, hidden] to [rows, vocab] in float32; with several ranks, all are rounded to x's dtype before."""
        if isinstance(step.group, SingleRank):
            return self._linear.apply_float32(norm, x)
        return step.group.all_gather_last(self._linear.apply(norm, x), self._sizes).float()


def feature_span(heads: tuple[int, int], head_dim: int, offset: int = 0) -> tuple[int, int]:
    """Return [first, last) of heads as [first, last) of features."""
    return offset + heads[0] * head_dim, offset + heads[1] * head_dim


ACTIVATIONS: Mapping[str, Activation] = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
