"""What runs inside the processes of a system under test. Imports nothing of Orca: it waits until Orca does."""

import os
import sys
from pathlib import Path

from checker.points import fault_points, mutants, recorder
from checker.points.names import FOLDER_VARIABLE, MUTANT_VARIABLE


def install() -> None:
    """Called once, before the program of the process."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    if mutant := os.environ.get(MUTANT_VARIABLE):
        mutants.install(mutant)
    part = part_of(sys.orig_argv)
    if part is not None:
        # Points last, so outermost: a call that a point stops was never made, and the recorder hears nothing of it.
        recorder.install(Path(folder), part)
        fault_points.install(Path(folder), part)


def part_of(words: list[str]) -> str | None:
    """gateway, scheduler or worker, by the command line; None for all other processes."""
    if "orca.cli.main" not in words:
        return None
    role = words[words.index("orca.cli.main") + 1]
    return role if role in ("gateway", "scheduler", "worker") else None
