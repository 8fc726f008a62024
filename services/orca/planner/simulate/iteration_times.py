"""The times of a request under `iteration`, for a number of requests in flight."""

from dataclasses import dataclass
from math import sqrt

from orca.planner.simulate.estimate import Scenario
from orca.planner.simulate.queues.arrivals import length_points
from orca.planner.simulate.queues.prompt_queue import BatchMembers, batch_members
from orca.planner.simulate.step_mix import MixedSteps, mixed_steps
from orca.planner.workload.percentiles import weighted_percentile

DEVIATIONS = (-1.465, -0.792, -0.366, 0.0, 0.366, 0.792, 1.465)
"""Normal quantiles of seven equal shares."""


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """The times of one batch size in microseconds."""

    members: BatchMembers
    steps: MixedSteps

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.members.entering / self.steps.period * 1e6

    @property
    def prompt_us(self) -> float:
        """The time from a request's first step to its first token."""
        return self.steps.first * self.members.chunks

    @property
    def prompt_high_us(self) -> float:
        """The percentile of the same: of a long prompt, whose chunks fill their steps but for the last one."""
        chunks = self.members.chunks_high - 1
        return max(self.steps.first_high, self.steps.first + self.steps.first_high * chunks)

    def latency(self, output: int) -> float:
        """Return the time from the first step to the last token of an answer of so many tokens."""
        return self.prompt_us + (output - 1) * self.steps.rotation

    def latency_percentile(self, scenario: Scenario) -> float:
        """Return the percentile over all answers. Steps differ, so answers of the same length do, too."""
        return weighted_percentile(
            (
                (self.latency(length) + deviation * sqrt(length - 1) * self.steps.deviation, share)
                for length, share in length_points(scenario.workload.outputs)
                for deviation in DEVIATIONS
            ),
            scenario.percent,
        )

    def token_percentile(self, scenario: Scenario) -> float:
        """Return the percentile, over all answers, of an answer's mean time between two tokens."""
        points = [
            (self.steps.rotation + deviation * self.steps.deviation / sqrt(length - 1), share)
            for length, share in length_points(scenario.workload.outputs)
            if length > 1
            for deviation in DEVIATIONS
        ]
        return weighted_percentile(points, scenario.percent) if points else 0.0

    def stay(self, output: float) -> float:
        """Return the time from the first claim to the last token: the wait of its prompt for tokens is part of it."""
        waits = self.members.prompt_steps - self.members.chunks
        return self.prompt_us + (output - 1 + waits) * self.steps.rotation


def iteration_times(scenario: Scenario, in_flight: float, batch_tokens: int | None) -> IterationTimes:
    """Return the times with so many requests in flight: fewer than stages leave some of them without a batch."""
    batches = max(min(scenario.stages, round(in_flight)), 1)
    members = batch_members(scenario, in_flight / batches, batch_tokens)
    return IterationTimes(members, mixed_steps(scenario, members, batches))
