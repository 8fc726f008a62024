"""Llama and its relatives (Mistral, Qwen2, Qwen3): RMSNorm first, RoPE, grouped-query attention, gated MLP."""

import torch
from torch import Tensor

from orca.kernels.contract.reference import NormParameters
from orca.worker.models.blocks import HEAD, Attention, Embedding, GatedMLP, Head, StepContext, feature_span
from orca.worker.models.config import LlamaConfig
from orca.worker.models.family import FamilyParts
from orca.worker.models.weights import Columns, RankWeights, neighbouring_pairs
from orca.worker.parallel.shard import heads_of
from orca.worker.weights.linear import Linear, Norm


class LlamaEmbedding:
    only_kernels = True

    def __init__(self, weights: RankWeights, config: LlamaConfig, prefix: str) -> None:
        self.table = Embedding(
            weights, f"{prefix}embed_tokens.weight", config.vocab_size, config.hidden_size, is_tied=config.is_tied
        )

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        return self.table(ids, step)


class LlamaLayer:
    """Layer `number` of the model, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: LlamaConfig, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}layers.{number}."
        hidden, dim = config.hidden_size, config.head_dim
        heads = heads_of(weights.shard, config.num_heads, config.num_kv_heads)
        query_span, kv_span = feature_span(heads.query, dim), feature_span(heads.kv, dim)
        mlp_span = weights.shard.slice(config.intermediate_size, "MLP columns")
        head_norm = None
        if config.has_qk_norm:
            q_norm, k_norm = (
                neighbouring_pairs(weights.checkpoint.read(f"{here}self_attn.{name}.weight", (dim,)), dim)
                for name in ("q_norm", "k_norm")
            )
            stacked = torch.cat((q_norm.expand(heads.num_query, dim), k_norm.expand(heads.num_kv, dim)))
            head_norm = NormParameters(stacked, config.norm_eps)
        attention_norm = _norm(weights, config, f"{here}input_layernorm")
        self._attention = Attention(
            attention_norm,
            weights.column_linear(
                [
                    Columns(f"{here}self_attn.q_proj", config.num_heads * dim, query_span, pairs=dim),
                    Columns(f"{here}self_attn.k_proj", config.num_kv_heads * dim, kv_span, pairs=dim),
                    Columns(f"{here}self_attn.v_proj", config.num_kv_heads * dim, kv_span),
                ],
                hidden,
                has_bias=config.has_qkv_bias,
            ),
            weights.row_linear(
                f"{here}self_attn.o_proj",
                hidden,
                config.num_heads * dim,
                query_span,
                has_bias=config.has_output_bias,
            ),
            index=index,
            scale=dim**-0.5,
            window=config.windows[number],
            head_norm=head_norm,
        )
        mlp_norm = _norm(weights, config, f"{here}post_attention_layernorm")
        self._mlp = GatedMLP(
            mlp_norm,
            weights.column_linear(
                [Columns(f"{here}mlp.{name}", config.intermediate_size, mlp_span) for name in ("gate_proj", "up_proj")],
                hidden,
                has_bias=config.has_mlp_bias,
                is_gated=True,
            ),
            weights.row_linear(
                f"{here}mlp.down_proj", hidden, config.intermediate_size, mlp_span, has_bias=config.has_mlp_bias
            ),
            config.activation,
        )
        self.only_kernels = self._attention.only_kernels and self._mlp.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x, normed = self._attention(x, step, self._mlp.norm)
        return self._mlp(x, step, normed)

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._attention.keep(x, step)


class LlamaHead:
    def __init__(self, weights: RankWeights, config: LlamaConfig, prefix: str, tied: Linear | None) -> None:
        self._norm = _norm(weights, config, f"{prefix}norm")
        name = f"{prefix}embed_tokens.weight" if config.is_tied else HEAD
        self._head = Head(weights, name, config.vocab_size, config.hidden_size, tied)
        self.only_kernels = self._head.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self._head(self._norm, x, step)


def _norm(weights: RankWeights, config: LlamaConfig, name: str) -> Norm:
    return Norm(NormParameters(weights.tensor(f"{name}.weight", (config.hidden_size,)), config.norm_eps))


FAMILY = FamilyParts(
    embedding=LlamaEmbedding,
    layer=LlamaLayer,
    head=LlamaHead,
    prefixes=("model.", ""),
    probe="embed_tokens.weight",
    layers="layers",
    ignored=("rotary_emb.inv_freq",),
)
