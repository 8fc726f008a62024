"""Turns the system's own logs into records of a history. Incomplete and unknown lines are left out."""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from checker.history.records import Claimed, GroupNews, Opening, Ran

NEWS = {
    "epoch over": "over",
    "seat taken": "seat",
    "epoch formed": "formed",
    "first commit": "commit",
    "pool away": "away",
    "pool back": "back",
    "a rank died": "death",
    # A rank cannot run a step. Its peers, which lose their link to it, say otherwise.
    "the epoch broke": "broke",
}
CLAIMED = "request claimed"
_DEATH = re.compile(r"^(\S+Z) (\S+) (was killed by \w+|exited with code \d+);", re.MULTILINE)


def read_logs(folder: Path, opening: Opening) -> list[Claimed | GroupNews]:
    """Return claims and reports of all parts from `*.log`, in the order of time."""
    lines = ((path.stem, line) for path in sorted(folder.glob("*.log")) for line in _json_lines(path))
    records = [record for name, line in lines if (record := _record(name, line, opening))]
    return sorted(records, key=lambda record: record.at)


def read_deaths(output: str, opening: Opening) -> list[GroupNews]:
    """Return the deaths that `orca up` reported, in the order of time."""
    return [
        GroupNews(at=_at(time, opening), group=part, what="death", reason=how)
        for time, part, how in _DEATH.findall(output)
    ]


def read_iterations(folder: Path, *, since: float, at: float) -> Ran:
    """Return all requests of iterations since a time of the same monotonic clock.

    The last lines of a killed scheduler may be missing.
    """
    lines = (line for path in folder.glob("scheduler-*.jsonl") for line in _json_lines(path))
    recent = (line for line in lines if line.get("submitted_ns", 0) >= since * 1e9)
    return Ran(at=at, requests=tuple(sorted({row[0] for line in recent for row in line.get("rows", ())})))


def _record(name: str, line: dict[str, Any], opening: Opening) -> Claimed | GroupNews | None:
    # The gateway adds more after "pool away".
    message = str(line.get("message")).partition(",")[0]
    if message != CLAIMED and message not in NEWS:
        return None
    at = _at(line["time"], opening)
    if message == CLAIMED:
        return Claimed(at=at, request=line["request_id"], claim=line["claim"], logged=line["logged"])
    return GroupNews(at=at, group=name, what=NEWS[message], epoch=line.get("epoch"), reason=_reason(line))


def _reason(line: dict[str, Any]) -> str | None:
    error = str(line.get("exception_text", "")).strip().rpartition("\n")[2]
    return line.get("reason") or line.get("detail") or error or None


def _at(time: str, opening: Opening) -> float:
    """Convert the wall-clock time of a log to the history's monotonic time."""
    return opening.at + datetime.fromisoformat(time).timestamp() - opening.wall_s


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
