"""The life of one operator, in a process of its own (operator_runs.py)."""

import os
from collections.abc import Sequence
from pathlib import Path

from orca.operator import service

LOG = "operator.log"


def run_operator(folder: str, options: Sequence[str]) -> None:
    """Args: folder: to work in; what it says goes there."""
    os.chdir(folder)
    with Path(LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    raise SystemExit(service.main(options))
