"""A model and a task on some devices, and the plans for them.

All settings have the same layout, the same memory and the same model length (survey.py has those that are measured).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path

from orca.bench.plan.real.setting import RealSetting
from orca.bench.plan.simulate_runs import SCALE
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed, slots_of_any_split
from orca.planner.profile.profile import Profile
from orca.planner.search.device_layouts import DeviceMemory, Shape
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan, PlannedSchedule
from orca.planner.search.planner import PlanProblem
from orca.planner.search.profiled_problem import find_plan, profiled_problem
from orca.planner.workload.tasks import task_workload
from orca.planner.workload.workload import Workload

PERCENT = 99


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
