"""The sizes of any model, and of a stack of an encoder-decoder model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of any model that a stage must know to lay out a step and its KV cache.

    Heads are those of the decoder, which has the KV cache.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int  # of all stacks
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool  # head and embedding are one matrix
    windows: tuple[int | None, ...]  # for each layer: positions that a token sees, itself included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The sizes of an encoder or of a decoder."""

    layers: int
    heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderShape(ModelShape):
    """The sizes of any encoder-decoder model. The layers are one list: encoder, then decoder."""

    encoder: Stack
    decoder: Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(EncoderDecoderShape):
    """The options that all encoder-decoder language models share."""

    activation: str  # one of ACTIVATIONS
    norm_eps: float
