"""The part of a model that one rank holds: layers by stage, heads and columns by rank (ORCA, section 4.1, Figure 6).

There is one rule for numbers that do not divide evenly: parts are contiguous, and the first `total % parts` of them get
one more. `--layers` may divide the layers in another way. Key-value heads follow their query heads: a rank holds every
KV head that one of its query heads reads, so both ranks hold a KV head on their border.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from orca.core.domain.errors import ModelError
from orca.core.even_parts import even_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's place in a group."""

    stage: int = 0  # 0 .. stages - 1
    stages: int = 1
    rank: int = 0  # inside the stage, 0 .. tensor - 1
    tensor: int = 1
    layer_counts: tuple[int, ...] | None = None  # layers of each stage; None divides them as evenly as possible

    def __post_init__(self) -> None:
        if not (0 <= self.stage < self.stages and 0 <= self.rank < self.tensor):
            raise ValueError(f"{self} is outside its own group")

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage. Raises: ModelError as `layers_by_stage` does."""
        counts = self.layers_by_stage(num_layers)
        first = sum(counts[: self.stage])
        return range(first, first + counts[self.stage])

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Return the stage that holds a layer. Raises: ModelError as `layers_by_stage` does."""
        return bisect_right(list(accumulate(self.layers_by_stage(num_layers))), layer)

    def layers_by_stage(self, num_layers: int) -> tuple[int, ...]:
        """Return how many layers each stage of the group holds.

        Raises: ModelError if there are more stages than layers, or if `layer_counts` divides another number of layers.
        """
        if self.stages > num_layers:
            raise ModelError(f"{num_layers} layers cannot be split over {self.stages} stages")
        counts = self.layer_counts
        if counts is None:
            return even_parts(num_layers, self.stages)
        if len(counts) != self.stages or min(counts) < 1 or sum(counts) != num_layers:
            raise ModelError(f"layers {counts} are no division of {num_layers} layers over {self.stages} stages")
        return counts

    def slice(self, total: int, what: str) -> tuple[int, int]:
        """Return this rank's [first, last) of `total` columns, heads or tokens.

        Raises: ModelError if a rank would hold nothing.
        """
        if self.tensor > total:
            raise ModelError(f"{total} {what} cannot be split over {self.tensor} ranks")
        return part(total, self.tensor, self.rank)

    def sizes(self, total: int) -> list[int]:
        """Return how many of `total` each rank of the stage holds."""
        return list(even_parts(total, self.tensor))


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one rank."""

    query: tuple[int, int]  # [first, last) of the model's query heads
    kv: tuple[int, int]  # [first, last) of the model's KV heads: all that the query heads read
    kv_of_query: tuple[int, ...]  # for each local query head, its KV head counted from kv[0]

    @property
    def num_query(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_kv(self) -> int:
        return self.kv[1] - self.kv[0]


def heads_of(shard: Shard, num_heads: int, num_kv_heads: int) -> Heads:
    """Return the heads that `shard`'s rank holds."""
    first, last = shard.slice(num_heads, "attention heads")
    group = num_heads // num_kv_heads
    kv_first, kv_last = first // group, (last - 1) // group + 1
    return Heads((first, last), (kv_first, kv_last), tuple(head // group - kv_first for head in range(first, last)))


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return [first, last) of part `index` of `total` things: the first total % parts get one more than the others."""
    sizes = even_parts(total, parts)
    first = sum(sizes[:index])
    return first, first + sizes[index]


class TensorGroup(Protocol):
    """The ranks of one stage, as its model uses them. All ranks make both calls, in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, the same bits on each; `tensor` may be overwritten."""
        ...

    def all_gather_last(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        """Join the ranks' tensors [..., sizes[rank]] along the last dimension, in rank order."""
        ...


class SingleRank:
    """A stage of one rank: nothing to exchange."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_last(self, tensor: Tensor, sizes: list[int]) -> Tensor:  # noqa: ARG002 (the protocol's signature)
        return tensor
