"""The code inside the processes of a system under test. It imports nothing of Orca, but waits until Orca does."""

import os
import sys
from pathlib import Path

from checker.points import fault_points, mutants, recorder
from checker.points.names import FOLDER_VARIABLE, MUTANT_VARIABLE


def install() -> None:
    """Install points, recorder and mutant. To be called once, before the program of the process."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    if mutant := os.environ.get(MUTANT_VARIABLE):
        mutants.install(mutant)
    part = part_of(sys.orig_argv)
    if part is not None:
        # Points come last, so they are outermost: a call that a point stops was never made and is not recorded.
        recorder.install(Path(folder), part)
        fault_points.install(Path(folder), part)


def part_of(words: list[str]) -> str | None:
    """Return gateway, scheduler or worker, from the command line; None for all other processes."""
    if "orca.cli.main" not in words:
        return None
    role = words[words.index("orca.cli.main") + 1]
    return role if role in ("gateway", "scheduler", "worker") else None
