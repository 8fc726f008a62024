"""What a family of models gives to assemble a stage from (build.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The parts of a building plan, and how its checkpoints name them."""

    embedding: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]
    prefixes: tuple[str, ...]  # in front of all names but the head's, the first that the checkpoint has
    probe: str  # a tensor that every checkpoint has
    layers: str  # in front of the layer's number
    ignored: tuple[str, ...] = ()  # endings of tensors that carry no weights
