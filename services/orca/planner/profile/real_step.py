"""The shape of a real step (step_shape.py)."""

from orca.core.domain.step import Epoch, Part, Step
from orca.planner.profile.step_shape import LikeRows, StepShape


class SourceLengths:
    """The source tokens of running requests. Steps name them once, so one object serves one run at a time."""

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self.by_handle: dict[int, int] = {}

    def note(self, step: Step) -> None:
        """Take what a step frees and brings. A step of another epoch begins with nothing."""
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self.by_handle.clear()
        for handle in step.freed:
            self.by_handle.pop(handle, None)
        for new in step.new:
            self.by_handle[new.handle] = new.source_tokens


def shape_of(step: Step, sources: dict[int, int]) -> StepShape:
    """Return the shape of a real step. Args: sources: source tokens of running requests, by handle."""
    increments = context = sampled = entering = tokens = source_sum = 0
    prompts: list[LikeRows] = []
    source_rows: list[LikeRows] = []
    for row in step.rows:
        count = row.count
        if row.part is Part.SOURCE:
            source_rows.append(LikeRows(1, count))
            entering += 1
            continue
        if row.part is Part.UNSPECIFIED and not row.start:
            entering += 1
        if row.sample:
            sampled += 1
        tokens += count
        if sources:
            source_sum += count * sources.get(row.handle, 0)
        if count == 1:
            increments += 1
            context += row.start + 1
        else:
            prompts.append(LikeRows(1, count, row.start))
    return StepShape(
        increments=increments,
        context=context / increments if increments else 0.0,
        prompts=tuple(prompts),
        sampled=sampled,
        entering=entering,
        sources=tuple(source_rows),
        source_context=source_sum / tokens if tokens else 0.0,
    )
