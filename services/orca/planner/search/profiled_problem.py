"""The way from a profile to a plan, which `orca plan` and `orca up` share."""

from collections.abc import Callable, Sequence
from importlib.metadata import version

from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import Profile, ProfileKey
from orca.planner.search.device_layouts import DeviceMemory, Shape, profiled_layouts
from orca.planner.search.fewest_devices import fewest_devices
from orca.planner.search.goal import PlanGoal
from orca.planner.search.judge import SimulationJudge
from orca.planner.search.plan import Plan, PlannedDevice
from orca.planner.search.planner import Outcome, PlacedLayout, PlanProblem, make_plan
from orca.planner.search.strategies import STRATEGIES, BatchLimit
from orca.planner.workload.counted import cut_bins
from orca.planner.workload.workload import Workload

HOST_US = 1000.0
"""Microseconds from a result to the next step at stage 0, unless a user states them."""


def profiled_problem(
    profile: Profile,
    workload: Workload,
    goal: PlanGoal,
    *,
    devices: int,
    shape: Shape,
    memory: DeviceMemory,
    max_model_len: int | None = None,
    strategies: Sequence[str] = tuple(STRATEGIES),
    max_batch_size: int | None = None,
    host_us: float = HOST_US,
    prefetch: int = 1,
    groups: int = 1,
) -> PlanProblem:
    """Return the problem of finding a plan for a profiled model.

    Args:
        devices: most devices that a group may have.
        max_model_len: longest prompt and output together, if that is less than the model's own.
        strategies: names of those to search.
        max_batch_size: most requests in a batch, under rra in a micro-batch; None: as many as the slots hold.
        groups: number of groups that share the machine of the profile; the problem is that of one.
    Raises: SettingError for a workload that the model does not allow, or if no layout is possible.
    """
    key = profile.key
    model_len = model_len_of(key, max_model_len)
    workload = fitting_model(workload, key, max_model_len)
    if devices > key.devices and key.device == "cpu":
        raise SettingError(
            f"setting devices: {devices} ranks would run at the same time, and the profile was measured with"
            f" {key.devices}: measure again with `orca profile --devices {devices}`"
        )

    def layouts_on(most: int, *, at_least: int = 1) -> list[PlacedLayout]:
        return profiled_layouts(
            profile,
            workload,
            devices=most,
            shape=shape,
            memory=memory,
            max_model_len=model_len,
            at_least=at_least,
            groups=groups,
        )

    def wider(count: int) -> list[PlacedLayout]:
        try:
            return layouts_on(count, at_least=count)
        except SettingError:  # what is fixed allows no layout on so many
            return []

    return PlanProblem(
        workload=workload,
        goal=goal,
        layouts=layouts_on(devices),
        wider=wider,
        strategies=[
            STRATEGIES[name] if max_batch_size is None else BatchLimit(STRATEGIES[name], max_batch_size)
            for name in strategies
        ],
        host_us=host_us,
        prefetch=prefetch,
        is_encoder_decoder=len(key.stacks) > 1,
    )


def model_len_of(key: ProfileKey, max_model_len: int | None) -> int:
    """Return the longest prompt and output together. Args: max_model_len: if that is less than the model's own."""
    return min(max_model_len or key.max_model_len, key.max_model_len)


def fitting_model(workload: Workload, key: ProfileKey, max_model_len: int | None) -> Workload:
    """Return the workload as `fitting` does. Args: max_model_len: if that is less than the model's own."""
    return fitting(workload, model_len_of(key, max_model_len), is_encoder_decoder=len(key.stacks) > 1)


def fitting(workload: Workload, max_model_len: int, *, is_encoder_decoder: bool) -> Workload:
    """Return the workload, its counted bins cut at what the model allows. Raises: SettingError if it is too long."""
    if workload.answers:
        workload = cut_bins(workload, max_model_len - is_encoder_decoder)
    workload.check_fits(max_model_len, is_encoder_decoder=is_encoder_decoder)
    return workload


def find_plan(
    problem: PlanProblem, profile: Profile, report: Callable[[str], None], *, seed: int = 0
) -> tuple[Outcome, Plan]:
    """Find the plan by formulas and by simulation.

    Args:
        report: called with a line of progress now and then.
        seed: of the simulated requests.
    Raises: NothingFits if no layout can hold the requests.
    """
    judge = SimulationJudge(goal=problem.goal, seed=seed)
    confirm = SimulationJudge.confirming(problem.goal, seed)
    outcome = make_plan(problem, judge, report, confirm=confirm)
    fewest = None
    if not outcome.is_met and problem.wider is not None:
        report("no schedule meets the goal: how many devices would?")
        fewest = fewest_devices(problem, problem.wider, confirm, above=devices_of(problem.layouts))
    plan = Plan.of(
        outcome,
        problem.goal,
        problem.workload,
        device=PlannedDevice(key=profile.key),
        release=version("orca-serving"),
        fewest_devices=fewest,
    )
    return outcome, plan


def devices_of(layouts: Sequence[PlacedLayout]) -> int:
    """Return the most devices that a layout uses."""
    return max(each.layout.stages * each.layout.ranks for each in layouts)
