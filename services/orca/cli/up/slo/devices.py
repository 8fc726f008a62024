"""Chooses the devices of a plan, and what is measured on them. Pure.

On a CPU a device is one rank process with its threads.
"""

from collections.abc import Collection
from dataclasses import dataclass

from orca.cli.up.layout import computing_processors, threads_per_rank
from orca.cli.up.settings import UpSettings
from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import ProfileKey
from orca.planner.search.device_layouts import Shape
from orca.worker.parallel.stage_layers import read_layers

DEVICES_MAX = 4
"""Rank processes on a CPU that are measured and planned for, unless a user asks for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevices:
    """The devices of all groups, and the ranks that are measured on them."""

    total: int  # all run at the same time
    per_group: int
    threads: int  # of each rank
    ranks: tuple[int, ...]  # numbers of ranks in a stage that are measured, rising


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts about the machine and the model that decide about devices."""

    parameters: int  # of the model
    heads: int  # the fewest attention heads of a stack: ranks divide them
    processors: int
    gpus: int


def fixed_shape(settings: UpSettings, given: Collection[str], *, num_layers: int) -> Shape:
    """Return the part of the layout that the user has fixed. Raises: BadValue for layers of another model.

    Args: given: the options of the command line, such as `--stages`.
    """
    layers = None
    if settings.layers is not None:
        layers = read_layers(settings.layers, stages=settings.stages, num_layers=num_layers)
    return Shape(
        stages=settings.stages if "--stages" in given else None,
        ranks=settings.tensor if "--tensor" in given else None,
        layers=layers,
    )


def choose_devices(settings: UpSettings, fixed: Shape, machine: Machine) -> PlannedDevices:
    """Return the devices to measure. Raises: SettingError if there are too few for what is fixed, or not so many."""
    needed = _needed(settings, fixed)
    is_cpu = settings.device == "cpu"
    most, name = (machine.processors, "processors") if is_cpu else (machine.gpus, "visible GPUs")
    if settings.slo_devices is not None and settings.slo_devices > most:
        raise SettingError(f"setting --slo-devices: {settings.slo_devices} is more than the {most} {name}")
    total = settings.slo_devices
    if total is None and is_cpu:
        fitting = computing_processors(machine.processors) // max(1, settings.threads)
        total = needed if fixed.stages and fixed.ranks else max(needed, min(DEVICES_MAX, fitting))
    elif total is None:
        total = most
    _check_enough(settings, fixed, total)
    per_group = total // settings.replicas
    total = per_group * settings.replicas
    most_ranks = min(per_group // (fixed.stages or 1), machine.heads)
    return PlannedDevices(
        total=total,
        per_group=per_group,
        threads=settings.threads
        or threads_per_rank(total, parameters=machine.parameters, processors=machine.processors),
        ranks=(fixed.ranks,) if fixed.ranks else tuple(1 << power for power in range(most_ranks.bit_length())),
    )


def profiled_devices(settings: UpSettings, fixed: Shape, key: ProfileKey) -> PlannedDevices:
    """Return the devices of a profile that the user has named. Raises: SettingError if it was measured with fewer."""
    total = settings.slo_devices or key.devices
    if total > key.devices:
        raise SettingError(f"setting --slo-devices: {total} is more than the {key.devices} of the profile")
    if fixed.ranks and fixed.ranks not in key.ranks:
        measured = ", ".join(map(str, key.ranks))
        raise SettingError(f"setting --tensor: the profile has no times for {fixed.ranks} ranks, only for {measured}")
    _check_enough(settings, fixed, total)
    return PlannedDevices(
        total=key.devices,
        per_group=total // settings.replicas,
        threads=settings.threads or key.threads,
        ranks=key.ranks,
    )


def _needed(settings: UpSettings, fixed: Shape) -> int:
    return settings.replicas * (fixed.stages or 1) * (fixed.ranks or 1)


def _check_enough(settings: UpSettings, fixed: Shape, total: int) -> None:
    """Raises: SettingError if there are fewer devices than the fixed part of the layout needs."""
    if (needed := _needed(settings, fixed)) > total:
        words = [(settings.replicas, "replicas"), (fixed.stages, "stages"), (fixed.ranks, "tensor")]
        fixes = " ".join(f"--{name} {value}" for value, name in words if value and value > 1)
        raise SettingError(f"setting --slo-devices: {fixes} need {needed} devices, and there are {total}")
