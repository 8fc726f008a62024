"""Puts a plan in force in a running system: what it changes (pure), and the file of bounds that schedulers poll."""

from collections.abc import Collection, Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import orjson

from orca.cli.up.plan import bounds_file
from orca.cli.up.planned import plan_flags
from orca.cli.up.settings import UpSettings
from orca.cli.up.slo.settings import OPTIONS
from orca.core.even_parts import even_parts
from orca.core.process.whole_file import write_whole
from orca.planner.search.plan import Plan, PlannedBounds
from orca.scheduler.settings import CYCLE_SETTINGS

_OF_LAYOUT = ("stages", "tensor", "slots", "threads", "device", "dtype", "quantization")
"""Settings that stages start with. A difference needs other processes, or the same ones with another model."""


class PlanChange(StrEnum):
    """The parts that a plan changes in a running system: the most that is needed."""

    BOUNDS = "bounds"  # the schedulers read them while they run
    SCHEDULERS = "schedulers"  # they start again with another strategy; stages and requests stay
    LAYOUT = "layout"  # the system starts again


def change_to(running: UpSettings, planned: UpSettings, *, num_layers: int) -> PlanChange:
    """Return what must change. Args: running, planned: results of `with_layout`; num_layers: of the model."""
    if any(getattr(running, name) != getattr(planned, name) for name in _OF_LAYOUT):
        return PlanChange.LAYOUT
    if layers_of(running, num_layers) != layers_of(planned, num_layers):
        return PlanChange.LAYOUT
    if (running.policy, running.prefetch) != (planned.policy, planned.prefetch):
        return PlanChange.SCHEDULERS
    return PlanChange.BOUNDS


def layers_of(settings: UpSettings, num_layers: int) -> tuple[int, ...]:
    """Return the layers of each stage."""
    if settings.layers is None:
        return even_parts(num_layers, settings.stages)
    return tuple(map(int, settings.layers.split(",")))


def write_bounds(folder: Path, settings: UpSettings) -> Path:
    """Write the bounds of the settings where the schedulers poll them. Returns: the file. Raises: OSError."""
    names = [field.name for field in fields(PlannedBounds)]
    values = {name: getattr(settings, name) for name in names if name not in CYCLE_SETTINGS or settings.policy == "rra"}
    file = bounds_file(folder, settings.policy)
    write_whole(file, orjson.dumps(values))
    return file


def command_with_plan(argv: Sequence[str], plan: Plan, file: Path) -> list[str]:
    """Return the command that starts the system again with a plan. Args: argv: the options of this start."""
    return ["orca", "up", *_without(argv, {*OPTIONS, *plan_flags(plan), "--plan"}), "--plan", str(file)]


def _without(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without some options and their values."""
    kept: list[str] = []
    is_left_out = False
    for word in argv:
        if word.startswith("--"):
            is_left_out = word.partition("=")[0] in names
        if not is_left_out:
            kept.append(word)
    return kept
