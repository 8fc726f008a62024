"""A model and a task on some devices: the settings that are measured, and the plans.

All settings have the same layout, the same memory and the same model length. The baseline is `request_level` with the
habits of FasterTransformer (exegpt/faster_transformer.py), divided into as many micro-batches as stages.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from pathlib import Path

from orca.bench.exegpt.faster_transformer import BATCH_STEP, BOUND_SHARES
from orca.bench.plan.real.setting import RealSetting
from orca.bench.plan.simulate_runs import SCALE
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed, slots_of_any_split
from orca.core.domain.step_tokens import max_batch_tokens
from orca.planner.profile.profile import Profile
from orca.planner.search.branch_and_bound import Point
from orca.planner.search.device_layouts import DeviceMemory, Shape
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan, PlannedSchedule
from orca.planner.search.planner import Candidate, PlanProblem
from orca.planner.search.profiled_problem import find_plan, profiled_problem
from orca.planner.search.strategies import CHUNKS, STRATEGIES
from orca.planner.simulate.rra_phases import decode_phases
from orca.planner.workload.tasks import task_workload
from orca.planner.workload.workload import Workload

PERCENT = 99

DEFAULT_SIZES = 4
"""Batch sizes of default `iteration`: the largest that the memory has room for, and each time half of it."""

OFF_HABIT = "starts_at_shortest"
"""FasterTransformer runs prompts of different lengths whole. The baseline is faster so."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RealCase:
    """One model with one task."""

    model: Path
    profile: Profile
    task: str
    stages: int
    ranks: int  # of each stage
    most: int  # requests of the largest length that the memory has room for
    margin_percent: float = 0.0  # of the plans' bounds

    @property
    def name(self) -> str:
        return self.model.name

    @cached_property
    def workload(self) -> Workload:
        return task_workload(self.task, SCALE)

    @property
    def is_encoder_decoder(self) -> bool:
        return len(self.profile.key.stacks) > 1

    @property
    def max_model_len(self) -> int:
        return self.workload.longest + self.is_encoder_decoder

    @property
    def slots(self) -> int:
        """Return the KV slots of the group."""
        needed = slots_of_any_split if self.is_encoder_decoder else slots_needed
        return self.most * needed(self.max_model_len, DEFAULT_BLOCK_TOKENS)

    @cached_property
    def places(self) -> int:
        """The requests of mean length that the memory has room for. Only the baseline reserves the largest length."""
        problem = self.problem(inf)
        return problem.scenario(problem.layouts[0]).places

    @property
    def shared(self) -> Mapping[str, str]:
        """Return the options of `orca up` that all settings have."""
        values = {
            "stages": self.stages,
            "tensor": self.ranks,
            "threads": self.profile.key.threads,
            "slots": self.slots,
            "max_model_len": self.max_model_len,
            "prefetch": 1,
        }
        return {name: str(value) for name, value in values.items()}

    def problem(self, latency_s: float) -> PlanProblem:
        """Return the problem of a plan with this bound. Raises: SettingError if there is no such layout."""
        return profiled_problem(
            self.profile,
            self.workload,
            PlanGoal(latency_ms=1000 * latency_s, percentile=PERCENT, margin_percent=self.margin_percent),
            devices=self.stages * self.ranks,
            shape=Shape(stages=self.stages, ranks=self.ranks),
            memory=DeviceMemory(slots=self.slots),
            max_model_len=self.max_model_len,
        )

    def plan(self, latency_s: float, report: Callable[[str], None]) -> Plan:
        """Return the plan for a bound. Raises: NothingFits, SettingError."""
        return find_plan(self.problem(latency_s), self.profile, report)[1]

    def planned(self, plan: Plan) -> RealSetting:
        """Return the setting that runs a plan."""
        return self.scheduled(plan.schedule)

    def scheduled(self, schedule: PlannedSchedule) -> RealSetting:
        """Return the setting that runs a schedule of the planner."""
        bounds = schedule.bounds
        held = schedule.stages * bounds.max_batch_size
        if bounds.decode_batch is not None and bounds.encode_batch is not None:
            held = bounds.decode_batch + bounds.encode_batch
        return RealSetting.of({**self.shared, **schedule.flags()}, schedule.describe(), min(held, self.places))

    # The baselines.

    def request_level(self, batch: int) -> RealSetting:
        """Return the baseline with so many requests in all its micro-batches."""
        own = {
            "policy": "request_level",
            "max_batch_size": str(batch),
            "microbatch_size": str(ceil(batch / self.stages)),
            "without_habits": OFF_HABIT,
        }
        return RealSetting.of({**self.shared, **own}, f"request_level, batch {batch}", batch)

    def default_iteration(self, size: int) -> RealSetting:
        """Return today's default with another batch size: the bound on the tokens of a step follows from it."""
        own = {"policy": "iteration", "max_batch_size": str(size)}
        tokens = max_batch_tokens(None, device="cpu", policy="iteration", max_batch_size=size)
        text = f"iteration, batch {size}, {tokens} tokens a step"
        return RealSetting.of({**self.shared, **own}, text, min(self.stages * size, self.places))

    def baseline_batches(self) -> list[int]:
        """Return the batch sizes that are measured: both ends, and those whose latencies are bounds."""
        sizes = batch_sizes(self.most)
        return sorted({sizes[0], sizes[-1], *(sizes[place] for place in _bound_places(len(sizes)))})

    def default_sizes(self) -> list[int]:
        """Return the batch sizes of default `iteration` that are measured."""
        return sorted({max(1, self.places // self.stages >> power) for power in range(DEFAULT_SIZES)})

    # The grid.

    def grid(self, count: int) -> list[RealSetting]:
        """Return settings that stand beside default `iteration`.

        `iteration` with chunks of half a mean prompt: the bound of the default leaves most prompts of a task whole.
        `rra` with N_D of a mean answer, and of a quarter of it. Each has `count` batch sizes, up to what the memory has
        room for.
        """
        problem = self.problem(inf)
        placed = problem.layouts[0]  # with layers as even as possible
        scenario = problem.scenario(placed)
        found: list[RealSetting] = []
        for name, point in (*self._iteration_points(count), *self._rra_points(count)):
            strategy = STRATEGIES[name]
            expected = strategy.estimate(scenario, point, None)
            while not expected.fits and point[0] > 1:
                point = (point[0] - 1, point[1])
                expected = strategy.estimate(scenario, point, None)
            candidate = Candidate(strategy=strategy, placed=placed, scenario=scenario, point=point, expected=expected)
            setting = self.scheduled(PlannedSchedule.of(candidate, None))
            if setting not in found:
                found.append(setting)
        return found

    def _iteration_points(self, count: int) -> Iterator[tuple[str, Point]]:
        if self.is_encoder_decoder:  # sources always run whole
            return
        chunk = max(bisect_right(CHUNKS, self.workload.prompts.mean / 2) - 1, 0)
        for size in ladder(self.places // self.stages, count):
            yield "iteration", (size, chunk)

    def _rra_points(self, count: int) -> Iterator[tuple[str, Point]]:
        for share in (1.0, 0.25):
            steps = max(1, round(share * self.workload.outputs.mean))
            phases = max(decode_phases(self.workload, steps).mean_phases, 1.0)
            for batch in ladder(self.places, count):
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
