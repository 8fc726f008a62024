"""The run of encoder layers that a rank holds. A run is a contiguous part of one stack's layers."""

from dataclasses import dataclass

import torch

from orca.kernels.contract.reference import AttentionView
from orca.worker.models.blocks import ModelPart
from orca.worker.models.family import EncoderParts
from orca.worker.models.model_shape import EncoderDecoderShape
from orca.worker.models.weights import RankWeights
from orca.worker.parallel.shard import Heads, heads_of
from orca.worker.weights.linear import Norm


@dataclass(slots=True, kw_only=True)
class EncoderRun:
    """Encoder layers of one stage on one rank. Their keys and values live only while a layer runs."""

    embed: ModelPart | None  # if the run begins the encoder: ids [tokens] to [tokens, hidden]
    layers: list[ModelPart]
    norm: Norm | None  # after the encoder's last layer
    heads: Heads
    head_dim: int

    def view(self, tables: torch.Tensor, block_tokens: int, dtype: torch.dtype, device: torch.device) -> AttentionView:
        """Return a view of keys and values that all tokens of a source see. Args: tables: [sources, blocks] int32."""
        return AttentionView(
            kv_of_query=self.heads.kv_of_query,
            kv_heads=self.heads.num_kv,
            head_dim=self.head_dim,
            tables=tables,
            block_tokens=block_tokens,
            window=None,
            dtype=dtype,
            device=device,
            is_causal=False,
            is_encoder=True,
        )


def build_encoder_run(
    weights: RankWeights,
    config: EncoderDecoderShape,
    parts: EncoderParts,
    prefix: str,
    numbers: range,
    embed: ModelPart | None,
) -> EncoderRun:
    """Read encoder layers.

    Args:
        numbers: of the layers, counted in the encoder; at least one.
        embed: of sources, if the run begins the encoder.
    Raises: ModelError that names the tensor.
    """
    layers = []
    for index, number in enumerate(numbers):
        layers.append(parts.layer(weights, config, prefix, number=number, index=index))
        weights.checkpoint.refuse_unread(f"{prefix}{parts.layers}.{number}.")
    ends_stack = numbers.stop == config.encoder.layers
    return EncoderRun(
        embed=embed,
        layers=layers,
        norm=parts.norm(weights, config, prefix) if ends_stack else None,
        heads=heads_of(weights.shard, config.encoder.heads, config.encoder.heads),
        head_dim=config.encoder.head_dim,
    )
