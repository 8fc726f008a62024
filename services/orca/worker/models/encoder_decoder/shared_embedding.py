"""The embedding of tokens that both stacks of an encoder-decoder model share."""

from torch import Tensor

from orca.core.domain.errors import ModelError
from orca.worker.models.blocks import Embedding
from orca.worker.models.model_shape import EncoderDecoderConfig
from orca.worker.models.weights import RankWeights

TABLE = "shared.weight"


def shared_embedding(
    weights: RankWeights,
    config: EncoderDecoderConfig,
    prefix: str,
    *,
    scale: float = 1.0,
    head_bias: Tensor | None = None,
) -> Embedding:
    """Read the embedding.

    Args:
        scale, head_bias: as of blocks.Embedding.
    Raises: ModelError if the files have another one for a stack.
    """
    name, shape = f"{prefix}{TABLE}", (config.vocab_size, config.hidden_size)
    span = weights.shard.slice(config.vocab_size, "vocabulary entries")
    own = (f"{prefix}{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
    if (other := weights.checkpoint.other_than(name, own, shape, span)) is not None:
        raise ModelError(f"{other} differs from {name}: models with several embeddings are not supported")
    return Embedding(weights, name, *shape, is_tied=config.is_tied, scale=scale, head_bias=head_bias)
