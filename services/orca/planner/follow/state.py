"""The state of following a plan: one record, which outlives the process that follows."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orca.core.strict_record import read_record_file, record_from_json, record_to_json
from orca.planner.search.plan import Plan, PlannedFigures, PlannedWorkload
from orca.pool.measured import MeasuredFigures

VERSION = 1
"""Rises when the meaning or the fields of the state change."""


class Replan(StrEnum):
    """The fate of a new plan that the rules want."""

    AUTO = "auto"  # it is put in force
    RECOMMEND = "recommend"  # it is only recorded
    OFF = "off"  # none is searched


@dataclass(frozen=True, slots=True)
class Drift:
    """The lengths of now over those that the plan was made for: 1 is no drift."""

    prompt_mean: float
    output_mean: float
    output_p99: float

    def describe(self) -> str:
        """Return the drift in a few words: `output mean +50 %`."""
        words = (("prompt mean", self.prompt_mean), ("output mean", self.output_mean), ("output p99", self.output_p99))
        return ", ".join(f"{name} {100 * (ratio - 1):+.0f} %" for name, ratio in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowState:
    """The plan in force, how it does, and what would be better. Times are awake milliseconds of the pool."""

    version: int = VERSION
    plan: Plan | None = None  # in force; null until there is one
    since_ms: int | None = None  # it came into force then, which was the last change; null without a plan
    checked_ms: int | None = None  # the last check; null before the first one
    better_checks: int = 0  # checks in a row in which another plan would have brought 10 % more throughput
    workload: PlannedWorkload | None = None  # lengths of the last check
    predicted: PlannedFigures | None = None  # of the plan in force on them; null: it cannot serve them
    is_met: bool = False  # the plan in force meets the goal on them
    is_infeasible: bool = False  # no plan meets the goal on them; if none was searched, as of the search before
    measured: MeasuredFigures | None = None  # under the plan in force; null until answers were counted
    recommended: Plan | None = None  # that would be in force if this was left to the planner, or if more was known
    reason: str = ""  # of the last decision, for people

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version is {self.version}, this release reads {VERSION}")
        if (self.plan is None) != (self.since_ms is None):
            raise ValueError("plan and since_ms must both be there, or both be null")
        if self.better_checks < 0:
            raise ValueError("better_checks must not be below 0")

    @property
    def error(self) -> float | None:
        """Measured latency over the predicted one, minus 1; None if one of them is missing."""
        predicted = None if self.predicted is None else self.predicted.latency_s
        return None if self.measured is None or not predicted else self.measured.latency_s / predicted - 1

    @property
    def drift(self) -> Drift | None:
        """The change of lengths since the plan was made; None without a plan or a check."""
        if self.plan is None or self.workload is None:
            return None
        now, planned = self.workload, self.plan.workload
        return Drift(
            now.prompt_mean / planned.prompt_mean,
            now.output_mean / planned.output_mean,
            now.output_p99 / planned.output_p99,
        )

    def describe(self) -> str:
        """Return the plan in force in one line, with measured beside predicted figures."""
        if self.plan is None:
            return f"no plan: {self.reason}" if self.reason else "no plan"
        beside = "" if self.measured is None else f", {self.measured.describe()}"
        return self.plan.describe(self.predicted, beside=beside)


def state_to_json(state: FollowState) -> bytes:
    """Return the file of a state."""
    return record_to_json(state)


def state_from_json(text: bytes, name: str) -> FollowState:
    """Read a state. Args: name: of the file, for errors. Raises: SettingError that names the field that is wrong."""
    return record_from_json(FollowState, text, f"state {name}")


def read_state(file: Path) -> FollowState:
    """Read the file of a state. Raises: SettingError if it cannot be read, or has a wrong field."""
    return read_record_file(FollowState, file, "state")
