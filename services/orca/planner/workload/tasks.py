"""The tasks of ExeGPT as workloads (section 7.1, Table 3): truncated normal lengths, both from 1 to their maximum.

The paper gives mean and standard deviation of the lengths, which are moments after truncation. A normal distribution
that is cut off has other moments, so the parameters of the whole distribution are fitted to them. The outputs' 99th
percentiles of the paper confirm this reading.

The deviations of two inputs cannot be such moments: S has 252 on 1 to 512 and T has 81 on 1 to 256, and even a uniform
distribution has only 148 and 74. They are used as the parameters of the whole distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import exp, sqrt
from types import MappingProxyType

from orca.planner.workload.lengths import TruncatedNormal
from orca.planner.workload.workload import Workload

TOLERANCE = 1e-4
"""Largest relative difference between a moment of the fitted lengths and that of the task."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation of lengths from 1 to `high`, as Table 3 gives them."""

    mean: float
    deviation: float
    high: int

    def scaled(self, factor: float) -> "Moments":
        return Moments(self.mean * factor, self.deviation * factor, max(round(self.high * factor), 1))

    @property
    def uniform_deviation(self) -> float:
        """The deviation of a uniform distribution: no normal distribution that is cut off at both ends has as much."""
        return sqrt((self.high**2 - 1) / 12)


@dataclass(frozen=True, slots=True)
class ExeGptTask:
    """A row of Table 3."""

    name: str
    inputs: Moments
    outputs: Moments
    are_inputs_parent: bool = False  # the inputs' moments are those of the whole distribution, before truncation


TASKS: Mapping[str, ExeGptTask] = MappingProxyType(
    {
        "S": ExeGptTask("summarization", Moments(256, 252, 512), Moments(32, 13, 80), are_inputs_parent=True),
        "T": ExeGptTask("translation", Moments(128, 81, 256), Moments(128, 68, 320), are_inputs_parent=True),
        "G": ExeGptTask("code generation", Moments(64, 23, 128), Moments(192, 93, 480)),
        "C1": ExeGptTask("conversation, short answers", Moments(256, 115, 512), Moments(64, 30, 160)),
        "C2": ExeGptTask("conversation, long answers", Moments(512, 252, 1024), Moments(256, 134, 640)),
    }
)
"""Task ID of Table 3 -> its lengths."""

PAPER_P99: Mapping[str, int] = MappingProxyType({"S": 63, "T": 292, "G": 417, "C1": 137, "C2": 579})
"""The outputs' 99th percentiles in Table 3."""


def task_lengths(task: str, scale: float = 1.0) -> tuple[TruncatedNormal, TruncatedNormal]:
    """Return the distributions of prompt and output tokens of a task.

    Args: scale: factor of mean, deviation and maximum, for smaller models.
    Raises: ValueError for an unknown task, or for a scale that leaves lengths without a distribution.
    """
    if task not in TASKS:
        raise ValueError(f"the tasks are {', '.join(TASKS)}, not {task!r}")
    row = TASKS[task]
    if not 0 < scale <= 100 or row.outputs.scaled(scale).high < 8:
        raise ValueError(
            f"the scale of a task's lengths must leave outputs of 8 tokens and is at most 100, not {scale:g}"
        )
    inputs = row.inputs.scaled(scale)
    if row.are_inputs_parent:
        prompts = TruncatedNormal(mean=inputs.mean, deviation=inputs.deviation, low=1, high=inputs.high)
    else:
        prompts = fit_truncated(inputs)
    return prompts, fit_truncated(row.outputs.scaled(scale))


def task_workload(task: str, scale: float = 1.0, *, rate: float | None = None) -> Workload:
    """Return the workload of a task. Raises: ValueError as `task_lengths` does."""
    prompts, outputs = task_lengths(task, scale)
    scaled = "" if scale == 1 else f" x {scale:g}"
    return Workload.of_lengths(prompts, outputs, source=f"task {task}{scaled}", rate=rate)


def task_lines(task: str, scale: float = 1.0) -> list[str]:
    """Return what a report states about a task: fitted parents, and inputs that cannot be moments."""
    row = TASKS[task]
    prompts, outputs = task_lengths(task, scale)
    wanted, given = row.outputs.scaled(scale), row.inputs.scaled(scale)
    fitted = "mean {0.mean:g} and deviation {0.deviation:g} of Table 3 are moments after truncation; fitted parent {1}"
    lines = [f"task {task} ({row.name}), outputs: {fitted.format(wanted, outputs)}"]
    if row.are_inputs_parent:
        lines.append(
            f"task {task}, inputs: the deviation {given.deviation:g} cannot be a moment on 1 to {given.high}, where a "
            f"uniform distribution has {given.uniform_deviation:.0f}; used as parameter of the parent {prompts}"
        )
    else:
        lines.append(f"task {task}, inputs: {fitted.format(given, prompts)}")
    return lines


@lru_cache(maxsize=256)
def fit_truncated(moments: Moments) -> TruncatedNormal:
    """Return the truncated normal lengths, rounded to whole numbers, that have these moments.

    Newton's method on the mean and the logarithm of the deviation.
    Raises: ValueError if it finds none whose mean lies within the range.
    """
    high = moments.high
    mean, deviation = moments.mean, min(moments.deviation, high / 2)
    try:
        for _ in range(50):
            found = _moments(mean, deviation, high)
            missing = moments.mean - found[0], moments.deviation - found[1]
            if abs(missing[0]) <= TOLERANCE * moments.mean and abs(missing[1]) <= TOLERANCE * moments.deviation:
                return TruncatedNormal(mean=mean, deviation=deviation, low=1, high=high)
            step = 1e-4
            by_mean = _moments(mean + step * deviation, deviation, high)
            by_deviation = _moments(mean, deviation * (1 + step), high)
            slopes = [
                [(after - before) / step for before, after in zip(found, other, strict=True)]
                for other in (by_mean, by_deviation)
            ]
            determinant = slopes[0][0] * slopes[1][1] - slopes[1][0] * slopes[0][1]
            by_deviations = (missing[0] * slopes[1][1] - missing[1] * slopes[1][0]) / determinant
            by_factor = (missing[1] * slopes[0][0] - missing[0] * slopes[0][1]) / determinant
            damping = min(1.0, 0.5 / max(abs(by_factor), abs(by_deviations), 0.5))
            mean += damping * by_deviations * deviation
            deviation *= exp(damping * by_factor)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise _no_fit(moments) from error
    raise _no_fit(moments)


def _no_fit(moments: Moments) -> ValueError:
    return ValueError(
        f"no truncated normal distribution on 1 to {moments.high} has the mean {moments.mean:g} and the deviation "
        f"{moments.deviation:g}; a uniform one has a deviation of {moments.uniform_deviation:.1f}"
    )


def _moments(mean: float, deviation: float, high: int) -> tuple[float, float]:
    shares = TruncatedNormal(mean=mean, deviation=deviation, low=1, high=high).pmf()
    found = sum(length * share for length, share in shares.items())
    return found, sqrt(sum((length - found) ** 2 * share for length, share in shares.items()))
