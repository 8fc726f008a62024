"""The settings of a survey: the baselines with their batch sizes, and the grid. The bounds follow from a baseline.

The baseline is `request_level` with the habits of FasterTransformer (exegpt/faster_transformer.py), divided into as
many micro-batches as stages.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf

from orca.bench.exegpt.faster_transformer import BATCH_STEP, BOUND_SHARES
from orca.bench.plan.real.case import RealCase
from orca.bench.plan.real.setting import RealSetting
from orca.core.domain.step_tokens import max_batch_tokens
from orca.planner.search.branch_and_bound import Point
from orca.planner.search.plan import PlannedSchedule
from orca.planner.search.planner import Candidate
from orca.planner.search.strategies import CHUNKS, STRATEGIES
from orca.planner.simulate.rra_phases import decode_phases

DEFAULT_SIZES = 5
"""Batch sizes of default `iteration`: the largest that the memory has room for, and each time half of it."""

OFF_HABIT = "starts_at_shortest"
"""FasterTransformer runs prompts of different lengths whole. The baseline is faster so."""


def request_level(case: RealCase, batch: int) -> RealSetting:
    """Return the baseline with so many requests in all its micro-batches."""
    own = {
        "policy": "request_level",
        "max_batch_size": str(batch),
        "microbatch_size": str(ceil(batch / case.stages)),
        "without_habits": OFF_HABIT,
    }
    return RealSetting.of({**case.shared, **own}, f"request_level, batch {batch}", batch)


def default_iteration(case: RealCase, size: int) -> RealSetting:
    """Return today's default with another batch size: the bound on the tokens of a step follows from it."""
    own = {"policy": "iteration", "max_batch_size": str(size)}
    tokens = max_batch_tokens(None, device="cpu", policy="iteration", max_batch_size=size)
    text = f"iteration, batch {size}, {tokens} tokens a step"
    return RealSetting.of({**case.shared, **own}, text, min(case.stages * size, case.places))


def baseline_batches(case: RealCase) -> list[int]:
    """Return the batch sizes that are measured: both ends, and those whose latencies are bounds."""
    sizes = batch_sizes(case.most)
    return sorted({sizes[0], sizes[-1], *(sizes[place] for place in _bound_places(len(sizes)))})


def default_sizes(case: RealCase) -> list[int]:
    """Return the batch sizes of default `iteration` that are measured."""
    return sorted({max(1, case.places // case.stages >> power) for power in range(DEFAULT_SIZES)})


def grid_settings(case: RealCase, count: int) -> list[RealSetting]:
    """Return settings that stand beside default `iteration`.

    `iteration` with chunks of half a mean prompt: the bound of the default leaves most prompts of a task whole.
    `rra` with N_D of a mean answer, and of a quarter of it. Each has `count` batch sizes, up to what the memory has
    room for.
    """
    problem = case.problem(inf)
    placed = problem.layouts[0]  # with layers as even as possible
    scenario = problem.scenario(placed)
    found: list[RealSetting] = []
    for name, point in (*_iteration_points(case, count), *_rra_points(case, count)):
        strategy = STRATEGIES[name]
        expected = strategy.estimate(scenario, point, None)
        while not expected.fits and point[0] > 1:
            point = (point[0] - 1, point[1])
            expected = strategy.estimate(scenario, point, None)
        candidate = Candidate(strategy=strategy, placed=placed, scenario=scenario, point=point, expected=expected)
        setting = case.scheduled(PlannedSchedule.of(candidate, None))
        if setting not in found:
            found.append(setting)
    return found


def _iteration_points(case: RealCase, count: int) -> Iterator[tuple[str, Point]]:
    if case.is_encoder_decoder:  # sources always run whole
        return
    chunk = max(bisect_right(CHUNKS, case.workload.prompts.mean / 2) - 1, 0)
    for size in ladder(case.places // case.stages, count):
        yield "iteration", (size, chunk)


def _rra_points(case: RealCase, count: int) -> Iterator[tuple[str, Point]]:
    for share in (1.0, 0.25):
        steps = max(1, round(share * case.workload.outputs.mean))
        phases = max(decode_phases(case.workload, steps).mean_phases, 1.0)
        for batch in ladder(case.places, count):
            yield "rra", (max(1, int(batch / phases)), -steps)


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes of the baseline: multiples of four up to what the memory has room for (section 7.1)."""
    return list(range(BATCH_STEP, most + 1, BATCH_STEP))


def bounds_of(latencies: Mapping[int, float], most: int) -> list[float]:
    """Return the four bounds in seconds: the lowest 10, 30 and 70 % of the baseline's latencies, and infinity.

    Args: latencies: measured ones by batch size, in seconds. Those between two measured sizes lie on a line.
    """
    sizes = sorted(latencies)
    found = sorted(_on_line(size, sizes, latencies) for size in batch_sizes(most))
    return [found[place] for place in _bound_places(len(found))] + [inf]


def _on_line(size: int, sizes: Sequence[int], latencies: Mapping[int, float]) -> float:
    above = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[max(above - 1, 0)], sizes[above]
    if low == high:
        return latencies[low]
    share = (size - low) / (high - low)
    return latencies[low] + share * (latencies[high] - latencies[low])


def _bound_places(count: int) -> list[int]:
    return [max(ceil(share * count) - 1, 0) for share in BOUND_SHARES]


def ladder(top: int, count: int) -> list[int]:
    """Return so many sizes from `top` down to a quarter of it, in equal ratios."""
    if count == 1:
        return [max(1, top)]
    return [max(1, round(top * 0.25 ** (step / (count - 1)))) for step in range(count)]
