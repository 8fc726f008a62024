"""Makes the plan of `orca up --slo-latency-ms` before the parts start, and turns it into options.

Two moves: `read_order` checks all that a user may have got wrong, before anything starts. `plan_start` then measures
the model unless that was done before, and plans. A user's mistake ends the start. If the machine or the pool stands in
the way of a plan, the defaults serve, and a line says why.

settings.py    the options                     profiles.py    profiles of earlier starts
devices.py     chooses the devices (pure)      measuring.py   measures a profile in another process
lengths.py     the lengths to plan for         following.py   follows the plan while the system runs
applying.py    puts another plan in force      checking.py    checks a plan in another process
"""

import asyncio
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from orca.cli.up.display import Display
from orca.cli.up.planned import plan_options
from orca.cli.up.settings import UpSettings
from orca.cli.up.slo.devices import Machine, PlannedDevices, choose_devices, fixed_shape, profiled_devices
from orca.cli.up.slo.lengths import counted_lengths, missing_lengths, read_counts, stated_lengths
from orca.cli.up.slo.measuring import MINUTES, Measure, MeasuringFailed, measure_apart
from orca.cli.up.slo.profiles import find_profile, keep_profile, profile_folder
from orca.core.domain.errors import BadValue, OrcaError, PoolUnavailable, SettingError
from orca.core.domain.model import ModelInfo, count_parameters, load_model_info
from orca.core.process.settings import with_texts
from orca.core.process.whole_file import write_whole
from orca.planner.follow.check import PlanLimits, limited_problem
from orca.planner.profile.measuring.model_key import fewest_heads, profile_key
from orca.planner.profile.profile import Profile, ProfileKey, read_profile
from orca.planner.search.device_layouts import DeviceMemory, Shape
from orca.planner.search.goal import PlanGoal
from orca.planner.search.plan import Plan, to_json
from orca.planner.search.planner import NothingFits
from orca.planner.search.profiled_problem import find_plan
from orca.planner.search.strategies import STRATEGIES
from orca.planner.workload.workload import Workload
from orca.worker.machine import available_processors

PLAN_FILE = "plan.json"
"""The plan of the running system, in its data folder."""

STATE_FILE = "slo.json"
"""The state of following the plan (planner/follow/state.py), in the same folder."""

RECOMMENDED_FILE = "recommended-plan.json"
"""The plan that would be better, and that a person has to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """The order for a plan: what the user wants, and what is fixed."""

    settings: UpSettings
    model: ModelInfo
    goal: PlanGoal
    fixed: Shape
    strategies: tuple[str, ...]
    devices: PlannedDevices
    key: ProfileKey  # of the profile
    profile: Profile | None  # that the user has named; None: find or measure one
    workload: Workload | None  # that the user has stated; None: the counted one


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAccess:
    """The way to the pool of the system that starts."""

    url: str
    login: Mapping[str, str]  # variables that hold the login, beside those of the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The result of planning at the start."""

    settings: UpSettings  # that the system runs with
    plan: Plan | None  # None: the defaults serve
    profile: Profile | None  # None: without one, no plan can be made while the system runs


class NoPlan(OrcaError):
    """No plan can be made; the message says why."""


def read_order(settings: UpSettings, given: Collection[str], model: ModelInfo, gpus: int) -> PlanOrder:
    """Return the order for a plan.

    Args:
        given: the options of the command line, such as `--stages`.
        gpus: number of visible GPUs.
    Raises: SettingError that names the option which is wrong.
    """
    fixed = fixed_shape(settings, given, num_layers=model.num_layers)
    own = load_model_info(model.folder, dtype=model.dtype, quantization=model.quantization)
    named = None if settings.slo_profile is None else _read_named(settings.slo_profile)
    if named is None:
        machine = Machine(
            parameters=count_parameters(model.folder),
            heads=fewest_heads(model.folder),
            processors=available_processors(),
            gpus=gpus,
        )
        devices = choose_devices(settings, fixed, machine)
    else:
        devices = profiled_devices(settings, fixed, named.key)
    key = profile_key(
        own,
        device=settings.device,
        threads=devices.threads,
        ranks=devices.ranks,
        devices=devices.total,
        release=version("orca-serving"),
    )
    if named is not None:
        try:
            named.check_key(key)
        except SettingError as error:
            raise SettingError(f"setting --slo-profile: {settings.slo_profile}: {error}") from error
    return PlanOrder(
        settings=settings,
        model=model,
        goal=settings.slo_goal(),
        fixed=fixed,
        strategies=(settings.policy,) if "--policy" in given else tuple(STRATEGIES),
        devices=devices,
        key=key,
        profile=named,
        workload=stated_lengths(settings, model),
    )


def plan_start(
    order: PlanOrder, pool: PoolAccess, folder: Path, display: Display, measure: Measure = measure_apart
) -> Begun:
    """Make the plan, write it to the data folder, and return it with the settings that run it.

    Returns: the settings without a plan, if none can be made. A line then says why.
    Args:
        folder: the data folder of the system.
        measure: measures a profile.
    Raises: SettingError if what the user has fixed or stated allows no plan.
    """
    file = folder / PLAN_FILE
    for name in (PLAN_FILE, STATE_FILE, RECOMMENDED_FILE):  # of an earlier start
        (folder / name).unlink(missing_ok=True)
    profile: Profile | None = None
    try:
        # A profile first: without lengths, the running system plans when it has counted enough answers.
        profile = order.profile or _profile(order, display, measure)
        workload = order.workload or asyncio.run(_count(order, pool))
        plan = _search(order, profile, workload, display)
        settings = _planned(order.settings, plan)
    except NoPlan as reason:
        display.print_text(f"slo: no plan for {order.goal.describe()}, the defaults serve: {reason}")
        if profile is not None:
            display.print_text("slo: the running system tries again every ten minutes")
        return Begun(settings=_without_plan(order.settings), plan=None, profile=profile)
    write_whole(file, to_json(plan))
    for line in plan_lines(plan, file):
        display.print_text(line)
    return Begun(settings=settings, plan=plan, profile=profile)


def plan_lines(plan: Plan, file: Path) -> list[str]:
    """Return the lines that tell a user about the plan. Args: file: has the plan."""
    lines = [f"slo: {plan.describe()}", f"slo: the plan and its alternatives are in {file}"]
    if not plan.is_met:
        lines.append(f"slo: WARNING: {plan.shortfall()}. The schedule that comes closest runs")
    return lines


def _read_named(file: str) -> Profile:
    try:
        return read_profile(Path(file))
    except SettingError as error:
        raise SettingError(f"setting --slo-profile: {error}") from error


async def _count(order: PlanOrder, pool: PoolAccess) -> Workload:
    """Return the lengths that the pool has counted. Raises: NoPlan if they are too few, or cannot be read."""
    try:
        counts, _ = await read_counts(pool.url, order.model.revision, {**os.environ, **pool.login})
    except (PoolUnavailable, SettingError) as error:
        raise NoPlan(f"the pool does not tell the lengths of answers: {error}") from error
    workload = counted_lengths(counts)
    if workload is None:
        raise NoPlan(missing_lengths(counts))
    return workload


def _profile(order: PlanOrder, display: Display, measure: Measure) -> Profile:
    """Return the profile of an earlier start, or measure one. Raises: NoPlan if that fails."""

    def report(text: str) -> None:
        display.print_text(f"slo: {text}")

    folder = profile_folder()
    found = find_profile(folder, order.key, report)
    if found is not None:
        report(f"profile {found.digest} of an earlier start")
        return found
    report(f"measuring the model takes about {MINUTES:g} minutes, once; leave the machine to it")
    try:
        with display.activity("profile", seconds=60 * MINUTES) as activity:
            profile = measure(order.model.folder, order.key, activity.show)
    except MeasuringFailed as error:
        raise NoPlan(str(error)) from error
    keep_profile(folder, profile, report)
    return profile


def _search(order: PlanOrder, profile: Profile, workload: Workload, display: Display) -> Plan:
    """Return the plan. Raises: NoPlan if counted lengths allow none; SettingError if stated ones do not."""
    try:
        problem = limited_problem(profile, workload, order.goal, plan_limits(order, profile))
        with display.activity("search") as activity:
            return find_plan(problem, profile, activity.show)[1]
    except (NothingFits, SettingError) as error:
        if order.workload is not None:
            raise SettingError(f"no plan can be made: {error}") from error
        raise NoPlan(str(error)) from error


def plan_limits(order: PlanOrder, profile: Profile) -> PlanLimits:
    """Return the resources and choices that a plan of this order may use."""
    settings = order.settings
    return PlanLimits(
        devices=order.devices.per_group,
        shape=order.fixed,
        memory=DeviceMemory(slots=settings.slots, device_bytes=profile.device_bytes),
        max_model_len=settings.max_model_len,
        strategies=order.strategies,
        prefetch=1 if settings.prefetch is None else settings.prefetch,
        groups=settings.replicas,
    )


def _planned(settings: UpSettings, plan: Plan) -> UpSettings:
    try:
        return with_texts(settings, plan_options(plan))
    except BadValue as error:
        raise NoPlan(f"the plan breaks a rule of the options: {error}") from error


def _without_plan(settings: UpSettings) -> UpSettings:
    """Return the settings that serve without a plan: the controls of rra would come from one."""
    return replace(settings, policy="iteration") if settings.policy == "rra" else settings
