"""Prefetch on the stage that embeds targets: the queue of sampled tokens that it will need as inputs, in step order."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from orca.core.domain.step import Step
from orca.worker.parallel.process_groups import IncomingTensor
from orca.worker.stage.stage import Stage

_STEPS_HELD_MAX = 64
"""Steps whose tokens may stay unread because no row has needed them yet. No master has this many steps in flight, so
the oldest tokens have arrived and reading them never waits."""


@dataclass(slots=True)
class _StepTokens:
    """Tokens that a step sampled and the stage that embeds them has not read yet, one for each handle."""

    handles: tuple[int, ...]
    tokens: IncomingTensor | Tensor | Sequence[int]


@dataclass(slots=True)
class DeviceTokenQueue:
    """Tokens of earlier steps, which are read in order and only when a step needs them."""

    _steps: deque[_StepTokens] = field(default_factory=deque)

    def expect(self, handles: tuple[int, ...], tokens: IncomingTensor | Tensor | Sequence[int]) -> None:
        """Add the tokens that a step samples for these handles."""
        self._steps.append(_StepTokens(handles, tokens))

    def deliver(self, stage: Stage, step: Step) -> None:
        """Give `stage` the tokens that `step` needs: those of rows that neither the master nor a prompt supplies."""
        asking = {row.handle for row in step.rows if row.token is None}
        needed = 0
        for position, held in enumerate(self._steps, start=1):
            if not asking.isdisjoint(held.handles):
                needed = position
        for _ in range(max(needed, len(self._steps) - _STEPS_HELD_MAX)):
            held = self._steps.popleft()
            tokens = held.tokens.wait() if isinstance(held.tokens, IncomingTensor) else held.tokens
            stage.put_device_tokens(held.handles, tokens)
