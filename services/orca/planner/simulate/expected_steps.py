"""The shapes of expected steps, and their times on each stage."""

from collections.abc import Iterable, Sequence
from math import exp

from orca.planner.profile.step_shape import LikeRows, ShapeCost, StepShape, tokens_of
from orca.planner.simulate.estimate import Scenario

STRATA = 8
"""Groups of prompts, of equal share, whose means represent all prompts: attention is not linear in their length."""


def expected_step(
    scenario: Scenario,
    *,
    increments: float = 0.0,
    generated: float = 0.0,
    read_prompt: float = 0.0,
    entering: Iterable[LikeRows] = (),
    first_tokens: float = 0.0,
) -> StepShape:
    """Return the shape of a step.

    Args:
        increments: requests that decode.
        generated: tokens that each of them has generated with this step, on average.
        read_prompt: prompt tokens of each of them on average, which attention reads.
        entering: prompts or parts of them; sources with an encoder-decoder model.
        first_tokens: requests that draw their first token.
    """
    entering = tuple(rows for rows in entering if rows.requests > 0)
    if not scenario.is_encoder_decoder:
        context = read_prompt + generated if increments else 0.0
        return StepShape(
            increments=increments,
            context=context,
            prompts=entering,
            sampled=increments + first_tokens,
            entering=first_tokens,
        )
    # A target begins with its start token, which runs in the step of its source.
    firsts = sum(rows.requests for rows in entering)
    rows = increments + firsts
    if not rows:
        return StepShape()
    sources = increments * read_prompt + tokens_of(entering)
    return StepShape(
        increments=rows,
        context=(increments * (generated + 1) + firsts) / rows,
        sampled=rows,
        entering=firsts,
        sources=entering,
        source_context=sources / rows,
    )


def whole_prompts(scenario: Scenario, requests: float, scale: float = 1.0) -> tuple[LikeRows, ...]:
    """Return the prompts of so many requests, as groups of alike rows. Args: scale: factor of their lengths."""
    lengths = scenario.workload.prompts.strata(STRATA) if scenario.workload.prompts.deviation else None
    if lengths is None:
        return (LikeRows(requests, scenario.workload.prompts.mean * scale),)
    return tuple(LikeRows(requests / STRATA, length * scale) for length in lengths)


def stage_times(costs: Sequence[ShapeCost], shape: StepShape) -> tuple[float, ...]:
    """Return the microseconds of a step on each stage. Stages that share a cost are asked once."""
    known: dict[int, float] = {}
    for cost in costs:
        if id(cost) not in known:
            known[id(cost)] = cost.shape_us(shape)
    return tuple(known[id(cost)] for cost in costs)


def mean_whole(mean: float) -> float:
    """Return the mean of ceil(x) for an exponentially distributed x: whole steps for work of `mean` steps; 1 for 0."""
    return 1.0 if mean < 0.02 else 1 / (1 - exp(-1 / mean))
