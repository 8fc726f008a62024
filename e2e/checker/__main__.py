"""`python -m checker COMMAND`, with e2e/ on PYTHONPATH or as the working directory: see README.md in this folder."""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from checker.clients.workload import (
    ANSWER_TOKENS,
    DEADLINES,
    PromptSource,
    chain,
    english,
    seq2seq_chain,
    with_patterns,
    with_schemas,
    with_shared_prefixes,
)
from checker.faults.freezes import Freezes
from checker.faults.injector import ROLES
from checker.faults.kills import Kills
from checker.faults.leavers import Leavers
from checker.faults.partitions import Partitions
from checker.faults.releases import RollingUpgrade
from checker.faults.soak import QUEUE_MAX, Soak
from checker.faults.walk import Walk
from checker.history.records import Opening, read_history
from checker.oracles.chain_model import make_chain_model
from checker.oracles.expectations import CHAIN_TYPES, DecoderOracle
from checker.oracles.seq2seq_chain_model import make_seq2seq_chain_model
from checker.points.mutants import MUTANTS
from checker.points.names import REMOTE_VARIABLE
from checker.rules.repairs import measure_repairs, repair_table
from checker.rules.verdict import judge, table, tokenizer_decode
from checker.runs.context import Disturbance, RunSettings, SystemFactory
from checker.runs.run import run_system
from checker.systems.checkouts import ReleaseError, Releases, export, last_release, working_tree
from checker.systems.rolling import RollingSystem
from checker.systems.spread import SpreadSystem, enter_own_network, missing_prerequisite
from checker.systems.system import System

ENVIRONMENTS = {
    # Stages as slow as those of a real model: a chain's stages are done before a late commit can arrive.
    "freezes": {"ORCA_WORKER_DELAY_MS": "40"},
    "points": {REMOTE_VARIABLE: "1"},
    "soak": {"ORCA_POOL_MAX_QUEUED": str(QUEUE_MAX)},
}


STAGES = ("--stages", "2")
"""Options of `orca up`, which those after `--up` override. With two stages, the link between them can break too."""

EOS = 999
"""Token that ends an answer of a new chain model, if any does."""

UP_FLAGS = {"freezes": ("--probe-s", "0")}
"""Further options by command. `orca up` must not replace a frozen part, because the part has to wake up later."""


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns: 0 without violations, 1 with violations, 2 for a run that is not possible here."""
    arguments = _parser().parse_args(list(argv))
    if arguments.command == "judge":
        return _judge(arguments)
    if arguments.command == "partitions":
        if (reason := missing_prerequisite()) is not None:
            print(f"partitions: skipped, {reason}")
            return 2
        enter_own_network(argv)
    try:
        return _run(arguments)
    except ReleaseError as error:
        print(f"releases: {error}")
        return 2


def _run(arguments: argparse.Namespace) -> int:
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="orca-checker-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = arguments.model or _new_model(arguments.model_kind, folder, seed, has_eos=arguments.grammars)
    config = json.loads((model / "config.json").read_text())
    source = _prompt_source(model.name, config, seed, has_grammars=arguments.grammars)
    if arguments.shared_prefixes:
        source = with_shared_prefixes(source, seed=seed, answer=_greedy_answer(model, config))
    settings = RunSettings(
        seed=seed,
        model=model,
        is_chain=config["model_type"] in CHAIN_TYPES,
        prompt_source=source,
        roles=arguments.faults,
        disturb=_disturbance(arguments),
        rate=arguments.rate,
        open_max=arguments.open,
        distinct_calls=arguments.calls,
        max_tokens=(arguments.min_tokens, arguments.max_tokens),
        deadlines=arguments.deadlines,
        up=(*STAGES, *UP_FLAGS.get(arguments.command, ()), *arguments.up),
        folder=folder,
        make_system=_system(arguments, folder, config["model_type"]),
        environment=ENVIRONMENTS.get(arguments.command, {}),
        least_life_s=arguments.least_life * 60 if arguments.command == "soak" else None,
        injects=arguments.command not in ("kills", "releases", "soak") or arguments.mutant is not None,
        mutant=arguments.mutant,
    )
    verdict = asyncio.run(run_system(settings, lambda line: print(line, flush=True)))
    return 0 if verdict.is_clean else 1


def _new_model(kind: str, folder: Path, seed: int, *, has_eos: bool) -> Path:
    """Make a chain model with four layers. Args: has_eos: answers can end. Returns: its folder."""
    eos = EOS if has_eos else None
    if kind == "encoder-decoder":
        model = folder / "orca-seq2seq-chain"
        make_seq2seq_chain_model(model, encoder_layers=2, decoder_layers=2, eos_token_id=eos, seed=seed)
    else:
        model = folder / "orca-chain"
        make_chain_model(model, layers=4, eos_token_id=eos, seed=seed)
    return model


def _prompt_source(name: str, config: Mapping[str, Any], seed: int, *, has_grammars: bool) -> PromptSource:
    """Args: has_grammars: every second call has one, which a chain model needs an EOS for."""
    match config["model_type"]:
        case "orca_chain":
            source = chain(name, config["vocab_size"])
        case "orca_seq2seq_chain":
            source = seq2seq_chain(name, config["vocab_size"], config["decoder_start_token_id"])
        case _:
            return with_schemas(english(name)) if has_grammars else english(name)
    return with_patterns(source, seed=seed) if has_grammars else source


def _greedy_answer(model: Path, config: Mapping[str, Any]) -> Callable[[Sequence[int]], Sequence[int]] | None:
    """Return what a decoder-only chain model answers to a prompt at temperature 0; None for other models."""
    if config["model_type"] != "orca_chain":
        return None
    oracle = DecoderOracle(model)
    return lambda prompt: oracle.tokens(prompt, (), ANSWER_TOKENS, seed=0, temperature=0)


def _system(arguments: argparse.Namespace, folder: Path, model_type: str) -> SystemFactory:
    match arguments.command:
        case "partitions":
            return SpreadSystem
        case "releases":
            before = arguments.before or last_release()
            after = working_tree() if arguments.after is None else export(arguments.after, folder / "after")
            releases = Releases(export(before, folder / "before"), after)
            for release in (releases.before, releases.after):
                release.check_model(model_type)
            print(f"from {before}, schemas {releases.before.schemas}, to {after.revision}, {after.schemas}", flush=True)
            order = ("--order", arguments.order, "--drop", "never") if arguments.order else ()
            return partial(RollingSystem, releases=releases, order=order)
    return System


def _disturbance(arguments: argparse.Namespace) -> Disturbance:
    match arguments.command:
        case "freezes":
            return Freezes(rounds=arguments.rounds)
        case "leavers":
            return Leavers(clients=arguments.clients)
        case "partitions":
            return Partitions(rounds=arguments.rounds)
        case "releases":
            return RollingUpgrade(kills=arguments.kills, has_rollback=not arguments.no_rollback)
        case "soak":
            return Soak(minutes=arguments.minutes, quiet_s=arguments.quiet)
        case "points":
            return Walk(only=arguments.only, limit_s=arguments.minutes * 60)
    return Kills(
        count=arguments.kills,
        freezes=not arguments.no_freezes,
        settle_s=arguments.settle,
        tokens_between=arguments.tokens_between,
    )


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
    kills = commands.add_parser("kills", help="kill processes of a system under load, judge what clients received")
    add = kills.add_argument
    add("--kills", type=int, default=50, metavar="N", help="number of faults (%(default)s)")
    add("--no-freezes", action="store_true", help="kill only")
    settle = "leave out parts that have run for less than S seconds; 0: none (%(default)s)"
    add("--settle", type=float, default=1.0, metavar="S", help=settle)
    add("--tokens-between", type=int, default=300, metavar="N", help="most tokens between two faults (%(default)s)")
    freezes = commands.add_parser("freezes", help="freeze each part for longer than any time limit for it")
    freezes.add_argument("--rounds", type=int, default=2, metavar="N", help="freezes of each role (%(default)s)")
    points = commands.add_parser(
        "points", help="kill a part, or lose a reply, before and after each call of the write path"
    )
    points.add_argument("--only", default="", metavar="WORDS", help="only points with these words in their names")
    limit = "start no further point after M minutes (no limit)"
    points.add_argument("--minutes", type=float, default=float("inf"), metavar="M", help=limit)
    leavers = commands.add_parser("leavers", help="clients that leave at random moments, while others stay")
    leavers.add_argument("--clients", type=int, default=1_000, metavar="N", help="clients that leave (%(default)s)")
    soak = commands.add_parser("soak", help="all faults for a long time, judged during the run; reports growth")
    soak.add_argument("--minutes", type=float, default=60.0, metavar="M", help="minutes of the run (%(default)s)")
    quiet = "seconds without faults in each cycle, to measure growth (%(default)s)"
    soak.add_argument("--quiet", type=float, default=240.0, metavar="S", help=quiet)
    least = "judge growth of processes with at least M steady minutes (%(default)s)"
    soak.add_argument("--least-life", type=float, default=10.0, metavar="M", help=least)
    partitions = commands.add_parser("partitions", help="cut each link, both ways and one way, and restore it (root)")
    partitions.add_argument("--rounds", type=int, default=1, metavar="N", help="cuts of each kind (%(default)s)")
    releases = commands.add_parser("releases", help="upgrade a system from the last release to this one, and back")
    add = releases.add_argument
    add("--before", metavar="REV", help="git revision of the last release (the newest tag, otherwise the last commit)")
    add("--after", metavar="REV", help="git revision of the new release (the working tree)")
    add("--kills", type=int, default=1, metavar="N", help="kills per gateway and group that changes (%(default)s)")
    add("--no-rollback", action="store_true", help="upgrade only")
    add("--order", metavar="ORDER", help="order of claims of the new release's schedulers (arrival)")
    for command in (kills, freezes, points, leavers, soak, partitions, releases):
        _add_run(command)
    again = commands.add_parser("judge", help="judge a stored history")
    again.add_argument("history", type=Path)
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    """Add the options of all runs."""
    add = command.add_argument
    add("--seed", type=int, metavar="N", help="seed of calls, times and faults (random)")
    models = command.add_mutually_exclusive_group()
    found = "folder of a chain model or of an English model (a new chain model)"
    models.add_argument("--model", type=Path, metavar="DIR", help=found)
    kinds, made = ("decoder", "encoder-decoder"), "kind of the new chain model (%(default)s)"
    models.add_argument("--model-kind", choices=kinds, default=kinds[0], help=made)
    add("--faults", type=_roles, default=ROLES, metavar="A,B", help=f"roles to disturb: {', '.join(ROLES)} (all)")
    add("--rate", type=float, default=2.0, metavar="R", help="calls per second (%(default)s)")
    add("--open", type=int, default=24, metavar="N", help="most concurrent calls (%(default)s)")
    add("--calls", type=int, default=60, metavar="N", help="number of different calls, which repeat (%(default)s)")
    add("--min-tokens", type=int, default=20, metavar="N", help="least max_tokens of a call (%(default)s)")
    add("--max-tokens", type=int, default=200, metavar="N", help="most max_tokens of a call (%(default)s)")
    deadlines = (
        "share of the calls that have a deadline, 0 to 1 (%(default)s); with an order of claims: --up --drop never"
    )
    add("--deadlines", type=_share, default=DEADLINES, metavar="SHARE", help=deadlines)
    add("--grammars", action="store_true", help="every second call has a grammar, which its answer must match")
    shared = "most prompts begin as other prompts and answers do, so that requests share KV blocks"
    add("--shared-prefixes", action="store_true", help=shared)
    add("--mutant", choices=sorted(MUTANTS), help="remove a rule from Orca: the verdict must report violations")
    add("--out", type=Path, metavar="DIR", help="folder for history, verdict and the system's data (a new folder)")
    add("--up", nargs=argparse.REMAINDER, default=[], help="all further arguments are options of `orca up`")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return share


def _roles(text: str) -> tuple[str, ...]:
    roles = tuple(text.split(","))
    if unknown := set(roles) - set(ROLES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(ROLES)}")
    return roles


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
