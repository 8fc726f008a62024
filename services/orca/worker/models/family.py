"""The parts of a model family, from which build.py assembles a stage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orca.worker.models.blocks import Embedding
from orca.worker.weights.linear import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderParts:
    """The modules of an encoder, and the names of its tensors in checkpoints."""

    table: Callable[..., Embedding | None]  # the tokens of both stacks, which both embeddings get; None: there is none
    embedding: Callable[..., Any]
    layer: Callable[..., Any]
    layers: str  # stands before the layer's number
    norm: Callable[..., Norm | None]  # reads the norm after the last layer, if the model has one


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyParts:
    """The modules of a model family, and the names of its tensors in checkpoints."""

    embedding: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]
    prefixes: tuple[str, ...]  # of all names but the head's; the first that the checkpoint has
    probe: str  # a tensor that every checkpoint has
    layers: str  # stands before the layer's number
    ignored: tuple[str, ...] = ()  # endings of tensors that carry no weights
    encoder: EncoderParts | None = None  # the parts above are then the decoder's
