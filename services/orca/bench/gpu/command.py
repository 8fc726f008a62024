"""`orca bench gpu`: the same as `python -m orca.bench.kernels`."""

import argparse
from collections.abc import Sequence

from orca.bench.kernels.__main__ import add_options, run
from orca.core.domain.errors import SettingError

HELP = "kernels, decode steps and the paper's trace, checked, then timed beside their limits"


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int:
    """Returns: the exit code."""
    if up_options:
        raise SettingError(f"nothing is started here that could take {' '.join(up_options)}")
    return run(options)


__all__ = ["HELP", "act", "add_options"]
