"""The expected values of a schedule, and all that they are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from orca.core.domain.request import reserved_slots
from orca.planner.profile.step_shape import ShapeCost
from orca.planner.simulate.layout import GroupCapacity
from orca.planner.workload.workload import Workload


@dataclass(frozen=True, eq=False, kw_only=True)
class Scenario:
    """The requests, the stages that serve them, and the wanted percentile. Schedules vary, a scenario does not."""

    workload: Workload
    costs: Sequence[ShapeCost]  # one for each stage, stage 0 first; stages of the same time may share one
    capacity: GroupCapacity
    host_us: float = 0.0  # of a result's way to the scheduler and of the next step's way back
    prefetch: int = 1  # 1 hides the host time as far as a step is longer than it
    is_encoder_decoder: bool = False  # prompts are sources, and each target begins with one start token
    percent: float = 99  # the wanted percentile

    def __post_init__(self) -> None:
        if not self.costs:
            raise ValueError("a pipeline has at least one stage")
        if not 0 < self.percent < 100:
            raise ValueError(f"a percentile is above 0 and below 100, not {self.percent}")
        if self.prefetch not in (0, 1):
            raise ValueError(f"prefetch is 0 or 1, not {self.prefetch}")

    @property
    def stages(self) -> int:
        return len(self.costs)

    @cached_property
    def length(self) -> int:
        """The output tokens of the percentile length."""
        return self.workload.outputs.percentile(self.percent)

    @cached_property
    def places(self) -> int:
        """The requests that the slots of the group can hold at a time on average, at least one."""
        return max(1, int(self.capacity.slots / fmean(slots for _, slots in self.pair_slots)))

    @cached_property
    def pair_slots(self) -> tuple[tuple[int, int], ...]:
        """Output tokens and reserved slots of the requests that represent the workload (`Workload.pairs`)."""
        block_tokens, start = self.capacity.block_tokens, int(self.is_encoder_decoder)
        return tuple(
            (output, reserved_slots(prompt + start + output, prompt * start, block_tokens))
            for prompt, output in self.workload.pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Expected values of one schedule in the steady state. Latencies are those of the wanted percentile."""

    throughput: float  # requests per second that are served; the arrival rate if there is one and it can be served
    capacity: float  # requests per second that could be served
    tokens_per_s: float  # generated ones
    latency_s: float  # first step to last token of the percentile length, or submission to last token at a rate
    ttft_s: float  # to the first token, from the same begin
    tpot_s: float  # between two tokens of an answer on average
    decode_batch: float  # requests in a decode iteration; under rra at the start of a phase (B_D)
    cycle_s: float  # under rra from one encode iteration to the next; under iteration from step to step of a request
    bubbles: float  # share of the time in which the slowest stage waits
    slots_needed: int  # KV slots of the requests in flight, with a margin for their spread
    fits: bool  # the group has so many slots; otherwise all figures are those of a larger group
    details: dict[str, float] = field(default_factory=dict)  # further expected values, by name
