"""The seam between scheduler and engine: two methods, so that policies cannot tell engines apart.

Three engines implement it. The gRPC engine (scheduler.engines.grpc_engine) drives real stages. The in-process engine
(worker.rank.local_engine) is for tests and microbenchmarks. The simulated engine (scheduler.engines.simulated_engine)
is a cost model on a virtual clock.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orca.core.domain.step import Epoch, Step, StepResult


class PrefixCharge(StrEnum):
    """Decides what the blocks that several living requests have take of a group's slots."""

    EACH = "each"  # as many blocks as requests that have them, as if nobody shared any
    ONCE = "once"  # one block


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The size of a formed engine."""

    stages: int  # inter-layer partitions: n_workers of Algorithm 1
    slots: int  # KV slots, a whole number of blocks; the same on every stage
    block_tokens: int  # slots in a KV block
    max_model_len: int  # longest prompt + output in tokens


class Engine(Protocol):
    """An engine that runs the steps of one epoch in order of their numbers."""

    async def form(self, epoch: Epoch) -> EngineShape:
        """Start a new epoch: every stage joins it with empty state, whatever it held before.

        Raises: EngineError when a stage refuses or does not answer within its bound, SettingError when no group
            of these stages could be formed with these settings.
        """
        ...

    async def submit(self, step: Step) -> None:
        """Send a step to the first stage. This returns when the step is on its way, not when it has run.

        Raises: EngineError when the epoch is over.
        """
        ...

    def results(self) -> AsyncIterator[StepResult]:
        """Yield the results of the present epoch in step order, those of steps without sampling rows too.

        Raises: EngineError when a stage died, hung past its bound, or the link to it broke.
        """
        ...

    async def close(self) -> None:
        """Disconnect from the stages. Nothing is in flight afterwards."""
        ...
