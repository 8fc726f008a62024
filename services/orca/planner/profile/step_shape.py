"""The shape of a step: all that its time depends on, in numbers that may be expected values.

The exact simulator asks for the time of a real step, the formulas for that of an expected one with, say, 11.4 requests.
Both get it from one function of a `StepShape`, so they can differ in the steps only, never in their cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from orca.scheduler.engines.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class LikeRows:
    """Rows of several tokens that are alike."""

    requests: float  # how many rows
    count: float  # tokens of each
    start: float = 0.0  # position of its first token: attention reads so many tokens before it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The rows of one step. All numbers may be expected values."""

    increments: float = 0.0  # rows of one token
    context: float = 0.0  # tokens of KV that attention reads for each of them on average, its own included
    prompts: tuple[LikeRows, ...] = ()  # rows of more tokens: whole prompts or chunks of them
    sampled: float = 0.0  # rows that draw a token
    entering: float = 0.0  # requests that run for the first time
    sources: tuple[LikeRows, ...] = ()  # of an encoder-decoder model: rows of the encoder
    source_context: float = 0.0  # tokens that cross attention reads for each row of the decoder on average

    @property
    def tokens(self) -> float:
        """Rows of the flat tensors of a decoder-only model, or of the decoder."""
        return self.increments + tokens_of(self.prompts)

    @property
    def source_tokens(self) -> float:
        """Rows of the encoder's flat tensors."""
        return tokens_of(self.sources)


def tokens_of(rows: Iterable[LikeRows]) -> float:
    """Return the tokens of all rows together."""
    return sum(each.requests * each.count for each in rows)


class ShapeCost(StepCost, Protocol):
    """The cost of one stage for steps and for shapes of steps."""

    def shape_us(self, shape: StepShape) -> float:
        """Return the time of the stage in microseconds; 0 for a shape without rows."""
        ...
