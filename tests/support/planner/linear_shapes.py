"""A cost that is linear in rows and context, for steps and for shapes of steps."""

from dataclasses import dataclass

from orca.core.domain.step import Step
from orca.planner.profile.step_shape import StepShape
from orca.scheduler.engines.step_cost import LinearCost


@dataclass(frozen=True, slots=True)
class LinearShapes:
    """A ShapeCost from a LinearCost: the same time, of expected steps as well."""

    linear: LinearCost

    def stage_us(self, step: Step) -> int:
        return self.linear.stage_us(step)

    def shape_us(self, shape: StepShape) -> float:
        tokens, sources = shape.tokens, shape.source_tokens
        if not tokens + sources:
            return 0.0
        linear = self.linear
        source_us = linear.token_us if linear.source_token_us is None else linear.source_token_us
        context = shape.increments * shape.context
        context += sum(rows.requests * (rows.start + rows.count) for rows in (*shape.prompts, *shape.sources))
        return linear.step_us + linear.token_us * tokens + source_us * sources + linear.context_ns * context / 1_000


def linear_shapes(*, step_us: int, token_us: int = 0, context_ns: int = 0) -> LinearShapes:
    """Return the cost of one stage."""
    return LinearShapes(LinearCost(step_us=step_us, token_us=token_us, context_ns=context_ns))
