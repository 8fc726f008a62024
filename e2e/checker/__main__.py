"""`python -m checker kills` and `python -m checker judge` (with e2e/ on PYTHONPATH, or run there)."""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from checker.chain_model import make_chain_model
from checker.faults import ROLES
from checker.history import Opening, read_history
from checker.kills import RunSettings, run_kills
from checker.repair import measure_repairs, repair_table
from checker.verdict import judge, table, tokenizer_decode
from checker.workload import chain, english


def main(argv: Sequence[str]) -> int:
    """Returns: 0 when nothing was violated, 1 when something was, 2 for a run that could not be made."""
    arguments = _parser().parse_args(list(argv))
    return _judge(arguments) if arguments.command == "judge" else _kills(arguments)


def _kills(arguments: argparse.Namespace) -> int:
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="orca-checker-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = arguments.model
    if model is None:
        model = folder / "orca-chain"
        make_chain_model(model, layers=4, seed=seed)
    config = json.loads((model / "config.json").read_text())
    is_chain = config["model_type"] == "orca_chain"
    settings = RunSettings(
        seed=seed,
        kills=arguments.kills,
        model=model,
        is_chain=is_chain,
        speech=chain(model.name, config["vocab_size"]) if is_chain else english(model.name),
        roles=arguments.faults,
        freezes=not arguments.no_freezes,
        settle_s=arguments.settle,
        rate=arguments.rate,
        distinct=arguments.calls,
        max_tokens=(arguments.min_tokens, arguments.max_tokens),
        tokens_between=arguments.tokens_between,
        up=tuple(arguments.up),
        folder=folder,
    )
    verdict = asyncio.run(run_kills(settings, lambda line: print(line, flush=True)))
    return 0 if verdict.is_clean else 1


def _judge(arguments: argparse.Namespace) -> int:
    records = read_history(arguments.history)
    opening = next((record for record in records if isinstance(record, Opening)), None)
    path = Path(opening.tokenizer) if opening is not None and opening.tokenizer is not None else None
    verdict = judge(records, tokenizer_decode(path) if path is not None and path.is_file() else None)
    print(f"{table(verdict)}\n\n{repair_table(measure_repairs(records))}")
    return 0 if verdict.is_clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checker", description="Proves Orca's promise from the outside.")
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("kills", help="load a system, kill its processes, judge what clients saw")
    add = kills.add_argument
    add("--kills", type=int, default=50, metavar="N", help="faults (%(default)s)")
    add("--seed", type=int, metavar="N", help="of calls, times and faults (drawn)")
    add(
        "--model", type=Path, metavar="DIR", help="folder of a chain model, or of one that speaks English (a new chain)"
    )
    add("--faults", type=_roles, default=ROLES, metavar="A,B", help=f"of {', '.join(ROLES)} (all that can be survived)")
    add("--no-freezes", action="store_true", help="kill only")
    add(
        "--settle",
        type=float,
        default=1.0,
        metavar="S",
        help="spare what has run for less, seconds; 0: nothing (%(default)s)",
    )
    add("--rate", type=float, default=2.0, metavar="R", help="calls per second (%(default)s)")
    add("--calls", type=int, default=60, metavar="N", help="calls that differ; they come again and again (%(default)s)")
    add("--min-tokens", type=int, default=20, metavar="N", help="least max_tokens of a call (%(default)s)")
    add("--max-tokens", type=int, default=200, metavar="N", help="most max_tokens of a call (%(default)s)")
    add("--tokens-between", type=int, default=300, metavar="N", help="most tokens between two faults (%(default)s)")
    add("--out", type=Path, metavar="DIR", help="history, verdict and the system's data (a new folder)")
    add("--up", nargs=argparse.REMAINDER, default=[], help="all further words go to `orca up`")
    again = commands.add_parser("judge", help="judge a history that was kept")
    again.add_argument("history", type=Path)
    return parser


def _roles(text: str) -> tuple[str, ...]:
    roles = tuple(text.split(","))
    if unknown := set(roles) - set(ROLES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: none of {', '.join(ROLES)}")
    return roles


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
