"""`orca bench plan profile`: the options, and the runs of all models and ranks."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from orca.bench.options import add_output_options, comma_separated, positive, write_figures, write_json
from orca.cli.model_folder import find_model
from orca.core.domain.errors import SettingError
from orca.worker.machine import available_processors

if TYPE_CHECKING:
    from orca.bench.plan import profile_errors

HELP = "the time of real steps against the time that a profile predicts for them"
SHAPES = ("llama-63m", "t5-60m")
"""Names of shapes of peers/model.py."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    shown = f"shapes of random models, comma-separated ({','.join(SHAPES)})"
    add("--shapes", type=comma_separated(str), default=SHAPES, metavar="A,B", help=shown)
    add("--model", metavar="DIR", help="a model instead of these shapes")
    add("--ranks", type=comma_separated(positive(int)), default=(1, 2), metavar="N,M", help="ranks of the stage (1,2)")
    add("--steps", type=positive(int), default=300, metavar="N", help="steps to compare (%(default)s)")
    add("--minutes", type=positive(float), default=5.0, metavar="N", help="time to measure a profile (%(default)s)")
    add(
        "--profile", type=Path, metavar="FILE", help="a profile that was measured before; needs --model and one --ranks"
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the requests (%(default)s)")
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace) -> int | None:
    """Measure profiles and steps, and show the errors. Raises: SettingError, ModelError, EngineError."""
    from orca.bench.peers.compare import make_random_model  # torch and safetensors: only here
    from orca.bench.peers.model import SHAPES as KNOWN

    if unknown := [name for name in options.shapes if name not in KNOWN]:
        raise SettingError(f"--shapes {unknown[0]} is not one of {', '.join(KNOWN)}")
    if options.profile is not None and (options.model is None or len(options.ranks) != 1):
        raise SettingError("--profile needs --model and one number of --ranks")
    errors = []
    with TemporaryDirectory(prefix="orca-plan-") as scratch:
        folder = Path(scratch)
        if options.model is not None:
            models = [find_model(options.model)[0]]
        else:
            models = [make_random_model(name, folder, _report) for name in options.shapes]
        for model in models:
            errors += [_compare(options, model, ranks, folder) for ranks in options.ranks]
    from orca.bench.plan import profile_errors

    print("\n".join(profile_errors.lines(errors)))
    write_json(options.json, profile_errors.to_json(errors))
    write_figures(options, profile_errors.figures(errors))
    return None


def _compare(options: argparse.Namespace, model: Path, ranks: int, folder: Path) -> "profile_errors.LayoutErrors":
    from orca.bench.plan import profile_errors
    from orca.planner.profile.measuring.measure import MeasurePlan, measure
    from orca.planner.profile.profile import read_profile

    threads = max(1, available_processors() // ranks)
    plan = MeasurePlan(
        model=model,
        dtype="float32",
        quantization=None,
        device="cpu",
        threads=threads,
        devices=ranks,
        ranks=(ranks,),
        minutes=options.minutes,
        release=version("orca-serving"),
    )
    profile = measure(plan, _report) if options.profile is None else read_profile(options.profile)
    _report(f"{model.name}, {ranks} rank{'' if ranks == 1 else 's'}: times {options.steps} real steps")
    logs = folder / f"{model.name}-{ranks}"
    logs.mkdir()
    return profile_errors.compare(model, profile, ranks=ranks, steps=options.steps, seed=options.seed, folder=logs)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
