"""The report on a plan: what the Jobs of the operator (`orca plan`, `orca follow`) tell it beside the plan itself."""

from dataclasses import asdict, dataclass

from orca.core.domain.errors import SettingError
from orca.core.strict_record import record_from_json, record_to_json

TEXT_MAX = 1000
"""Most characters of a text for people."""

NUMBER_MAX = 1e9
"""Largest latency in seconds, and largest throughput."""

LENGTH_MAX = 2**31 - 1
"""Largest length, and most answers."""

NUMBER_LEAST = 1e-9
"""Least number above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFigures:
    """Predicted figures of a plan, latencies at the percentile of the goal. A latency without end is null."""

    throughput: float  # requests per second of a group
    latency_s: float | None
    ttft_s: float | None
    tpot_s: float | None

    def __post_init__(self) -> None:
        """Raises: ValueError for a number that makes no sense."""
        _check_numbers(self, NUMBER_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLengths:
    """Lengths of requests, in tokens."""

    answers: int  # that were counted; 0 if the lengths are stated
    prompt_mean: float
    output_mean: float
    output_p99: int

    def __post_init__(self) -> None:
        """Raises: ValueError for a number that makes no sense."""
        _check_numbers(self, LENGTH_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan that is to be in force, on the lengths of now."""

    planned_lengths: ReportedLengths  # that the plan was made for
    lengths: ReportedLengths  # of now
    predicted: ReportedFigures | None  # of the plan on the lengths of now; null: it cannot serve them
    is_met: bool  # the plan meets the goal on the lengths of now
    is_infeasible: bool  # no plan meets the goal
    is_new: bool  # it was not in force before
    reason: str  # of the last decision, for people
    recommended: str | None  # a better plan in one line, which was not put in force; null: there is none

    def __post_init__(self) -> None:
        """Raises: ValueError for a text that people cannot read."""
        for name in ("reason", "recommended"):
            if (text := getattr(self, name)) is not None:
                check_line(name, text)


def one_line(text: str) -> str:
    """Return a text as one printable line of at most TEXT_MAX characters; a longer one is cut and ends with `...`."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= TEXT_MAX else f"{line[: TEXT_MAX - 3]}..."


def check_line(name: str, text: str) -> None:
    """Raises: ValueError that names a text which is no printable line of at most TEXT_MAX characters."""
    if not (0 < len(text) <= TEXT_MAX and text.isprintable()):
        raise ValueError(f"{name} must be one line of at most {TEXT_MAX} characters")


def _check_numbers(record: ReportedFigures | ReportedLengths, most: float) -> None:
    for name, value in asdict(record).items():
        if value is not None and value != 0 and not NUMBER_LEAST <= value <= most:
            raise ValueError(f"{name} must be 0 or from {NUMBER_LEAST:g} to {most:g}, not {value:g}")


def report_to_text(report: PlanReport) -> str:
    """Return the file of a report."""
    return record_to_json(report).decode()


def read_report(text: str) -> PlanReport:
    """Read the file of a report. Raises: ValueError that names the field that is wrong."""
    try:
        return record_from_json(PlanReport, text.encode(), "the report")
    except SettingError as error:
        raise ValueError(str(error)) from error
