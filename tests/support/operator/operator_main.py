"""One run of the operator, in a process of its own (operator_runs.py)."""

import os
from collections.abc import Sequence
from pathlib import Path

from orca.operator import service

LOG = "operator.log"


def run_operator(folder: str, options: Sequence[str]) -> None:
    """Run the operator in this process. Args: folder: its working directory, which gets its log."""
    os.chdir(folder)
    with Path(LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    raise SystemExit(service.main(options))
