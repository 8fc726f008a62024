"""The `orca` command: finds the module of a subcommand and hands the rest of the line to it.

Each subcommand is one module with `main(argv) -> int | None`. It is imported only when it is called, so that
`orca --help` is quick and a container needs only the libraries of its own part. A mistake of the caller ends with one
sentence and exit code 2.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from orca.core.domain.errors import ModelError, SettingError
from orca.core.process.gc_freeze import import_frozen


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "up": Command("orca.cli.up.main", "start the whole system on this machine"),
    "gateway": Command("orca.gateway.service", "run one gateway: the OpenAI HTTP API"),
    "scheduler": Command("orca.scheduler.service", "run one group's scheduler and engine master"),
    "worker": Command("orca.worker.service", "run one stage of a group"),
    "operator": Command("orca.operator.service", "keep a cluster equal to its OrcaDeployments"),
    "fetch": Command("orca.cli.fetch.main", "bring a model of a hub or an S3 store into a folder, once"),
    "keys": Command("orca.cli.keys", "make API keys"),
    "pool": Command("orca.cli.pool", "ask a pool what is in it, or put a schema number in force"),
    "bench": Command("orca.bench.main", "measure a server as the paper does"),
    "simulate": Command("orca.bench.simulate", "run a trace through the real scheduler on simulated stages"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns: the exit code: 0 well, 1 failed, 2 a mistake in flags, settings or model, 130 Ctrl-C before it could end.
    """
    _end_when_told()
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
        # A container holds only its own part's libraries; a module of ours that is missing is a bug and raises.
        if error.name is None or error.name.partition(".")[0] == "orca":
            raise
        extra = {"up": "local", "keys": "gateway", "pool": "gateway"}.get(options.command, options.command)
        print(f"orca {options.command}: {error.name} is missing: install orca-serving[{extra}]", file=sys.stderr)
        return 2


def _end_when_told() -> None:
    """As the first process of a container, where the kernel ignores a SIGTERM that nobody handles: while a part imports
    its libraries, it would be killed only when its grace is over. Each part then brings its own handler."""
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
        + "\n\n`orca COMMAND --help` lists the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"orca {version('orca-serving')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
