"""The strategies that a plan may choose, each with its control variables, for branch and bound.

A strategy turns a point of its space into controls. Each variable is oriented so that a larger value means more
throughput and more latency (ExeGPT, section 5.1). A value of the decode steps N_D is therefore counted backwards.

Two more strategies of the paper have their place here: `waa-c` and `waa-m` (section 4.1), with the variables B_E,
number of decode micro-batches, and number of devices with tensor parallelism (section 4.2). A new strategy implements
`Strategy` and joins `STRATEGIES`; search, judgement and plan stay as they are.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from types import MappingProxyType
from typing import Protocol

from orca.planner.search.branch_and_bound import Point, SearchBlock
from orca.planner.simulate.estimate import Estimate, Scenario
from orca.planner.simulate.iteration import estimate_iteration
from orca.planner.simulate.rra import estimate_rra
from orca.planner.workload.workload import Workload
from orca.scheduler.policy.cycle import DEFAULT_THRESHOLD_PERCENT, CycleControls
from orca.scheduler.policy.policy import BatchBounds

CHUNKS = tuple(sorted(size << power for size in (16, 24) for power in range(14)))
"""Tokens that a step may have for prompts, beside one for each request of the batch: 16, 24, 32, 48, ..."""

COMMON_DEVIATIONS = 1.65
"""Standard deviations above the mean that 95 of 100 encode batches stay within."""

BATCH_MAX = 1024
"""Largest batch that is considered, in requests: larger ones have all throughput of a device that decodes."""


class Strategy(Protocol):
    """A way to make batches, with control variables."""

    @property
    def name(self) -> str:
        """Return the name of the scheduler's policy."""
        ...

    def spaces(self, scenario: Scenario, most: int) -> Sequence[SearchBlock]:
        """Return all points, as spaces in each of which all variables are monotone. Each is searched by itself.

        Args: most: requests that the slots of the group can hold at a time.
        """
        ...

    def estimate(self, scenario: Scenario, point: Point, rate: float | None) -> Estimate:
        """Return the expected values of a point. Args: rate: requests per second; None: as many as can be served."""
        ...

    def bounds(self, scenario: Scenario, point: Point, expected: Estimate) -> BatchBounds:
        """Return the point as the bounds of a scheduler."""
        ...

    def point_of(self, bounds: BatchBounds) -> Point:
        """Return the point whose bounds these are, or the nearest one."""
        ...

    def controls(self, point: Point) -> Mapping[str, int]:
        """Return the control variables by the names that users know. What is off is left out."""
        ...


@dataclass(frozen=True, slots=True)
class IterationStrategy:
    """Iteration-level scheduling. Variables: requests in a batch, and the chunk, one of CHUNKS or none.

    A chunk is not monotone: a small one makes a prompt take many steps, and a large one makes steps of unequal length,
    for which other stages wait. So each chunk has a space of its own, as each degree of tensor parallelism has in the
    paper (section 5.1).
    """

    @property
    def name(self) -> str:
        return "iteration"

    def spaces(self, scenario: Scenario, most: int) -> Sequence[SearchBlock]:
        # Sources of an encoder-decoder model always run whole.
        chunks = 0 if scenario.is_encoder_decoder else bisect_left(CHUNKS, scenario.workload.prompts.high)
        size = max(1, min(most // scenario.stages, BATCH_MAX))
        return [SearchBlock((1, chunk), (size, chunk)) for chunk in (WHOLE, *range(chunks))]

    def estimate(self, scenario: Scenario, point: Point, rate: float | None) -> Estimate:
        bounds = _iteration_bounds(point)
        return estimate_iteration(scenario, bounds.max_batch_size, bounds.max_batch_tokens, rate=rate)

    def bounds(self, scenario: Scenario, point: Point, expected: Estimate) -> BatchBounds:  # noqa: ARG002
        return _iteration_bounds(point)

    def point_of(self, bounds: BatchBounds) -> Point:
        size, tokens = bounds.max_batch_size, bounds.max_batch_tokens
        chunk = WHOLE if tokens is None else min(bisect_left(CHUNKS, tokens - size), len(CHUNKS) - 1)
        return size, chunk

    def controls(self, point: Point) -> Mapping[str, int]:
        bounds = _iteration_bounds(point)
        found = {"max_batch_size": bounds.max_batch_size}
        return found if bounds.max_batch_tokens is None else found | {"max_batch_tokens": bounds.max_batch_tokens}


WHOLE = -1
"""The value of a chunk variable that runs prompts whole."""


def _iteration_bounds(point: Point) -> BatchBounds:
    size, chunk = point
    return BatchBounds(max_batch_size=size, max_batch_tokens=None if chunk == WHOLE else size + CHUNKS[chunk])


@dataclass(frozen=True, slots=True)
class RoundRobinStrategy:
    """Round-robin allocation. Variables: encode batch B_E, and decode steps N_D, which count backwards."""

    @property
    def name(self) -> str:
        return "rra"

    def spaces(self, scenario: Scenario, most: int) -> Sequence[SearchBlock]:
        # An answer of s tokens decodes s - 1 times. With more decode steps than that, nothing runs in the last ones.
        steps = max(1, scenario.workload.outputs.high - 1)
        return [SearchBlock((1, -steps), (max(1, min(most, BATCH_MAX)), -1))]

    def estimate(self, scenario: Scenario, point: Point, rate: float | None) -> Estimate:
        return estimate_rra(scenario, point[0], -point[1], rate=rate)

    def bounds(self, scenario: Scenario, point: Point, expected: Estimate) -> BatchBounds:
        # The adjustment (5.2) is for a group under load. At a lower arrival rate it must not hold requests back.
        full = expected if expected.throughput == expected.capacity else self.estimate(scenario, point, None)
        encode_batch = point[0]
        decode_batch = max(round(full.decode_batch), encode_batch)
        threshold = threshold_percent(scenario.workload, encode_batch)
        most = decode_batch * (1 + threshold / 100) + encode_batch
        return BatchBounds(
            max_batch_size=max(1, ceil(most / scenario.stages)),
            cycle=CycleControls(
                encode_batch=encode_batch,
                decode_steps=-point[1],
                decode_batch=decode_batch,
                encode_tokens=max(1, round(encode_batch * scenario.workload.prompts.mean)),
                threshold_percent=threshold,
            ),
        )

    def point_of(self, bounds: BatchBounds) -> Point:
        assert bounds.cycle is not None, "bounds of rra have the controls of its cycle"
        return bounds.cycle.encode_batch, -bounds.cycle.decode_steps

    def controls(self, point: Point) -> Mapping[str, int]:
        return {"encode_batch": point[0], "decode_steps": -point[1]}


def threshold_percent(workload: Workload, encode_batch: int) -> int:
    """Return the default threshold, or more where the prompts of a small encode batch vary more by chance."""
    prompts = workload.prompts
    by_chance = 100 * COMMON_DEVIATIONS * prompts.deviation / prompts.mean / sqrt(encode_batch)
    return min(max(DEFAULT_THRESHOLD_PERCENT, ceil(by_chance)), 100)


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """A strategy whose batches have at most so many requests. A point with larger ones does not fit."""

    strategy: Strategy
    most: int  # requests in a batch; under rra, in a micro-batch

    @property
    def name(self) -> str:
        return self.strategy.name

    def spaces(self, scenario: Scenario, most: int) -> Sequence[SearchBlock]:
        return self.strategy.spaces(scenario, min(most, self.most * scenario.stages))

    def estimate(self, scenario: Scenario, point: Point, rate: float | None) -> Estimate:
        found = self.strategy.estimate(scenario, point, rate)
        if self.strategy.bounds(scenario, point, found).max_batch_size <= self.most:
            return found
        return replace(found, fits=False)

    def bounds(self, scenario: Scenario, point: Point, expected: Estimate) -> BatchBounds:
        return self.strategy.bounds(scenario, point, expected)

    def point_of(self, bounds: BatchBounds) -> Point:
        return self.strategy.point_of(bounds)

    def controls(self, point: Point) -> Mapping[str, int]:
        return self.strategy.controls(point)


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {strategy.name: strategy for strategy in (IterationStrategy(), RoundRobinStrategy())}
)
"""Strategies by the name of their policy."""
