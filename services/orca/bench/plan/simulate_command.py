"""`orca bench plan simulate`: the options, and the runs of all models."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench.options import add_output_options, comma_separated, positive, write_figures, write_json
from orca.bench.plan.profile_command import SHAPES
from orca.cli.model_folder import find_model
from orca.core.domain.errors import SettingError

HELP = "throughput and latency of real schedules against their exact simulation"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    shown = f"shapes of random models, comma-separated ({','.join(SHAPES)})"
    add("--shapes", type=comma_separated(str), default=SHAPES, metavar="A,B", help=shown)
    add("--model", metavar="DIR", help="a model instead of these shapes")
    add("--settings", type=positive(int), default=24, metavar="N", help="schedules of each model (%(default)s)")
    add("--requests", type=positive(int), default=300, metavar="N", help="requests of each run (%(default)s)")
    add("--minutes", type=positive(float), default=5.0, metavar="N", help="time to measure a profile (%(default)s)")
    add("--profile", type=Path, metavar="FILE", help="a profile of two devices that was measured before; needs --model")
    add("--seed", type=int, default=0, metavar="N", help="seed of the schedules (%(default)s)")
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace) -> int | None:
    """Measure profiles and runs, and show the errors. Raises: SettingError, ModelError, OrcaError."""
    from orca.bench.peers.compare import make_random_model  # torch and safetensors: only here
    from orca.bench.peers.model import SHAPES as KNOWN
    from orca.bench.plan import simulate_runs
    from orca.planner.profile.measuring.measure import MeasurePlan, measure
    from orca.planner.profile.profile import read_profile

    if unknown := [name for name in options.shapes if name not in KNOWN]:
        raise SettingError(f"--shapes {unknown[0]} is not one of {', '.join(KNOWN)}")
    if options.profile is not None and options.model is None:
        raise SettingError("--profile needs --model")
    errors = []
    chosen = simulate_runs.schedules(options.settings, options.seed)
    with TemporaryDirectory(prefix="orca-plan-") as scratch:
        folder = Path(scratch)
        if options.model is not None:
            models = [find_model(options.model)[0]]
        else:
            models = [make_random_model(name, folder, _report) for name in options.shapes]
        for model in models:
            if options.profile is not None:
                profile = read_profile(options.profile)
            else:
                plan = MeasurePlan(
                    model=model,
                    dtype="float32",
                    quantization=None,
                    device="cpu",
                    threads=1,
                    devices=simulate_runs.STAGES,
                    ranks=(1,),
                    minutes=options.minutes,
                    release=version("orca-serving"),
                )
                profile = measure(plan, _report)
            runs = folder / f"runs-{model.name}"
            runs.mkdir()
            errors += simulate_runs.compare(
                model, profile, chosen, requests=options.requests, folder=runs, report=_report
            )
    print("\n".join(simulate_runs.lines(errors)))
    write_json(options.json, simulate_runs.to_json(errors))
    write_figures(options, simulate_runs.figures(errors))
    return None


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
