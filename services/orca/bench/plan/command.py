"""`orca bench plan`: compares what the planner predicts with what is measured.

profile    the time of real steps, against the time that a profile predicts for them
simulate   throughput and latency of real schedules, against their exact simulation
search     the planner's search, against exhaustive search
real       plans on real processes, against a measured grid and tuned baselines
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

from orca.bench.plan import profile_command, real_command, search_command, simulate_command
from orca.core.domain.errors import SettingError
from orca.core.process.command_line import CommandLineParser

HELP = "predictions of the planner against measurements"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `orca bench plan`."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART", parser_class=CommandLineParser)
    profile_command.add_options(parts.add_parser("profile", help=profile_command.HELP))
    simulate_command.add_options(parts.add_parser("simulate", help=simulate_command.HELP))
    search_command.add_options(parts.add_parser("search", help=search_command.HELP))
    real_command.add_options(parts.add_parser("real", help=real_command.HELP))


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int | None:
    """Run one part. Returns: its exit code. Raises: SettingError, ModelError, OrcaError."""
    if up_options:
        raise SettingError(f"this measurement does not start `orca up`, which could take {' '.join(up_options)}")
    return _PARTS[options.part](options)


_PARTS: Mapping[str, Callable[[argparse.Namespace], int | None]] = {
    "profile": profile_command.act,
    "simulate": simulate_command.act,
    "search": search_command.act,
    "real": real_command.act,
}
