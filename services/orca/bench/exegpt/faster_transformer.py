"""FasterTransformer, the paper's baseline: the policy `request_level` by formulas, and its latency bounds.

Source: ExeGPT, section 7.1.

A batch is divided into as many micro-batches as stages and stays the same until its longest answer ends. The layout has
as much tensor parallelism as a node allows, and a stage for each node. Prompts run whole in the first iteration. With
the habit `starts_at_shortest` only as many tokens of each prompt do as the shortest one has (ORCA, section 6.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from statistics import fmean

from orca.bench.exegpt.setups import Setup
from orca.core.domain.engine import EngineShape
from orca.core.domain.request import reserved_slots
from orca.planner.profile.step_shape import LikeRows
from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.expected_steps import expected_step, stage_times, whole_prompts
from orca.planner.simulate.outcomes import summarise
from orca.planner.simulate.simulated_run import Simulation
from orca.planner.workload.trace import TraceSpec, generate
from orca.planner.workload.workload import Workload
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy

HABITS = Habits.without(["starts_at_shortest"])
"""FasterTransformer at the time of the paper runs prompts of different lengths whole."""

BATCH_STEP = 4
"""Batch sizes are multiples of four (section 7.1)."""

BOUND_SHARES = (0.1, 0.3, 0.7)
"""The bounds are these shares of the latencies, the lowest ones first, and a last one is infinite."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The figures of one batch size."""

    batch: int  # requests of all micro-batches
    latency_s: float  # of an answer of the maximum length, which the bound holds for
    percentile_s: float  # of an answer of the percentile length
    throughput: float  # requests per second


@dataclass(frozen=True, eq=False)
class FasterTransformer:
    """The baseline in one setting."""

    setup: Setup
    workload: Workload
    habits: Habits = HABITS
    has_percentile_bounds: bool = False  # bounds are selected from latencies of the percentile length, not the maximum

    @cached_property
    def scenario(self) -> Scenario:
        return self.setup.scenario(self.setup.largest_degree, self.workload)

    @cached_property
    def points(self) -> Sequence[BatchPoint]:
        """The figures of every batch size that memory for the full length of each request allows."""
        return [self.point(batch) for batch in range(BATCH_STEP, self.batch_max + 1, BATCH_STEP)]

    @property
    def batch_max(self) -> int:
        """Return the most requests of a batch, each with slots for the longest prompt and the longest answer."""
        return self.scenario.capacity.slots // self.request_slots

    @property
    def request_slots(self) -> int:
        target = self.workload.longest + self.setup.is_encoder_decoder
        sources = self.workload.prompts.high if self.setup.is_encoder_decoder else 0
        return reserved_slots(target, sources, self.scenario.capacity.block_tokens)

    def point(self, batch: int) -> BatchPoint:
        """Return the expected values of a batch size."""
        outputs, prompts = self.workload.outputs, self.workload.prompts
        ahead = prompts.high - self.shortest(batch) if self.is_serial else 0.0
        return BatchPoint(
            batch=batch,
            latency_s=self._batch_us(batch, outputs.high + ahead) / 1e6,
            percentile_s=self._batch_us(batch, self.scenario.length + ahead) / 1e6,
            throughput=batch / self._batch_us(batch, self.iterations(batch)) * 1e6,
        )

    @property
    def is_serial(self) -> bool:
        """Return true if prompts run token by token after the first iteration. Sources always run whole."""
        return self.habits.starts_at_shortest and not self.setup.is_encoder_decoder

    def iterations(self, batch: int) -> float:
        """Return the expected iterations until the last request of a batch ends."""
        if not self.is_serial:
            outputs = self.workload.outputs
            return expected_largest(list(zip(outputs.lengths, outputs.shares, strict=True)), batch)
        return expected_largest([(total, 1 / len(self._totals)) for total in self._totals], batch) - self.shortest(
            batch
        )

    def shortest(self, batch: int) -> float:
        """Return the expected shortest prompt of a batch."""
        prompts = self.workload.prompts
        mirrored = [(-length, share) for length, share in zip(prompts.lengths, prompts.shares, strict=True)]
        return -expected_largest(mirrored[::-1], batch)

    @cached_property
    def _totals(self) -> Sequence[int]:
        """The tokens of prompt and answer together of requests that represent the workload, rising."""
        return sorted(prompt + output for prompt, output in self.workload.pairs)

    def bounds(self) -> list[float]:
        """Return the four latency bounds in seconds; the last one is infinite."""
        points = self.points
        latencies = sorted(point.percentile_s if self.has_percentile_bounds else point.latency_s for point in points)
        return [latencies[max(ceil(share * len(latencies)) - 1, 0)] for share in BOUND_SHARES] + [inf]

    def best(self, bound_s: float) -> BatchPoint | None:
        """Return the batch size with the most throughput within a bound; None if there is none."""
        meeting = [point for point in self.points if point.latency_s <= bound_s]
        return max(meeting, key=lambda point: point.throughput, default=None)

    def simulated(self, batch: int, *, requests: int = 240, seed: int = 0) -> float:
        """Return the requests per second of the real policy on simulated stages.

        Args: requests: how many run at least, in three whole batches or more.
        """
        scenario = self.scenario
        size = self._microbatch(batch)[0]
        simulation = Simulation(
            shape=EngineShape(
                stages=scenario.stages,
                slots=scenario.capacity.slots,
                block_tokens=scenario.capacity.block_tokens,
                max_model_len=scenario.capacity.max_model_len,
            ),
            cost=scenario.costs,
            prefetch=scenario.prefetch,
            is_encoder_decoder=scenario.is_encoder_decoder,
            baseline=RequestLevelPolicy(microbatch_size=size, habits=self.habits),
        )
        trace = generate(
            TraceSpec.of_workload(self.workload, requests=batch * max(ceil(requests / batch), 3), seed=seed)
        )
        return summarise(simulation.run("request_level", batch, trace)).requests_per_s

    def _microbatch(self, batch: int) -> tuple[int, int]:
        """Return the requests of a micro-batch, and how many micro-batches there are."""
        size = ceil(batch / self.scenario.stages)
        return size, ceil(batch / size)

    def _batch_us(self, batch: int, iterations: float) -> float:
        """Return the time of a batch that runs so many iterations. All of its requests run until then.

        The time of an iteration is linear in the context, so the mean context stands for all iterations.
        """
        scenario, workload = self.scenario, self.workload
        count = self._microbatch(batch)[1]
        size = batch / count
        if self.is_serial:
            read_prompt = self.shortest(batch)
            rows: tuple[LikeRows, ...] = (LikeRows(size, read_prompt),)
            read = fmean(_mean_read(total - read_prompt, iterations) for total in self._totals)
        else:
            read_prompt = workload.prompts.mean
            rows = whole_prompts(scenario, size)
            # An ended request reads its own answer only.
            read = workload.outputs.expect(lambda length: _mean_read(length, iterations))
        first = stage_times(scenario.costs, expected_step(scenario, entering=rows, first_tokens=size))
        decoding = expected_step(scenario, increments=size, generated=read, read_prompt=read_prompt)
        times = stage_times(scenario.costs, decoding)
        first_us = sum(first) + (count - 1) * max(first)
        return first_us + (iterations - 1) * max(sum(times), count * max(times))


def expected_largest(shares: Sequence[tuple[int, float]], count: int) -> float:
    """Return the expected largest of so many independent lengths. Args: shares: of lengths, which rise."""
    expected = below = cumulative = 0.0
    for length, share in shares:
        cumulative = min(cumulative + share, 1.0)
        at_most = cumulative**count
        expected += length * (at_most - below)
        below = at_most
    return expected


def _mean_read(length: float, output: float) -> float:
    """Return how many tokens of an answer are read in an iteration on average, until `output` tokens are drawn."""
    if length >= output:
        return (output + 1) / 2
    return (length * (length + 1) / 2 + (output - length) * length) / output
