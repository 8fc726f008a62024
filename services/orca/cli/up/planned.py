"""Turns `--plan FILE` into the options that the plan decides, as if the user had given them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from orca.core.domain.errors import SettingError

if TYPE_CHECKING:
    from orca.planner.search.plan import Plan

OPTION = "--plan"


def with_plan(argv: Sequence[str]) -> list[str]:
    """Return the command line with the options of its plan; unchanged if it names none.

    Raises: SettingError if the file is no plan, or an option that the plan decides was given too.
    """
    words = list(argv)
    file = _plan_of(words)
    if file is None:
        return words
    flags = plan_flags(load_plan(file))
    given = given_options(words)
    for name in flags:
        if name in given:
            raise SettingError(f"setting {name}: the plan {file} decides it: leave it out, or make another plan")
    return words + [word for flag in flags.items() for word in flag]


def given_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a command line without their values, such as `--stages`, in their order."""
    return [word.partition("=")[0] for word in argv if word.startswith("--")]


@cache
def load_plan(file: str) -> "Plan":
    """Read a plan, once in this process. Raises: SettingError."""
    # Few starts name a plan, and the planner takes a moment to import.
    from orca.planner.search.plan import read_plan

    return read_plan(Path(file))


def plan_flags(plan: "Plan") -> dict[str, str]:
    """Return the options of `orca up` that run a plan."""
    return {f"--{name.replace('_', '-')}": value for name, value in plan_options(plan).items()}


def plan_options(plan: "Plan") -> dict[str, str]:
    """Return the same by the names of the settings."""
    return plan.device.flags() | plan.schedule.flags()


def _plan_of(words: Sequence[str]) -> str | None:
    """Return the value of the last `--plan`. One without a value is left to the parser, which refuses it."""
    file = None
    for number, word in enumerate(words):
        if word.startswith(f"{OPTION}="):
            file = word.partition("=")[2]
        elif word == OPTION and number + 1 < len(words):
            file = words[number + 1]
    return file
