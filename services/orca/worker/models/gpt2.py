"""GPT-2 and GPT-3 shapes: learned positions, LayerNorm before each part, plain MLP; weights are stored [in, out]."""

from torch import Tensor

from orca.kernels.contract.reference import NormParameters
from orca.worker.models.blocks import HEAD, MLP, Attention, Embedding, Head, StepContext, feature_span
from orca.worker.models.config import GPT2Config
from orca.worker.models.family import FamilyParts
from orca.worker.models.weights import Columns, RankWeights
from orca.worker.parallel.shard import heads_of
from orca.worker.weights.linear import Linear, Norm


class GPT2Embedding:
    only_kernels = True

    def __init__(self, weights: RankWeights, config: GPT2Config, prefix: str) -> None:
        self.table = Embedding(
            weights, f"{prefix}wte.weight", config.vocab_size, config.hidden_size, is_tied=config.is_tied
        )
        self._positions = weights.tensor(f"{prefix}wpe.weight", (config.max_positions, config.hidden_size))

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        return self.table(ids, step, self._positions)


class GPT2Layer:
    """Layer `number` of the model, `index` in its stage."""

    def __init__(self, weights: RankWeights, config: GPT2Config, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}h.{number}."
        hidden, dim = config.hidden_size, config.head_dim
        heads = heads_of(weights.shard, config.num_heads, config.num_heads)
        mlp_span = weights.shard.slice(config.intermediate_size, "MLP columns")
        # c_attn holds the columns of q, k and v side by side.
        qkv = [
            Columns(f"{here}attn.c_attn", 3 * hidden, feature_span(heads.query, dim, hidden * part))
            for part in range(3)
        ]
        up = [Columns(f"{here}mlp.c_fc", config.intermediate_size, mlp_span)]
        attention_norm = _norm(weights, config, f"{here}ln_1")
        self._attention = Attention(
            attention_norm,
            weights.column_linear(qkv, hidden, has_bias=True, is_transposed=True),
            weights.row_linear(
                f"{here}attn.c_proj", hidden, hidden, feature_span(heads.query, dim), has_bias=True, is_transposed=True
            ),
            index=index,
            scale=config.scales[number],
            window=None,
        )
        mlp_norm = _norm(weights, config, f"{here}ln_2")
        self._mlp = MLP(
            mlp_norm,
            weights.column_linear(up, hidden, has_bias=True, is_transposed=True),
            weights.row_linear(
                f"{here}mlp.c_proj", hidden, config.intermediate_size, mlp_span, has_bias=True, is_transposed=True
            ),
            config.activation,
        )
        self.only_kernels = self._attention.only_kernels and self._mlp.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x, normed = self._attention(x, step, self._mlp.norm)
        return self._mlp(x, step, normed)

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._attention.keep(x, step)


class GPT2Head:
    def __init__(self, weights: RankWeights, config: GPT2Config, prefix: str, tied: Linear | None) -> None:
        self._norm = _norm(weights, config, f"{prefix}ln_f")
        name = f"{prefix}wte.weight" if config.is_tied else HEAD
        self._head = Head(weights, name, config.vocab_size, config.hidden_size, tied)
        self.only_kernels = self._head.only_kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self._head(self._norm, x, step)


def _norm(weights: RankWeights, config: GPT2Config, name: str) -> Norm:
    weight, bias = (weights.tensor(f"{name}.{part}", (config.hidden_size,)) for part in ("weight", "bias"))
    return Norm(NormParameters(weight, config.norm_eps, bias))


FAMILY = FamilyParts(
    embedding=GPT2Embedding,
    layer=GPT2Layer,
    head=GPT2Head,
    prefixes=("transformer.", ""),
    probe="wte.weight",
    layers="h",
    ignored=("attn.bias", "attn.masked_bias"),  # causal masks that old checkpoints carry
)
