"""Checks the plan in force against the lengths of now: the costly part of following, seconds to minutes of one core.

It simulates the plan with the bounds that run, and searches for a better one. `orca up` does it in a process of low
priority, a cluster in a Job. The result is a file between that process and the one that decides (follow.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from orca.core.domain.errors import SettingError
from orca.core.strict_record import read_record_file, record_from_json, record_to_json
from orca.planner.profile.profile import Profile
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.search.device_layouts import DeviceMemory, Shape, group_capacity
from orca.planner.search.goal import PlanGoal
from orca.planner.search.judge import SimulationJudge
from orca.planner.search.plan import Plan, PlannedFigures, PlannedWorkload
from orca.planner.search.planner import Candidate, NothingFits, PlacedLayout, PlanProblem
from orca.planner.search.profiled_problem import HOST_US, find_plan, model_len_of, profiled_problem
from orca.planner.search.strategies import STRATEGIES
from orca.planner.workload.workload import Workload
from orca.pool.measured import ANSWERS_MIN

VERSION = 1
"""Rises when the meaning or the fields of a check change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The resources and choices that a plan may use (profiled_problem.profiled_problem)."""

    devices: int  # of a group
    shape: Shape
    memory: DeviceMemory
    max_model_len: int | None = None
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    max_batch_size: int | None = None  # requests in a batch, under rra in a micro-batch; None: as the slots hold
    host_us: float = HOST_US
    prefetch: int = 1
    groups: int = 1  # that share the machine of the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """The result of a check."""

    version: int
    workload: PlannedWorkload  # the lengths that it is about
    current: PlannedFigures | None  # of the plan in force; null: there is none, or it cannot serve these lengths
    is_met: bool  # the plan in force meets the goal without its margin on these lengths; false without one
    best: Plan | None  # the best plan for these lengths; null: none was searched, or nothing fits
    complaint: str  # why there are no figures or no best plan; empty if nothing is missing

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version is {self.version}, this release reads {VERSION}")

    @property
    def is_trusted(self) -> bool:
        """True if a plan may be put in force on these lengths: they are stated, or of enough answers."""
        return self.workload.answers == 0 or self.workload.answers >= ANSWERS_MIN


def check_plan(
    profile: Profile,
    workload: Workload,
    goal: PlanGoal,
    limits: PlanLimits,
    plan: Plan | None,
    *,
    is_searching: bool = True,
    report: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    seed: int = 0,
) -> PlanCheck:
    """Simulate the plan in force on these lengths, and search for the best one.

    Args:
        workload: the lengths of now.
        plan: the one in force; None if there is none yet.
        is_searching: false if nobody would use another plan.
        report: called with a line of progress now and then.
        seed: of the simulated requests.
    Raises: SettingError if the model does not allow the workload, or if the limits allow no layout.
    """
    problem = limited_problem(profile, workload, goal, limits)
    complaints: list[str] = []
    current: PlannedFigures | None = None
    if plan is not None:
        try:
            current = _simulate(profile, problem, limits, plan, seed)
        except SettingError as error:
            complaints.append(f"the plan in force cannot be simulated: {error}")
    best: Plan | None = None
    if is_searching:
        try:
            best = find_plan(problem, profile, report, seed=seed)[1]
        except NothingFits as error:
            complaints.append(str(error))
    return PlanCheck(
        version=VERSION,
        workload=PlannedWorkload.of(problem.workload),
        current=current,
        # The margin is for new plans: one that ends at its bound would break it by the smallest change of lengths.
        is_met=current is not None and current.pressure(replace(goal, margin_percent=0.0)) <= 1.0,
        best=best,
        complaint="; ".join(complaints),
    )


def limited_problem(profile: Profile, workload: Workload, goal: PlanGoal, limits: PlanLimits) -> PlanProblem:
    """Return the problem of finding a plan within limits. Raises: see `profiled_problem`."""
    return profiled_problem(
        profile,
        workload,
        goal,
        devices=limits.devices,
        shape=limits.shape,
        memory=limits.memory,
        max_model_len=limits.max_model_len,
        strategies=limits.strategies,
        max_batch_size=limits.max_batch_size,
        host_us=limits.host_us,
        prefetch=limits.prefetch,
        groups=limits.groups,
    )


def _simulate(profile: Profile, problem: PlanProblem, limits: PlanLimits, plan: Plan, seed: int) -> PlannedFigures:
    """Return the figures of a plan as it runs. Raises: SettingError if it cannot serve the workload, or not here."""
    schedule, layout = plan.schedule, plan.schedule.layout
    plan.check_model(profile.key)
    if schedule.ranks not in profile.key.ranks:
        raise SettingError(f"the profile has no times for {schedule.ranks} ranks")
    memory = limits.memory if schedule.slots is None else DeviceMemory(slots=schedule.slots)
    capacity = group_capacity(profile, layout, memory, model_len_of(profile.key, limits.max_model_len))
    if capacity is None:
        raise SettingError(f"the layout {layout} has no room for KV slots")
    costs = stage_costs(profile, layout.layers, layout.ranks, groups=limits.groups)
    placed = PlacedLayout(layout=layout, costs=costs, capacity=capacity)
    scenario = problem.scenario(placed)
    strategy, bounds = STRATEGIES[schedule.policy], schedule.bounds.bounds()
    point = strategy.point_of(bounds)
    candidate = Candidate(
        strategy=strategy,
        placed=placed,
        scenario=scenario,
        point=point,
        expected=strategy.estimate(scenario, point, problem.goal.rate),
        running=bounds,
    )
    figures = SimulationJudge.confirming(problem.goal, seed)(candidate)
    if figures is None:
        raise SettingError("it has no steady state on these lengths")
    return PlannedFigures.of(figures, figures.throughput)


def check_to_json(check: PlanCheck) -> bytes:
    """Return the file of a check."""
    return record_to_json(check)


def check_from_json(text: bytes, name: str) -> PlanCheck:
    """Read a check. Args: name: of the file, for errors. Raises: SettingError that names the field that is wrong."""
    return record_from_json(PlanCheck, text, f"check {name}")


def read_check(file: Path) -> PlanCheck:
    """Read the file of a check. Raises: SettingError if it cannot be read, or has a wrong field."""
    return read_record_file(PlanCheck, file, "check")
