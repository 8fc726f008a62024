"""`orca bench plan real`: the options, and the runs of all models and tasks."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench.exegpt.faster_transformer import BATCH_STEP
from orca.bench.exegpt.gains import BOUNDS
from orca.bench.options import add_output_options, comma_separated, not_negative, positive, write_figures, write_json
from orca.bench.plan.models import (
    add_model_options,
    check_profile,
    check_shapes,
    chosen_models,
    measured_profile,
    report,
)
from orca.bench.plan.real import table
from orca.bench.plan.real.case import RealCase
from orca.bench.plan.real.compare import SYSTEMS, RealRuns, compare_case
from orca.bench.plan.real.kept import KeptRuns
from orca.bench.plan.real.survey import DEFAULT_SIZES
from orca.bench.plan.simulate_runs import TASKS
from orca.core.domain.errors import SettingError
from orca.core.process.whole_file import write_whole
from orca.planner.profile.profile import Profile, read_profile, to_json
from orca.planner.workload.tasks import TASKS as PAPER_TASKS

HELP = "plans for four latency bounds on real processes, beside a measured grid and the tuned baselines"

RUN_S = 28.0
"""Seconds of a run on average, start and stop included: of models of 60 M parameters on two cores."""

MOST_MIN = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add = parser.add_argument
    tasks = f"tasks of the ExeGPT paper, at a quarter of their lengths ({','.join(TASKS)})"
    add("--tasks", type=comma_separated(str), default=TASKS, metavar="A,B", help=tasks)
    answers = "answers of the steady state of a run, about; half of them for request_level, which is slow (%(default)s)"
    add("--requests", type=positive(int), default=150, metavar="N", help=answers)
    rounds = "rounds in which the plans and what they are compared with take turns (%(default)s)"
    add("--rounds", type=positive(int), default=2, metavar="N", help=rounds)
    grid = "batch sizes of the grid: of iteration with chunks, and of rra with two N_D (%(default)s)"
    add("--grid", type=positive(int), default=2, metavar="N", help=grid)
    most = "requests of the largest length that the KV cache has room for, a multiple of four (%(default)s)"
    add("--most", type=positive(int), default=48, metavar="N", help=most)
    add("--stages", type=positive(int), default=2, metavar="N", help="stages of all settings (%(default)s)")
    add("--tensor", type=positive(int), default=1, metavar="N", help="ranks of each stage (%(default)s)")
    margin = "tightens the bounds of the plans by so much, as `orca plan` does (%(default)g)"
    add("--margin-percent", type=not_negative(float), default=0.0, metavar="N", help=margin)
    add("--minutes", type=positive(float), default=5.0, metavar="N", help="time to measure a profile (%(default)s)")
    keep = "keep profiles and runs there; what is there already is not measured again, so a killed bench goes on"
    add("--keep", type=Path, metavar="FOLDER", help=keep)
    add_output_options(parser, can_plot=False)


def act(options: argparse.Namespace) -> int | None:
    """Measure all models and tasks, and show the plans. Raises: SettingError, ModelError, OrcaError."""
    _check(options)
    _make_folder(options.keep)
    check_shapes(options)
    kept = KeptRuns(options.keep / "runs.jsonl" if options.keep is not None else None)
    results = []
    with TemporaryDirectory(prefix="orca-plan-") as scratch:
        folder = Path(scratch)
        run = RealRuns(kept, folder, options.requests, report)
        models = chosen_models(options, folder)
        report(estimate(len(models), options, len(kept)))
        cases = list(_cases(options, models))
        for number, case in enumerate(cases, start=1):
            results += compare_case(case, run, grid=options.grid, rounds=options.rounds, report=report)
            if run.measured and number < len(cases):
                minutes = run.seconds / run.measured * _runs_of(options) * (len(cases) - number) / 60
                report(f"{number} of {len(cases)} models and tasks done; up to {minutes:.0f} minutes for the rest")
    print("\n".join(table.lines(results)))
    write_json(options.json, table.to_json(results))
    write_figures(options, table.figures(results))
    return None


def _check(options: argparse.Namespace) -> None:
    if unknown := [task for task in options.tasks if task not in PAPER_TASKS]:
        raise SettingError(f"--tasks {unknown[0]} is not one of {', '.join(PAPER_TASKS)}")
    if options.margin_percent >= 100:
        raise SettingError(f"--margin-percent {options.margin_percent:g} is not below 100")
    if options.most < MOST_MIN or options.most % BATCH_STEP:
        raise SettingError(f"--most {options.most} is not a multiple of {BATCH_STEP} from {MOST_MIN} on")


def _make_folder(folder: Path | None) -> None:
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--keep {folder}: {error.strerror}") from error


def estimate(models: int, options: argparse.Namespace, kept: int) -> str:
    """Return how long all will take, roughly. Args: kept: runs that were measured before."""
    runs = max(models * len(options.tasks) * _runs_of(options) - kept, 0)
    minutes = models * options.minutes + runs * RUN_S / 60
    return (
        f"about {minutes:.0f} minutes: {models} profiles of up to {options.minutes:g} minutes, and about {runs} runs of"
        f" {RUN_S:.0f} s; leave the machine to them"
    )


def _runs_of(options: argparse.Namespace) -> int:
    """Return about how many runs a model and task has: about half of the settings of the rounds are the same."""
    survey = len(BOUNDS) + DEFAULT_SIZES + 3 * int(options.grid)
    return survey + int(options.rounds) * len(BOUNDS) * len(SYSTEMS) // 2


def _cases(options: argparse.Namespace, models: Sequence[Path]) -> Iterator[RealCase]:
    for model in models:
        profile = _profile(options, model)
        for task in options.tasks:
            yield RealCase(
                model=model,
                profile=profile,
                task=task,
                stages=options.stages,
                ranks=options.tensor,
                most=options.most,
                margin_percent=options.margin_percent,
            )


def _profile(options: argparse.Namespace, model: Path) -> Profile:
    """Return the kept profile of a model, or measure it. Raises: SettingError for a kept one of something else."""
    file = None if options.keep is None else options.keep / f"profile-{model.name}.json"
    devices = options.stages * options.tensor
    if file is not None and file.exists():
        profile = read_profile(file)
        try:
            check_profile(profile, model, ranks=(options.tensor,), devices=devices, threads=1)
        except SettingError as error:
            raise SettingError(
                f"--keep: {file} is of another measurement, so choose another folder: {error}"
            ) from error
        return profile
    profile = measured_profile(model, ranks=(options.tensor,), devices=devices, threads=1, minutes=options.minutes)
    if file is not None:
        write_whole(file, to_json(profile))
    return profile
