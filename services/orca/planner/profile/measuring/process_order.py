"""The records that a measuring process and its parent exchange."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class StepTime(NamedTuple):
    """The time of one step on one rank."""

    total_us: float
    compute_us: float  # from the activations to the output, or to the drawn tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of the weights of one rank."""

    layers: tuple[int, ...]  # of one layer of each stack
    embed: int
    head: int  # 0 if it is the embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """The first order of a measuring process."""

    model: str
    dtype: str
    quantization: str | None
    device: str
    threads: int
    number: int  # of the process, from 0
    processes: int  # that run at the same time
    folder: str  # where they meet
    bounds: dict[str, Any]  # points.PointBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """The answer of a process that has loaded its share of the model."""

    layers: int  # of the decoder, or of the only stack
    fewer_layers: int  # of the view FEWER; 0: there is none
    kv_bytes_per_slot: int  # of one layer
    weights: WeightBytes | None  # of process 0

    @classmethod
    def of(cls, content: dict[str, Any]) -> "ProcessFacts":
        weights = content["weights"]
        if weights is not None:
            weights = WeightBytes(layers=tuple(weights["layers"]), embed=weights["embed"], head=weights["head"])
        return cls(**{**content, "weights": weights})
