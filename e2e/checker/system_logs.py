"""What the system's own logs say, as records of a history. Lines that are cut or unknown are passed."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from checker.history import Claimed, GroupNews, Opening, Ran

NEWS = {"epoch over": "over", "seat taken": "seat", "epoch formed": "formed"}


def read_scheduler_logs(folder: Path, opening: Opening) -> list[Claimed | GroupNews]:
    """Claims, and what became of groups, from `scheduler-*.log`, in time."""
    lines = ((path.stem, line) for path in sorted(folder.glob("scheduler-*.log")) for line in _json_lines(path))
    records = [record for name, line in lines if (record := _record(name, line, opening))]
    return sorted(records, key=lambda record: record.at)


def read_iterations(folder: Path, *, since: float, at: float) -> Ran:
    """All requests that were part of an iteration since a moment.

    Its times are of the same monotonic clock. A scheduler that was killed may have taken its last lines along.
    """
    lines = (line for path in folder.glob("scheduler-*.jsonl") for line in _json_lines(path))
    recent = (line for line in lines if line.get("submitted_ns", 0) >= since * 1e9)
    return Ran(at=at, requests=tuple(sorted({row[0] for line in recent for row in line.get("rows", ())})))


def _record(name: str, line: dict[str, Any], opening: Opening) -> Claimed | GroupNews | None:
    message = line.get("message")
    if message != "request claimed" and message not in NEWS:
        return None
    # Their clock is the wall's, the history's is monotonic.
    at = opening.at + datetime.fromisoformat(line["time"]).timestamp() - opening.wall_s
    if message == "request claimed":
        return Claimed(at=at, request=line["request_id"], claim=line["claim"], logged=line["logged"])
    return GroupNews(at=at, group=name, what=NEWS[message], epoch=line["epoch"], reason=line.get("reason"))


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
