"""The time that a stage takes for a step: a protocol, and a linear model of it.

Simulated stages take this time (simulated_engine.py). Whoever plans or predicts steps may ask the same cost.
"""

from dataclasses import dataclass
from typing import Protocol

from orca.core.domain.step import Step


class StepCost(Protocol):
    """The cost of one stage. It depends on the step only, so the same steps take the same time in every run."""

    def stage_us(self, step: Step) -> int:
        """Return the time of a stage for the step, in whole microseconds; 0 for a step without rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """A StepCost that is the sum of three parts."""

    step_us: int = 1_000  # per step: weights read once
    token_us: int = 0  # per row of the flat tensors, of sources and of targets
    source_token_us: int | None = None  # the same for sources, which run other layers; None: as `token_us`
    context_ns: int = 0  # per token of KV read by attention, in nanoseconds, since it is far below a microsecond

    def stage_us(self, step: Step) -> int:
        if not step.rows:
            return 0
        context = sum(row.start + row.count for row in step.rows)
        sources = step.source_tokens
        source_token_us = self.token_us if self.source_token_us is None else self.source_token_us
        tokens_us = self.token_us * (step.tokens - sources) + source_token_us * sources
        return self.step_us + tokens_us + self.context_ns * context // 1_000
