"""BART and models in its form: LayerNorm before or after each part, biases everywhere, learned or computed positions.

Sources: Vaswani et al., "Attention Is All You Need", sections 3.1 to 3.5; Lewis et al., "BART", section 2.1.
"""

import math

import torch
from torch import Tensor

from orca.kernels.contract.reference import NormParameters
from orca.worker.models.blocks import (
    HEAD,
    MLP,
    Attention,
    CrossAttention,
    Embedding,
    Head,
    StepContext,
    feature_span,
)
from orca.worker.models.encoder_decoder.bart_config import BartConfig, Positions
from orca.worker.models.encoder_decoder.shared_embedding import TABLE, shared_embedding
from orca.worker.models.family import EncoderParts, FamilyParts
from orca.worker.models.model_shape import Stack
from orca.worker.models.weights import Columns, RankWeights
from orca.worker.parallel.shard import heads_of
from orca.worker.weights.linear import Linear, Norm

_LOGITS_BIAS = "final_logits_bias"


class _StackEmbedding:
    """Tokens and positions of one stack, named `encoder` or `decoder`."""

    stack: str
    only_kernels = True

    def __init__(self, weights: RankWeights, config: BartConfig, prefix: str, table: Embedding) -> None:
        here = f"{prefix}{self.stack}."
        self._table = table
        self._positions = _positions(weights, config, f"{here}embed_positions.weight")
        self._norm = _norm(weights, config, f"{here}layernorm_embedding") if config.has_embedding_norm else None

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        x = self._table(ids, step, self._positions)
        return x if self._norm is None else self._norm(x)


class BartSourceEmbedding(_StackEmbedding):
    stack = "encoder"


class BartTargetEmbedding(_StackEmbedding):
    stack = "decoder"


class BartEncoderLayer:
    """Layer `number` of the encoder, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: BartConfig, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}encoder.layers.{number}."
        self._attention_norm = _norm(weights, config, f"{here}self_attn_layer_norm")
        self._mlp_norm = _norm(weights, config, f"{here}final_layer_norm")
        self._norms_first = config.norms_first
        self._attention = _self_attention(weights, config, config.encoder, here, index, self._attention_norm)
        self._mlp = _mlp(weights, config, config.encoder, here, self._mlp_norm)
        self.only_kernels = self._attention.only_kernels and self._mlp.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        if self._norms_first:
            x, normed = self._attention(x, step, self._mlp_norm)
            return self._mlp(x, step, normed)
        x, normed = self._attention(x, step, self._attention_norm)
        return self._mlp_norm(self._mlp(_normed(self._attention_norm, x, normed), step))


class BartDecoderLayer:
    """Layer `number` of the decoder, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: BartConfig, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}decoder.layers.{number}."
        self._attention_norm = _norm(weights, config, f"{here}self_attn_layer_norm")
        self._cross_norm = _norm(weights, config, f"{here}encoder_attn_layer_norm")
        self._mlp_norm = _norm(weights, config, f"{here}final_layer_norm")
        self._norms_first = config.norms_first
        self._attention = _self_attention(weights, config, config.decoder, here, index, self._attention_norm)
        self._cross = _cross_attention(weights, config, here, index, self._cross_norm)
        self._mlp = _mlp(weights, config, config.decoder, here, self._mlp_norm)
        self.only_kernels = all(part.only_kernels for part in (self._attention, self._cross, self._mlp))

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        if self._norms_first:
            x, normed = self._attention(x, step, self._cross_norm)
            x, normed = self._cross(x, step, self._mlp_norm, normed)
            return self._mlp(x, step, normed)
        x, normed = self._attention(x, step, self._attention_norm)
        x, normed = self._cross(_normed(self._attention_norm, x, normed), step, self._cross_norm)
        return self._mlp_norm(self._mlp(_normed(self._cross_norm, x, normed), step))

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._attention.keep(x, step)
        self._cross.keep(step)


class BartHead:
    def __init__(self, weights: RankWeights, config: BartConfig, prefix: str, tied: Linear | None) -> None:
        self._norm = _stack_norm(weights, config, f"{prefix}decoder.")
        name = f"{prefix}{TABLE}" if config.is_tied else HEAD
        bias = _logits_bias(weights, config) if tied is None else None  # a tied one has it already
        self._head = Head(weights, name, config.vocab_size, config.hidden_size, tied, bias)
        self.only_kernels = self._head.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self._head(self._norm, x, step)


def scaled_table(weights: RankWeights, config: BartConfig, prefix: str) -> Embedding:
    """Read the embedding of tokens, which some models scale."""
    bias = _logits_bias(weights, config) if config.is_tied and weights.shard.is_last else None
    return shared_embedding(weights, config, prefix, scale=config.embedding_scale, head_bias=bias)


def encoder_norm(weights: RankWeights, config: BartConfig, prefix: str) -> Norm | None:
    """Read the norm after the encoder's last layer, if the model has one."""
    return _stack_norm(weights, config, f"{prefix}encoder.")


def sinusoids(config: BartConfig) -> Tensor:
    """Compute the vectors of positions, [positions, hidden] float32: sines, then cosines.

    Models from fairseq space the frequencies so that the last one is 1 / 10,000; Marian follows the paper, section 3.5.
    """
    half = config.hidden_size // 2
    places = torch.arange(config.first_position, config.first_position + config.max_positions)
    if config.positions is Positions.SINUSOIDS_FROM_PADDING:
        # In float32 from the start, as the models were trained.
        step = math.log(10_000) / max(half - 1, 1)
        angles = places.float()[:, None] * torch.exp(torch.arange(half).float() * -step)
    else:
        angles = places.double()[:, None] / 10_000 ** (2 * torch.arange(half).double() / config.hidden_size)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


def _positions(weights: RankWeights, config: BartConfig, name: str) -> Tensor:
    """Return the vectors of positions from 0 on, [positions, hidden]."""
    if config.positions is Positions.LEARNED:
        shape = (config.max_positions + config.first_position, config.hidden_size)
        return weights.tensor(name, shape)[config.first_position :]
    return weights.made(sinusoids(config))


def _logits_bias(weights: RankWeights, config: BartConfig) -> Tensor | None:
    """Read the bias of this rank's logits. None if there is none, or if it is 0.

    It is 0 in published models of BART and mBART. Marian trains it.
    """
    if not config.has_logits_bias or _LOGITS_BIAS not in weights.checkpoint:
        return None
    span = weights.shard.slice(config.vocab_size, "vocabulary entries")
    bias = weights.checkpoint.read(_LOGITS_BIAS, (1, config.vocab_size), None, span)[0]
    return bias if bool(bias.any()) else None


def _self_attention(
    weights: RankWeights, config: BartConfig, stack: Stack, here: str, index: int, norm: Norm
) -> Attention:
    features = feature_span(heads_of(weights.shard, stack.heads, stack.heads).query, stack.head_dim)
    hidden = config.hidden_size
    qkv = [Columns(f"{here}self_attn.{name}", hidden, features) for name in ("q_proj", "k_proj", "v_proj")]
    return Attention(
        norm if config.norms_first else None,
        weights.column_linear(qkv, hidden, has_bias=True),
        weights.row_linear(f"{here}self_attn.out_proj", hidden, hidden, features, has_bias=True),
        index=index,
        scale=stack.head_dim**-0.5,
        window=None,
    )


def _cross_attention(weights: RankWeights, config: BartConfig, here: str, index: int, norm: Norm) -> CrossAttention:
    stack, hidden = config.decoder, config.hidden_size
    features = feature_span(heads_of(weights.shard, stack.heads, stack.heads).query, stack.head_dim)
    query, *kv = (Columns(f"{here}encoder_attn.{name}", hidden, features) for name in ("q_proj", "k_proj", "v_proj"))
    return CrossAttention(
        norm if config.norms_first else None,
        weights.column_linear([query], hidden, has_bias=True),
        weights.column_linear(kv, hidden, has_bias=True),
        weights.row_linear(f"{here}encoder_attn.out_proj", hidden, hidden, features, has_bias=True),
        index=index,
        scale=stack.head_dim**-0.5,
    )


def _mlp(weights: RankWeights, config: BartConfig, stack: Stack, here: str, norm: Norm) -> MLP:
    columns, hidden = stack.intermediate_size, config.hidden_size
    span = weights.shard.slice(columns, "MLP columns")
    return MLP(
        norm if config.norms_first else None,
        weights.column_linear([Columns(f"{here}fc1", columns, span)], hidden, has_bias=True),
        weights.row_linear(f"{here}fc2", hidden, columns, span, has_bias=True),
        config.activation,
    )


def _stack_norm(weights: RankWeights, config: BartConfig, stack: str) -> Norm | None:
    return _norm(weights, config, f"{stack}layer_norm") if config.norms_first else None


def _norm(weights: RankWeights, config: BartConfig, name: str) -> Norm:
    weight, bias = (weights.tensor(f"{name}.{part}", (config.hidden_size,)) for part in ("weight", "bias"))
    return Norm(NormParameters(weight, config.norm_eps, bias))


def _normed(norm: Norm, x: Tensor, normed: Tensor | None) -> Tensor:
    return norm(x) if normed is None else normed


FAMILY = FamilyParts(
    embedding=BartTargetEmbedding,
    layer=BartDecoderLayer,
    head=BartHead,
    prefixes=("model.", ""),
    probe=TABLE,
    layers="decoder.layers",
    encoder=EncoderParts(
        table=scaled_table,
        embedding=BartSourceEmbedding,
        layer=BartEncoderLayer,
        layers="encoder.layers",
        norm=encoder_norm,
    ),
)
