"""OPT: learned positions from 2 on, LayerNorm before or after each part, plain MLP."""

from torch import Tensor

from orca.kernels.contract.reference import NormParameters
from orca.worker.models.blocks import HEAD, MLP, Attention, Embedding, Head, StepContext, feature_span
from orca.worker.models.config import OPTConfig
from orca.worker.models.family import FamilyParts
from orca.worker.models.weights import Columns, RankWeights
from orca.worker.parallel.shard import heads_of
from orca.worker.weights.linear import Linear, Norm, PanelLinear

_OFFSET = 2  # the first two rows of the position table belonged to padding in training


class OPTEmbedding:
    def __init__(self, weights: RankWeights, config: OPTConfig, prefix: str) -> None:
        self.table = Embedding(
            weights, f"{prefix}embed_tokens.weight", config.vocab_size, config.embedding_dim, is_tied=config.is_tied
        )
        shape = (config.max_positions + _OFFSET, config.hidden_size)
        self._positions = weights.tensor(f"{prefix}embed_positions.weight", shape)[_OFFSET:]
        self._project = _projection(weights, config, f"{prefix}project_in", config.embedding_dim, config.hidden_size)
        self.only_kernels = self._project is None

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        if self._project is None:
            return self.table(ids, step, self._positions)
        return self._project(self.table(ids, step)).add_(self._positions.index_select(0, step.positions))


class OPTLayer:
    """Layer `number` of the model, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: OPTConfig, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}layers.{number}."
        hidden, dim, has_bias = config.hidden_size, config.head_dim, config.has_bias
        heads = heads_of(weights.shard, config.num_heads, config.num_heads)
        features = feature_span(heads.query, dim)
        mlp_span = weights.shard.slice(config.intermediate_size, "MLP columns")
        qkv = [Columns(f"{here}self_attn.{name}", hidden, features) for name in ("q_proj", "k_proj", "v_proj")]
        up = [Columns(f"{here}fc1", config.intermediate_size, mlp_span)]
        attention_norm, mlp_norm = (
            _norm(weights, config, f"{here}{name}") for name in ("self_attn_layer_norm", "final_layer_norm")
        )
        # If the parts do not normalise first, the layer normalises their outputs.
        self._output_norms = None if config.norms_first else (attention_norm, mlp_norm)
        self._attention = Attention(
            attention_norm if config.norms_first else None,
            weights.column_linear(qkv, hidden, has_bias=has_bias),
            weights.row_linear(f"{here}self_attn.out_proj", hidden, hidden, features, has_bias=has_bias),
            index=index,
            scale=dim**-0.5,
            window=None,
        )
        self._mlp = MLP(
            mlp_norm if config.norms_first else None,
            weights.column_linear(up, hidden, has_bias=has_bias),
            weights.row_linear(f"{here}fc2", hidden, config.intermediate_size, mlp_span, has_bias=has_bias),
            config.activation,
        )
        self.only_kernels = self._attention.only_kernels and self._mlp.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        if self._output_norms is None:
            x, normed = self._attention(x, step, self._mlp.norm)
            return self._mlp(x, step, normed)
        attention_norm, mlp_norm = self._output_norms
        x, normed = self._attention(x, step, attention_norm)
        return mlp_norm(self._mlp(attention_norm(x) if normed is None else normed, step))

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._attention.keep(x, step)


class OPTHead:
    def __init__(self, weights: RankWeights, config: OPTConfig, prefix: str, tied: Linear | None) -> None:
        self._norm = _norm(weights, config, f"{prefix}final_layer_norm") if config.has_final_norm else None
        self._project = _projection(weights, config, f"{prefix}project_out", config.hidden_size, config.embedding_dim)
        name = f"{prefix}embed_tokens.weight" if config.is_tied else HEAD
        self._head = Head(weights, name, config.vocab_size, config.embedding_dim, tied)
        self.only_kernels = self._head.only_kernels and isinstance(self._project, PanelLinear | None)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x = x if self._norm is None else self._norm(x)
        x = x if self._project is None else self._project(x)
        return self._head(None, x, step)


def _norm(weights: RankWeights, config: OPTConfig, name: str) -> Norm:
    size = (config.hidden_size,)
    if config.has_norm_weights:
        weight, bias = (weights.tensor(f"{name}.{part}", size) for part in ("weight", "bias"))
    else:
        weight, bias = weights.full(1.0, size), weights.full(0.0, size)
    return Norm(NormParameters(weight, config.norm_eps, bias))


def _projection(weights: RankWeights, config: OPTConfig, name: str, inputs: int, outputs: int) -> Linear | None:
    """Read the linear between embedding size and hidden size, whole on every rank; None if they are equal."""
    if config.embedding_dim == config.hidden_size:
        return None
    return weights.column_linear([Columns(name, outputs, (0, outputs))], inputs, has_bias=False)


FAMILY = FamilyParts(
    embedding=OPTEmbedding,
    layer=OPTLayer,
    head=OPTHead,
    prefixes=("model.decoder.", "decoder.", ""),
    probe="embed_tokens.weight",
    layers="layers",
)
