"""The layouts of a group on so many devices: how many stages and ranks, and which stage has how many layers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from orca.core.even_parts import even_parts
from orca.planner.profile.step_shape import ShapeCost, StepShape
from orca.planner.simulate.layout import Layout

CostsOf = Callable[[Layout], Sequence[ShapeCost]]
"""Returns the cost of each stage of a layout."""


def layouts(layers: int, devices: int, degrees: Sequence[int]) -> Iterator[Layout]:
    """Yield every number of stages and ranks that these devices allow, with layers divided evenly.

    Fewer devices than there are may be faster: a stage costs a message, and a rank two all-reduces in each layer.

    Args: layers: of the whole model; degrees: numbers of ranks that a profile knows.
    """
    for ranks in sorted(set(degrees)):
        for stages in range(1, min(devices // ranks, layers) + 1):
            yield Layout(even_parts(layers, stages), ranks)


def balanced(layout: Layout, costs_of: CostsOf, work: Sequence[tuple[float, StepShape]]) -> Layout:
    """Return the layout with its layers moved so that the slowest stage has the least work.

    Stages differ: the first one embeds, the last one has the output head, and encoder layers cost other times than
    decoder layers. Layers move one by one from the slowest stage to others, as long as that helps.

    Args: work: shapes of steps, and how often each runs.
    """

    def slowest_us(candidate: Layout) -> float:
        return max(_stage_work(candidate, costs_of, work))

    best, best_us = layout, slowest_us(layout)
    while True:
        times = _stage_work(best, costs_of, work)
        slowest = times.index(max(times))
        moved = list(_moves(best, slowest))
        found = min(moved, key=slowest_us, default=best)
        if not slowest_us(found) < best_us * (1 - 1e-9):
            return best
        best, best_us = found, slowest_us(found)


def _stage_work(layout: Layout, costs_of: CostsOf, work: Sequence[tuple[float, StepShape]]) -> list[float]:
    return [sum(often * cost.shape_us(shape) for often, shape in work) for cost in costs_of(layout)]


def _moves(layout: Layout, slowest: int) -> Iterator[Layout]:
    """Yield the layouts in which one layer of the slowest stage has moved to another stage, past those between."""
    if layout.layers[slowest] == 1:
        return
    for other in range(layout.stages):
        if other != slowest:
            layers = list(layout.layers)
            layers[slowest] -= 1
            layers[other] += 1
            yield replace(layout, layers=tuple(layers))
