"""Stages in one process to which a fault happens, and the comparison of their outputs with the right ones."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from orca.core.domain.step import Sampled, Step
from orca.kernels.contract.paged import TokenSlots
from support.worker.stage_driver import Chain

Fault = Callable[["FaultyChain", Step], Step]


class FaultyChain(Chain):
    """Stages to which `fault` happens before each step: it may change what they hold, and the step itself."""

    def __init__(self, folder: Path, fault: Fault, **options: Any) -> None:
        super().__init__(folder, **options)
        self._fault = fault

    def run(self, step: Step) -> list[Sampled]:
        return super().run(self._fault(self, step))

    def run_as_it_is(self, step: Step) -> None:
        super().run(step)

    def places(
        self, stage: int, rank: int, handle: int, begin: int, end: int, *, of_source: bool = False
    ) -> TokenSlots:
        """Return the slots where a rank keeps positions begin .. end - 1 of a request, or of its source."""
        holder = self.stages[stage][rank]
        tables = holder.cache.source_tables if of_source else holder.cache.tables
        assert tables is not None
        table = tables[holder._requests.by_handle[handle].line]
        return TokenSlots.of_positions(table, begin, end, holder.cache.block_tokens)

    def spoil(
        self,
        change: Callable[[torch.Tensor], object],
        *,
        stage: int,
        handle: int,
        position: int,
        rank: int = 0,
        of_source: bool = False,
    ) -> None:
        """Change what a rank keeps of a position: `change` works on [1, keys then values, head_dim]."""
        cache = self.stages[stage][rank].cache
        places = self.places(stage, rank, handle, position, position + 1, of_source=of_source)
        for layer in cache.layers:
            kept = places.read(layer)
            change(kept)
            places.write(layer, kept)


def at_step(number: int, act: Callable[[FaultyChain], object]) -> Fault:
    """Return the fault that acts before one step."""

    def fault(chain: FaultyChain, step: Step) -> Step:
        if step.number == number:
            act(chain)
        return step

    return fault


def equal_tokens(output: Sequence[int], expected: Sequence[int]) -> list[bool]:
    """Return for each token whether it is the right one."""
    return [token == right for token, right in zip(output, expected, strict=True)]


def assert_wrong_from(first: int, agrees: list[bool]) -> None:
    """Right up to `first`, wrong from there on; one of the tokens after it may be right by chance (1 in 1000)."""
    assert all(agrees[:first])
    assert len(agrees[first:]) >= 8
    assert sum(agrees[first:]) <= 1
