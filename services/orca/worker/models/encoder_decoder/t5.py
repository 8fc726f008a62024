"""T5 and its relatives: no positions but a bias of scores by distance, RMSNorm before each part, no biases of linears.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.1.
"""

import math

import torch
from torch import Tensor

from orca.kernels.contract.reference import DistanceBias, NormParameters
from orca.worker.models.blocks import (
    HEAD,
    MLP,
    Attention,
    CrossAttention,
    Embedding,
    GatedMLP,
    Head,
    StepContext,
    feature_span,
)
from orca.worker.models.encoder_decoder.shared_embedding import TABLE, shared_embedding
from orca.worker.models.encoder_decoder.t5_config import T5Config
from orca.worker.models.family import EncoderParts, FamilyParts
from orca.worker.models.weights import Columns, RankWeights
from orca.worker.parallel.shard import heads_of
from orca.worker.weights.linear import Linear, Norm

_SCALE = 1.0  # T5 does not scale scores: its initialisation does


class T5Embedding:
    """The tokens of a stack. They bring no positions."""

    only_kernels = True

    def __init__(self, weights: RankWeights, config: T5Config, prefix: str, table: Embedding) -> None:
        del weights, config, prefix
        self._table = table

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        return self._table(ids, step)


class T5EncoderLayer:
    """Layer `number` of the encoder, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: T5Config, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}encoder.block.{number}.layer."
        self._attention = _self_attention(weights, config, f"{prefix}encoder.", number, index)
        self._mlp = _mlp(weights, config, f"{here}1.")
        self.only_kernels = self._attention.only_kernels and self._mlp.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x, normed = self._attention(x, step, self._mlp.norm)
        return self._mlp(x, step, normed)


class T5DecoderLayer:
    """Layer `number` of the decoder, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: T5Config, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}decoder.block.{number}.layer."
        self._attention = _self_attention(weights, config, f"{prefix}decoder.", number, index)
        self._cross = _cross_attention(weights, config, f"{here}1.", index)
        self._mlp = _mlp(weights, config, f"{here}2.")
        self.only_kernels = all(part.only_kernels for part in (self._attention, self._cross, self._mlp))

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x, normed = self._attention(x, step, self._cross.norm)
        x, normed = self._cross(x, step, self._mlp.norm, normed)
        return self._mlp(x, step, normed)

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._attention.keep(x, step)
        self._cross.keep(step)


class T5Head:
    """Logits. Their scale is a factor of the last norm's weight."""

    def __init__(self, weights: RankWeights, config: T5Config, prefix: str, tied: Linear | None) -> None:
        self._norm = _norm(weights, config, f"{prefix}decoder.final_layer_norm", config.logit_scale)
        name = f"{prefix}{TABLE}" if config.is_tied else HEAD
        self._head = Head(weights, name, config.vocab_size, config.hidden_size, tied)
        self.only_kernels = self._head.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self._head(self._norm, x, step)


def encoder_norm(weights: RankWeights, config: T5Config, prefix: str) -> Norm:
    """Read the norm after the encoder's last layer."""
    return _norm(weights, config, f"{prefix}encoder.final_layer_norm")


def distance_bias(table: Tensor, config: T5Config, *, is_causal: bool) -> DistanceBias:
    """Return the bias of each distance of key and query.

    The decoder sees only distances up to 0. The encoder has a half of the buckets for each direction. Small distances
    have a bucket of their own. Larger ones share buckets by their logarithm, from `max_distance` on one bucket.

    Args:
        table: [buckets, heads].
    """
    farthest = config.max_distance
    distances = torch.arange(-farthest, 1 if is_causal else farthest + 1)
    buckets = config.buckets if is_causal else config.buckets // 2
    sizes = distances.abs()
    exact = buckets // 2
    # As in the original, in float32: the rounding decides the bucket of some distances.
    shares = torch.log(sizes.clamp(min=1).float() / exact) / math.log(farthest / exact) * (buckets - exact)
    places = torch.where(sizes < exact, sizes, (exact + shares.long()).clamp(max=buckets - 1))
    if not is_causal:
        places += torch.where(distances > 0, buckets, 0)
    return DistanceBias(table.float().index_select(0, places.to(table.device)).t().contiguous(), farthest)


def _self_attention(weights: RankWeights, config: T5Config, stack: str, number: int, index: int) -> Attention:
    """Read the self attention of layer `number` of a stack, named `encoder.` or `decoder.`."""
    here, biased = (f"{stack}block.{each}.layer.0." for each in (number, _bias_layer(config, number)))
    heads = heads_of(weights.shard, config.num_heads, config.num_heads)
    inner, features = config.num_heads * config.head_dim, feature_span(heads.query, config.head_dim)
    qkv = [Columns(f"{here}SelfAttention.{name}", inner, features) for name in "qkv"]
    table = weights.tensor(
        f"{biased}SelfAttention.relative_attention_bias.weight", (config.buckets, config.num_heads), None, heads.query
    )
    return Attention(
        _norm(weights, config, f"{here}layer_norm"),
        weights.column_linear(qkv, config.hidden_size, has_bias=False),
        weights.row_linear(f"{here}SelfAttention.o", config.hidden_size, inner, features, has_bias=False),
        index=index,
        scale=_SCALE,
        window=None,
        bias=distance_bias(table, config, is_causal=stack.endswith("decoder.")),
    )


def _bias_layer(config: T5Config, number: int) -> int:
    """Return the layer whose bias applies to layer `number`."""
    return number if config.has_bias_in_each_layer else 0


def _cross_attention(weights: RankWeights, config: T5Config, here: str, index: int) -> CrossAttention:
    heads = heads_of(weights.shard, config.num_heads, config.num_heads)
    inner, features = config.num_heads * config.head_dim, feature_span(heads.query, config.head_dim)
    query, *kv = (Columns(f"{here}EncDecAttention.{name}", inner, features) for name in "qkv")
    return CrossAttention(
        _norm(weights, config, f"{here}layer_norm"),
        weights.column_linear([query], config.hidden_size, has_bias=False),
        weights.column_linear(kv, config.hidden_size, has_bias=False),
        weights.row_linear(f"{here}EncDecAttention.o", config.hidden_size, inner, features, has_bias=False),
        index=index,
        scale=_SCALE,
    )


def _mlp(weights: RankWeights, config: T5Config, here: str) -> MLP | GatedMLP:
    norm, columns = _norm(weights, config, f"{here}layer_norm"), config.decoder.intermediate_size
    span = weights.shard.slice(columns, "MLP columns")
    names = ("wi_0", "wi_1") if config.is_gated else ("wi",)
    up = weights.column_linear(
        [Columns(f"{here}DenseReluDense.{name}", columns, span) for name in names],
        config.hidden_size,
        has_bias=False,
        is_gated=config.is_gated,
    )
    down = weights.row_linear(f"{here}DenseReluDense.wo", config.hidden_size, columns, span, has_bias=False)
    return (GatedMLP if config.is_gated else MLP)(norm, up, down, config.activation)


def _norm(weights: RankWeights, config: T5Config, name: str, scale: float = 1.0) -> Norm:
    weight = weights.tensor(f"{name}.weight", (config.hidden_size,))
    return Norm(NormParameters(weight if scale == 1.0 else weight * scale, config.norm_eps))


FAMILY = FamilyParts(
    embedding=T5Embedding,
    layer=T5DecoderLayer,
    head=T5Head,
    prefixes=("",),
    probe=TABLE,
    layers="decoder.block",
    encoder=EncoderParts(
        table=shared_embedding, embedding=T5Embedding, layer=T5EncoderLayer, layers="encoder.block", norm=encoder_norm
    ),
    ignored=("EncDecAttention.relative_attention_bias.weight",),  # old checkpoints have one, and no layer reads it
)
