"""The `orca` command: finds the module of a subcommand and passes the other arguments to it.

Each subcommand is one module with `main(argv) -> int | None`. It is imported only when it is called, so that
`orca --help` is quick and a container needs only the libraries of its own part. If the caller makes a mistake, the
command prints one sentence and exits with code 2.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca.cli.version import PrintVersion
from orca.core.domain.errors import ModelError, SettingError
from orca.core.process.gc_freeze import import_frozen


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its module and its line in the help text."""

    module: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "up": Command("orca.cli.up.main", "start the whole system on this machine"),
    "gateway": Command("orca.gateway.service", "run one gateway: the OpenAI HTTP API"),
    "scheduler": Command("orca.scheduler.service", "run one group's scheduler and engine master"),
    "worker": Command("orca.worker.service", "run one stage of a group"),
    "operator": Command("orca.operator.service", "run the Kubernetes operator of OrcaDeployments"),
    "fetch": Command("orca.cli.fetch.main", "download a model from a hub or an S3 store into a folder"),
    "keys": Command("orca.cli.keys", "make API keys"),
    "pool": Command("orca.cli.pool", "show the contents of a request pool, or change its schema number"),
    "profile": Command("orca.cli.profile", "measure a model, for the planner"),
    "plan": Command("orca.cli.plan", "find the schedule with the most throughput within a latency bound"),
    "follow": Command("orca.cli.follow", "check a plan in force on the lengths of now"),
    "bench": Command("orca.bench.main", "measure a server as the paper does"),
    "simulate": Command("orca.bench.simulate", "run a trace through the real scheduler on simulated stages"),
}

_EXTRAS: Mapping[str, str] = {
    "up": "local",
    "keys": "gateway",
    "pool": "gateway",
    "profile": "worker",
    "plan": "scheduler",
    "follow": "scheduler",
}
"""Extras of the package whose libraries a subcommand needs, where they have another name than the subcommand."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns: the exit code: 0 success, 1 failure, 2 a mistake in flags, settings or model, 130 Ctrl-C during the start.
    """
    _exit_on_sigterm()
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 2
    options = parser.parse_args(words)
    try:
        module = import_frozen(COMMANDS[options.command].module)
        return module.main(options.arguments) or 0
    except (SettingError, ModelError) as error:
        print(f"orca {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        # A container holds only the libraries of its own part. If a module of Orca itself is missing, that is a bug.
        if error.name is None or error.name.partition(".")[0] == "orca":
            raise
        extra = _EXTRAS.get(options.command, options.command)
        print(f"orca {options.command}: {error.name} is missing: install orca-serving[{extra}]", file=sys.stderr)
        return 2


def _exit_on_sigterm() -> None:
    """Exit on SIGTERM if this is the first process of a container, until the part installs its own handler.

    For that process the kernel ignores a SIGTERM without a handler: while a part imports its libraries, only a SIGKILL
    at the end of the grace period would end it.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))  # noqa: ARG005 - a handler's shape


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="orca",
        usage="orca COMMAND [OPTIONS]",
        description="Serve Transformer models with iteration-level scheduling and selective batching.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
        + "\n\n`orca COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=PrintVersion)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
