"""`orca bench plan simulate`: the options, and the runs of all models."""

import argparse
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench.options import add_output_options, positive, write_figures, write_json
from orca.bench.plan.models import add_model_options, check_shapes, chosen_models, measured_profile, report
from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import Profile, read_profile

HELP = "throughput and latency of real schedules against their exact simulation"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add = parser.add_argument
    add("--settings", type=positive(int), default=24, metavar="N", help="schedules of each model (%(default)s)")
    add("--requests", type=positive(int), default=300, metavar="N", help="requests of each run (%(default)s)")
    add(
        "--rounds", type=positive(int), default=3, metavar="N", help="profiles, and runs of each schedule (%(default)s)"
    )
    add("--minutes", type=positive(float), default=5.0, metavar="N", help="time to measure a profile (%(default)s)")
    add("--profile", type=Path, metavar="FILE", help="a profile of two devices that was measured before; needs --model")
    add("--seed", type=int, default=0, metavar="N", help="seed of the schedules (%(default)s)")
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace) -> int | None:
    """Measure profiles and runs, and show the errors. Raises: SettingError, ModelError, OrcaError."""
    from orca.bench.plan import simulate_runs
    from orca.bench.plan.machine_speed import running_speed

    check_shapes(options)
    if options.profile is not None and options.model is None:
        raise SettingError("--profile needs --model")
    errors = []
    chosen = simulate_runs.schedules(options.settings, options.seed)
    with TemporaryDirectory(prefix="orca-plan-") as scratch, running_speed(simulate_runs.STAGES) as speed:
        folder = Path(scratch)
        for model in chosen_models(options, folder):
            runs = folder / f"runs-{model.name}"
            runs.mkdir()
            errors += simulate_runs.compare(
                model,
                partial(_profile, options, model),
                chosen,
                requests=options.requests,
                rounds=options.rounds,
                folder=runs,
                report=report,
                measure_speed=speed.measure,
            )
    print("\n".join(simulate_runs.lines(errors)))
    write_json(options.json, simulate_runs.to_json(errors))
    write_figures(options, simulate_runs.figures(errors))
    return None


def _profile(options: argparse.Namespace, model: Path) -> Profile:
    if options.profile is not None:
        return read_profile(options.profile)
    from orca.bench.plan.simulate_runs import STAGES

    return measured_profile(model, ranks=(1,), devices=STAGES, threads=1, minutes=options.minutes)
