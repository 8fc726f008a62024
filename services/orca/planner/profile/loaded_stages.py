"""The times of stages whose ranks compute on all processors, so that the rest of Orca takes its time from them. Pure.

    loss(stage) = groups x host(step) / processors x share of the time in which the other processors are busy

A process that wakes runs on an idle processor if there is one. So a stage loses time only while the other stages
compute, too. They do so for as long as their part of the step takes, compared with the longest part. Groups that share
the machine run alike: in the time of a step each of them runs one.
"""

from collections import deque
from collections.abc import Sequence

from orca.core.domain.step import Step
from orca.planner.profile.profile import HostLoad
from orca.planner.profile.real_step import SourceLengths, shape_of
from orca.planner.profile.step_shape import ShapeCost, StepShape

_STEPS_MAX = 64
"""Steps whose times are kept: more than a group has in flight."""


class LoadedStage:
    """The cost of one stage beside the others (step_shape.ShapeCost). Stages of one group share `times`."""

    def __init__(self, times: "LoadedTimes", stage: int) -> None:
        self._times, self._stage = times, stage

    def shape_us(self, shape: StepShape) -> float:
        """See step_shape.ShapeCost."""
        return self._times.of_shape(shape)[self._stage]

    def stage_us(self, step: Step) -> int:
        """See step_cost.StepCost."""
        return round(self._times.of_step(step)[self._stage])


class LoadedTimes:
    """The times of all stages of a group, computed once for each shape or step. So one object serves one run at a time.

    Args:
        costs: of the stages alone.
        processors: of the machine.
        of_stage: processors on which the ranks of one stage compute.
        groups: number of groups on the machine.
    """

    def __init__(
        self, costs: Sequence[ShapeCost], load: HostLoad, *, processors: int, of_stage: int, groups: int = 1
    ) -> None:
        self._costs, self._load = costs, load
        self._processors, self._of_stage, self._groups = processors, of_stage, groups
        self._sources = SourceLengths()
        self._shape: StepShape | None = None
        self._times: tuple[float, ...] = ()
        self._steps: deque[tuple[Step, tuple[float, ...]]] = deque(maxlen=_STEPS_MAX)  # the newest one first

    def of_shape(self, shape: StepShape) -> tuple[float, ...]:
        """Return the microseconds of each stage."""
        if shape is not self._shape:
            self._times = self._loaded(shape)
            self._shape = shape
        return self._times

    def of_step(self, step: Step) -> tuple[float, ...]:
        """Return the microseconds of each stage. A later stage may ask when earlier ones have asked for newer steps."""
        for known, times in self._steps:
            if known is step:
                return times
        self._sources.note(step)
        times = self._loaded(shape_of(step, self._sources.by_handle))
        self._steps.appendleft((step, times))
        return times

    def _loaded(self, shape: StepShape) -> tuple[float, ...]:
        alone = [cost.shape_us(shape) for cost in self._costs]
        longest = max(alone)
        if not longest:
            return tuple(alone)
        rows = shape.increments + sum(each.requests for each in shape.prompts)
        service, controller = (each.us(rows, shape.entering) for each in (self._load.service, self._load.controller))
        share_us = self._groups * (service + len(alone) * controller) / self._processors
        busy = [us / longest for us in alone]
        others = self._groups * self._of_stage * len(alone) - 1  # processors beside the one that loses its time
        if not others:
            return tuple(us + share_us for us in alone)
        return tuple(
            us + share_us * (self._of_stage - 1 + self._of_stage * (self._groups * sum(busy) - own)) / others
            for us, own in zip(alone, busy, strict=True)
        )


def loaded_stages(
    costs: Sequence[ShapeCost], load: HostLoad, *, processors: int, of_stage: int, groups: int = 1
) -> tuple[LoadedStage, ...]:
    """Return the costs of stages that share all processors with the rest of Orca. Args: as LoadedTimes."""
    times = LoadedTimes(costs, load, processors=processors, of_stage=of_stage, groups=groups)
    return tuple(LoadedStage(times, stage) for stage in range(len(costs)))
