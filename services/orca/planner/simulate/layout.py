"""The place where a schedule runs: which device has which layers, and what a group can hold."""

from dataclasses import dataclass

from orca.core.domain.request import DEFAULT_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages with their layers, and the ranks of each stage."""

    layers: tuple[int, ...]  # of each stage, encoder and decoder layers together
    ranks: int = 1  # of each stage: the degree of tensor parallelism

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"each stage has at least one layer, not {self.layers}")
        if self.ranks < 1:
            raise ValueError(f"a stage has at least one rank, not {self.ranks}")

    def __str__(self) -> str:
        return f"{self.stages} x {self.ranks} ({','.join(map(str, self.layers))})"

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def devices(self) -> int:
        """GPUs, or rank processes on a CPU."""
        return self.stages * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCapacity:
    """The memory and the bounds of a group, the same on each of its stages."""

    slots: int  # KV slots, in tokens
    max_model_len: int  # longest prompt and output together, in tokens
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    is_chosen: bool = False  # a user has set the slots; otherwise the memory that is left decides them
