"""Options that several measurements share, and their meaning. The error of a bad value names the flag."""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import orjson

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import append
from orca.core.domain.errors import SettingError
from orca.planner.workload.lengths import Lengths, Range, parse_lengths
from orca.planner.workload.lengths_file import read_workload
from orca.planner.workload.tasks import TASKS, task_lengths, task_lines
from orca.planner.workload.trace import PRESETS, TraceSpec
from orca.planner.workload.workload import Workload

T = TypeVar("T")
Number = TypeVar("Number", int, float)

PICTURES = (".png", ".svg", ".pdf")
_LENGTHS = "N[:M[:MEAN:SD]]"


def comma_separated(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a reader of comma-separated values, such as `1,2,4`."""

    def read(text: str) -> tuple[T, ...]:
        return tuple(kind(part) for part in text.split(","))

    read.__name__ = f"list of {kind.__name__}"
    return read


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return a reader of a finite number above 0."""
    return _checked(kind, lambda value: value > 0, "is not above 0")


def not_negative(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return a reader of a finite number of at least 0."""
    return _checked(kind, lambda value: value >= 0, "is below 0")


def _checked(
    kind: Callable[[str], Number], is_good: Callable[[Number], bool], complaint: str
) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        value = kind(text)
        if value in (math.inf, -math.inf) or value != value:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if not is_good(value):
            raise argparse.ArgumentTypeError(f"{text} {complaint}")
        return value

    read.__name__ = kind.__name__
    return read


def program_path(text: str) -> Path:
    """Return the path of a program that is given by its path, or by its name on the PATH."""
    if (found := shutil.which(text)) is None:
        raise argparse.ArgumentTypeError(f"{text} is not a program that can run here")
    return Path(found)


def process_id(text: str) -> int:
    """Return the id of a process on this machine."""
    if not Path(f"/proc/{int(text)}").is_dir():
        raise argparse.ArgumentTypeError(f"there is no process {text}")
    return int(text)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a running server."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (%(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get("ORCA_API_KEY"), metavar="KEY", help="bearer token ($ORCA_API_KEY)"
    )


def add_trace_options(
    parser: argparse.ArgumentParser, *, preset: str | None, requests: int, lengths: tuple[int, int] | None = None
) -> None:
    """Add the options of the trace.

    Args:
        preset: the default one; None leaves out the option.
        lengths: defaults of prompt and new tokens if there is no preset.
    """
    add = parser.add_argument_group("trace").add_argument
    prompt, new = (None, None) if lengths is None else (Range(lengths[0], lengths[0]), Range(lengths[1], lengths[1]))
    parser.set_defaults(default_lengths=PRESETS[preset] if preset is not None else (prompt, new))
    if preset is not None:
        shown = "; ".join(f"{name}: prompts {p}, new tokens {n}" for name, (p, n) in PRESETS.items())
        add("--preset", choices=tuple(PRESETS), help=f"lengths ({shown}; default {preset})")
        parser.set_defaults(default_preset=preset)
    kinds = "uniform from N to M; with MEAN and SD (standard deviation), normal and cut off at N and M"
    add("--prompt-tokens", type=read_lengths, metavar=_LENGTHS, help=f"tokens of a prompt, {kinds}{_default(prompt)}")
    add("--new-tokens", type=read_lengths, metavar=_LENGTHS, help=f"tokens to generate, {kinds}{_default(new)}")
    tasks = "lengths of a task of the ExeGPT paper (Table 3): truncated normal, independent of each other"
    add("--task", choices=tuple(TASKS), help=tasks)
    file = (
        "lengths of past requests: CSV with the columns prompt,output, JSON lines with prompt_tokens and output_tokens"
    )
    add("--lengths", type=Path, metavar="FILE", help=f"{file}, or a public trace of Azure or Mooncake")
    scale = "factor of the lengths of --task and --lengths, for smaller models (1)"
    add("--lengths-scale", type=positive(float), metavar="X", help=scale)
    add("--requests", type=positive(int), default=requests, metavar="N", help="number of requests (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths, arrivals and prompts (%(default)s)")


def _default(lengths: Lengths | None) -> str:
    return "" if lengths is None else f" ({lengths})"


def read_lengths(text: str) -> Lengths:
    """Return the distribution of lengths that a text describes: `N`, `N:M`, or `N:M:MEAN:SD`."""
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _ChosenLengths:
    """The lengths that the options of a trace name."""

    prompts: Lengths
    outputs: Lengths
    text: str  # for figures
    joint: Workload | None = None  # of --lengths


def _chosen_lengths(options: argparse.Namespace) -> _ChosenLengths:
    """Return the lengths of a trace. Raises: SettingError if two options name them, or a file has bad lines."""
    given = [name for name in ("task", "lengths") if getattr(options, name) is not None]
    others = [name for name in ("preset", "prompt_tokens", "new_tokens") if getattr(options, name, None) is not None]
    if given and len(given + others) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given + others)
        raise SettingError(f"{flags} each name lengths: give one of them")
    if options.lengths_scale is not None and not given:
        raise SettingError("--lengths-scale is a factor of --task or --lengths: add one of them, or leave it out")
    scale = options.lengths_scale or 1.0
    if options.lengths is not None:
        joint = read_workload(options.lengths, scale=scale)
        return _ChosenLengths(joint.prompts, joint.outputs, joint.source, joint)
    if options.task is not None:
        try:
            both = task_lengths(options.task, scale)
        except ValueError as error:
            raise SettingError(f"--task {options.task}: {error}") from error
        return _ChosenLengths(*both, f"task {options.task}" + ("" if scale == 1 else f" x {scale:g}"))
    preset_name = getattr(options, "preset", None)
    preset = PRESETS[preset_name] if preset_name is not None else options.default_lengths
    prompts, outputs = options.prompt_tokens or preset[0], options.new_tokens or preset[1]
    is_preset = "preset" in options and options.prompt_tokens is None and options.new_tokens is None
    text = (preset_name or options.default_preset) if is_preset else f"{prompts} in, {outputs} out"
    return _ChosenLengths(prompts, outputs, text)


def trace_spec(options: argparse.Namespace, rate: float | None) -> TraceSpec:
    """Return the settings of the trace from the options, and print what its readers must know of the lengths.

    Raises: SettingError.
    """
    chosen = _chosen_lengths(options)
    notes = chosen.joint.lines() if chosen.joint is not None else []
    notes += task_lines(options.task, options.lengths_scale or 1.0) if options.task is not None else []
    if notes:
        print("\n".join(notes), file=sys.stderr)
    try:
        return TraceSpec(
            requests=options.requests,
            prompt_tokens=chosen.prompts,
            new_tokens=chosen.outputs,
            rate=rate,
            seed=options.seed,
            joint=chosen.joint,
        )
    except ValueError as error:
        raise SettingError(str(error)) from error


def trace_settings(options: argparse.Namespace, rate: float | None) -> dict[str, Setting]:
    """Return the settings that distinguish figures of different traces: load and lengths."""
    load = "all at once" if rate is None else f"{rate:g} request{'' if rate == 1 else 's'}/s"
    return {"load": load, "lengths": _chosen_lengths(options).text}


def add_output_options(parser: argparse.ArgumentParser, *, can_plot: bool) -> None:
    """Add the options of output files. A file that cannot be written is refused before a long run, not after it."""
    add = parser.add_argument_group("output").add_argument
    add("--json", type=_output_file, metavar="FILE", help="write all figures to FILE")
    add_figures_option(parser)
    if can_plot:
        shown = ", ".join(PICTURES)
        add("--plot", type=_picture_file, metavar="FILE", help=f"draw the curves into FILE ({shown}; needs matplotlib)")


def add_figures_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that stores figures for the benchmark pages."""
    shown = "append figures to FILE, with processor, commit and command (services/orca/bench/results/NAME.jsonl)"
    parser.add_argument("--figures", type=_output_file, metavar="FILE", help=shown)


def _output_file(text: str) -> Path:
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file} cannot be written to")
    return file


def _picture_file(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} does not end in {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("pictures need matplotlib: pip install 'orca-serving[bench]'")
    return _output_file(text)


def write_json(file: Path | None, content: object) -> None:
    """Write figures to the file of `--json`, if there is one."""
    if file is not None:
        file.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_figures(options: argparse.Namespace, found: Iterable[Measured], device: str | None = None) -> None:
    """Append figures to the file of `--figures`, if there is one.

    Args: device: the measured device; None for the processor of this machine.
    """
    append(options.figures, found, words=options.words, device=device)
