"""`orca bench plan profile`: the options, and the runs of all models and ranks."""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from orca.bench.options import add_output_options, comma_separated, positive, write_figures, write_json
from orca.bench.plan.models import add_model_options, check_shapes, chosen_models, measured_profile, report
from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import read_profile
from orca.worker.machine import available_processors

if TYPE_CHECKING:
    from orca.bench.plan import profile_errors

HELP = "the time of real steps against the time that a profile predicts for them"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add = parser.add_argument
    add("--ranks", type=comma_separated(positive(int)), default=(1, 2), metavar="N,M", help="ranks of the stage (1,2)")
    add("--steps", type=positive(int), default=300, metavar="N", help="steps to compare (%(default)s)")
    add(
        "--rounds",
        type=positive(int),
        default=3,
        metavar="N",
        help="profiles, each with its part of steps (%(default)s)",
    )
    add("--minutes", type=positive(float), default=2.0, metavar="N", help="time to measure a profile (%(default)s)")
    add(
        "--profile", type=Path, metavar="FILE", help="a profile that was measured before; needs --model and one --ranks"
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the requests (%(default)s)")
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace) -> int | None:
    """Measure profiles and steps, and show the errors. Raises: SettingError, ModelError, EngineError."""
    check_shapes(options)
    if options.profile is not None and (options.model is None or len(options.ranks) != 1):
        raise SettingError("--profile needs --model and one number of --ranks")
    errors = []
    with TemporaryDirectory(prefix="orca-plan-") as scratch:
        folder = Path(scratch)
        for model in chosen_models(options, folder):
            errors += [_compare(options, model, ranks, folder) for ranks in options.ranks]
    from orca.bench.plan import profile_errors

    print("\n".join(profile_errors.lines(errors)))
    write_json(options.json, profile_errors.to_json(errors))
    write_figures(options, profile_errors.figures(errors))
    return None


def _compare(options: argparse.Namespace, model: Path, ranks: int, folder: Path) -> "profile_errors.LayoutErrors":
    """Compare in rounds, since a machine is faster at one time than at another."""
    from orca.bench.plan import profile_errors

    turns = [_round(options, model, ranks, folder, turn) for turn in range(options.rounds)]
    return profile_errors.joined(turns)


def _round(
    options: argparse.Namespace, model: Path, ranks: int, folder: Path, turn: int
) -> "profile_errors.LayoutErrors":
    from orca.bench.plan import profile_errors

    if options.profile is None:
        threads = max(1, available_processors() // ranks)
        profile = measured_profile(
            model, ranks=(ranks,), devices=ranks, threads=threads, minutes=options.minutes, host=False
        )
    else:
        profile = replace(read_profile(options.profile), host=None)  # the timed steps run alone
    steps = -(-options.steps // options.rounds)
    report(f"{model.name}, {ranks} rank{'' if ranks == 1 else 's'}: times {steps} real steps")
    logs = folder / f"{model.name}-{ranks}-{turn}"
    logs.mkdir()
    seed = options.seed * options.rounds + turn
    return profile_errors.compare(model, profile, ranks=ranks, steps=steps, seed=seed, folder=logs)
