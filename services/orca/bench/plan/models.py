"""The models that `orca bench plan` measures, and their profiles."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from orca.bench.options import comma_separated
from orca.cli.model_folder import find_model
from orca.core.domain.errors import SettingError
from orca.planner.profile.profile import Profile

SHAPES = ("llama-63m", "t5-60m")
"""Names of shapes of peers/model.py."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the models."""
    shown = f"shapes of random models, comma-separated ({','.join(SHAPES)})"
    parser.add_argument("--shapes", type=comma_separated(str), default=SHAPES, metavar="A,B", help=shown)
    parser.add_argument("--model", metavar="DIR", help="a model instead of these shapes")


def check_shapes(options: argparse.Namespace) -> None:
    """Check that all shapes are known, where no model stands instead of them. Raises: SettingError."""
    if options.model is not None:
        return
    from orca.bench.peers.model import SHAPES as KNOWN  # torch and safetensors: only here

    if unknown := [name for name in options.shapes if name not in KNOWN]:
        raise SettingError(f"--shapes {unknown[0]} is not one of {', '.join(KNOWN)}")


def chosen_models(options: argparse.Namespace, folder: Path) -> list[Path]:
    """Return the folders of the models. Args: folder: for models that are made. Raises: ModelError, SettingError."""
    if options.model is not None:
        return [find_model(options.model)[0]]
    from orca.bench.peers.compare import make_random_model  # torch and safetensors: only here

    return [make_random_model(name, folder, report) for name in options.shapes]


def measured_profile(
    model: Path, *, ranks: tuple[int, ...], devices: int, threads: int, minutes: float, host: bool = True
) -> Profile:
    """Measure a model in float32 on the processors.

    Args: host: measure also what the rest of Orca takes from the ranks.
    Raises: SettingError, ModelError, OrcaError.
    """
    from orca.cli.whole_profile import measure_whole  # torch: only here
    from orca.planner.profile.measuring.measure import MeasurePlan

    plan = MeasurePlan(
        model=model,
        dtype="float32",
        quantization=None,
        device="cpu",
        threads=threads,
        devices=devices,
        ranks=ranks,
        minutes=minutes,
        release=version("orca-serving"),
    )
    return measure_whole(plan, report, host=host)


def check_profile(profile: Profile, model: Path, *, ranks: tuple[int, ...], devices: int, threads: int) -> None:
    """Check that `measured_profile` would measure the same here. Raises: SettingError for the first difference."""
    from orca.core.domain.model import load_model_info
    from orca.planner.profile.measuring.model_key import profile_key

    info = load_model_info(model, dtype="float32")
    release = version("orca-serving")
    profile.check_key(profile_key(info, device="cpu", threads=threads, ranks=ranks, devices=devices, release=release))


def report(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)
