"""The cost of a stage for the steps of the real scheduler, from the cost of their shapes (roofline.py)."""

from collections.abc import Sequence

from orca.bench.exegpt.roofline import RooflineCost
from orca.core.domain.step import Step
from orca.planner.profile.real_step import SourceLengths, shape_of
from orca.planner.profile.step_shape import StepShape


class RooflineStage:
    """The cost of one stage, or of several equal ones (step_shape.ShapeCost).

    It keeps the lengths of the sources of running requests. So one object serves one run at a time.
    """

    def __init__(self, cost: RooflineCost) -> None:
        self.cost = cost
        self._has_encoder = cost.model.encoder_layers > 0
        self._sources = SourceLengths()
        self._newest: tuple[Step, int] | None = None  # equal stages ask for the same step one after the other

    def shape_us(self, shape: StepShape) -> float:
        """See step_shape.ShapeCost."""
        return self.cost.shape_us(shape)

    def stage_us(self, step: Step) -> int:
        """See step_cost.StepCost."""
        if self._newest is not None and self._newest[0] is step:
            return self._newest[1]
        if self._has_encoder:
            self._sources.note(step)
        time_us = round(self.cost.shape_us(shape_of(step, self._sources.by_handle))) if step.rows else 0
        self._newest = step, time_us
        return time_us


def stage_costs(costs: Sequence[RooflineCost]) -> tuple[RooflineStage, ...]:
    """Return the cost of each stage. Equal stages share one object, so formulas ask for their times once."""
    known: dict[RooflineCost, RooflineStage] = {}
    return tuple(known.setdefault(cost, RooflineStage(cost)) for cost in costs)
