"""The record of following a plan: what its last check has left, and what the operator notes beside it.

It is the content of a ConfigMap. Each change of it is one write, so it is never half of two records.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from orca.core.job_files import PLAN_FILE, REPORT_FILE
from orca.core.plan_report import PlanReport, read_report
from orca.core.strict_record import read_record, record_to_json
from orca.operator.domain.slo.planned import PlannedService, read_planned
from orca.pool.latency_counts import LatencyCounts, counts_from_json, counts_to_json

NOTES_FILE = "following.json"
"""The notes of the operator."""

READING_FILE = "latencies-before.json"
"""A reading of the pool's latencies soon after the plan came into force. All other files are those of the last check.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowNotes:
    """The notes of the operator on a plan in force."""

    check: int = 0  # number of the last check; 0: none was made yet
    checked_s: int = 0  # seconds since 1970 at which its result was taken; 0: none was made yet
    # Awake milliseconds of the pool at which all groups ran the plan; null until they do.
    since_ms: int | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError for a number below 0."""
        for name, value in (("check", self.check), ("checked_s", self.checked_s), ("since_ms", self.since_ms or 0)):
            if value < 0:
                raise ValueError(f"{name} must not be below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRecord:
    """The last check of a plan, and the notes of the operator."""

    notes: FollowNotes = FollowNotes()
    files: Mapping[str, str] = field(default_factory=dict)  # that the check has left; none before the first one
    # Latencies that the pool had counted when answers of other plans were over; None until they are. Later answers are
    # those of the plan.
    reading: LatencyCounts | None = None

    @property
    def data(self) -> dict[str, str]:
        """The content of the ConfigMap."""
        found = {**self.files, NOTES_FILE: record_to_json(self.notes).decode()}
        return found if self.reading is None else {**found, READING_FILE: counts_to_json(self.reading)}

    def after_check(self, files: Mapping[str, str], *, now_s: float, has_changed: bool) -> "FollowRecord":
        """Return the record with the result of the next check. Args: has_changed: another plan is in force with it."""
        since_ms, reading = (None, None) if has_changed else (self.notes.since_ms, self.reading)
        notes = FollowNotes(check=self.notes.check + 1, checked_s=int(now_s), since_ms=since_ms)
        return FollowRecord(notes=notes, files=dict(files), reading=reading)

    def since(self, awake_ms: int | None) -> "FollowRecord":
        """Return the record with the awake time from which on the plan runs; None: it does not run yet."""
        if awake_ms == self.notes.since_ms:
            return self
        return replace(self, notes=replace(self.notes, since_ms=awake_ms), reading=None)


def read_follow_record(data: Mapping[str, Any]) -> FollowRecord:
    """Read the content of the ConfigMap; the files are not read. Raises: ValueError that names what is wrong."""
    files = {name: str(text) for name, text in data.items() if name not in (NOTES_FILE, READING_FILE)}
    notes = _read_notes(str(data.get(NOTES_FILE, "")))
    if bool(files) != (notes.check > 0):
        raise ValueError("there are files of a check without its number, or the other way round")
    text = data.get(READING_FILE)
    return FollowRecord(notes=notes, files=files, reading=None if text is None else counts_from_json(str(text)))


def _read_notes(text: str) -> FollowNotes:
    """Read the notes; fields of another release do not matter. Raises: ValueError."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"{NOTES_FILE} is not an object")
    known = asdict(FollowNotes())
    return read_record(FollowNotes, known | {name: value for name, value in content.items() if name in known})


def read_checked(files: Mapping[str, str]) -> tuple[PlannedService, PlanReport]:
    """Read the plan that a check leaves in force, and its report. Raises: ValueError that names what is wrong."""
    if REPORT_FILE not in files:
        raise ValueError(f"there is no {REPORT_FILE}")
    return read_planned(files), read_report(files[REPORT_FILE])


def read_first(files: Mapping[str, str]) -> tuple[PlannedService, PlanReport | None]:
    """Read a first plan, and its report; None if a release without reports has made it. Raises: ValueError."""
    if PLAN_FILE not in files:
        raise ValueError(f"there is no {PLAN_FILE}")
    return read_planned(files), read_report(files[REPORT_FILE]) if REPORT_FILE in files else None
