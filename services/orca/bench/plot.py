"""Pictures of curves for `--plot`. matplotlib comes with the extra `bench` and is imported here only."""

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from orca.bench.curve import CurvePoint
from orca.bench.engine import BatchTime

LINE_STYLES = {"iteration": "-o", "request_level": "--s", "rra": "-.^"}


def plot_curves(points: Sequence[CurvePoint], file: Path, *, is_normalised: bool) -> None:
    """Draw median latency over throughput, one line per policy and max batch size (ORCA, Figures 10 and 11).

    Args:
        file: its suffix chooses the format: .png, .svg, .pdf.
    """
    with _axes(file) as axes:
        for label, curve in groupby(points, key=lambda point: point.curve):
            runs = list(curve)
            x = [point.report.requests_per_s for point in runs]
            y = [1000 * point.latency_s(is_normalised=is_normalised) for point in runs]
            axes.plot(x, y, LINE_STYLES[runs[0].policy], label=label, markersize=4)
        axes.set_xlabel("throughput (requests/s)")
        axes.set_ylabel("median normalised latency (ms/token)" if is_normalised else "median latency (ms)")
        # Beyond saturation, latencies grow without bound. On a linear axis, all other points would lie at its bottom.
        axes.set_yscale("log")


def plot_batches(times: Sequence[BatchTime], file: Path) -> None:
    """Draw the execution time of a batch over its size, one line per prompt length (ORCA, Figure 9).

    Args:
        file: its suffix chooses the format: .png, .svg, .pdf.
    """
    with _axes(file) as axes:
        for length, line in groupby(times, key=lambda time: time.batch.prompt_tokens):
            runs = list(line)
            x, y = [time.batch.requests for time in runs], [1000 * time.seconds for time in runs]
            axes.plot(x, y, "-o", label=f"prompts of {length} tokens", markersize=4)
        axes.set_xlabel("batch size (requests)")
        axes.set_ylabel("execution time (ms)")
        axes.set_ylim(bottom=0)


@contextlib.contextmanager
def _axes(file: Path) -> Iterator[Any]:
    """Yield axes to draw on, and write them to `file` afterwards."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    yield axes
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
