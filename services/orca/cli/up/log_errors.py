"""Reports the errors that processes log on the terminal, and reads when a group breaks up from the schedulers' logs."""

import asyncio
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

POLL_S = 0.5
ERRORS = frozenset({"error", "critical"})
WARNINGS = ERRORS | {"warning"}
FIELDS = frozenset({"time", "level", "logger", "service", "message", "exception"})
"""Fields that every record has; all others are its `extra`."""
REDIS_TIME = "%d %b %Y %H:%M:%S.%f"
INSIDE_TRACEBACK = re.compile(
    r"(?: *[|+] )?(?:  (?! *[|+] )|(?:Exception Group )?Traceback \(most recent call last\))"
    r"| *\+-|During handling of the above exception|The above exception was the direct cause"
)
"""Matches the start of each line of a traceback except the last. Lines of an exception group have a margin."""


async def follow_errors(
    logs: Sequence[tuple[str, Path]], report: Callable[[str], None], record_break: Callable[[str, int, str], object]
) -> None:
    """Follow the log files, given as (name, path), from their present end on. Runs until cancelled.

    Args:
        report: prints each error as a sentence.
        record_break: gets the name of a scheduler, the number of an epoch that is over, and the reason why its group
            broke up or did not form.
    """
    followers = [(name, LogFollower(path)) for name, path in logs]
    while True:
        for name, follower in followers:
            for line in follower.new_lines():
                if message := error_message(line):
                    report(f"{name}: {message}")
                if broken := broken_epoch(line):
                    record_break(name, *broken)
        await asyncio.sleep(POLL_S)


def error_message(line: bytes | str) -> str | None:
    """Return the message of an error line with the last line of its exception; None for all other lines."""
    record = _record(line)
    if record is None or record.get("level") not in ERRORS:
        return None
    exception = _last_line(record.get("exception") or "")
    return f"{record.get('message', '')}{f' ({exception})' if exception else ''}"


def broken_epoch(line: bytes | str) -> tuple[int, str] | None:
    """Return the number of an epoch that ended and the reason, from a scheduler's line; None for all other lines."""
    record = _record(line)
    if record is None or record.get("message") != "epoch over":
        return None
    return int(record["epoch"]), str(record.get("reason"))


def readable(line: str) -> str | None:
    """Return a warning or error as `12:00:01Z message (epoch=3)`, a line that is no record as it is, otherwise None.

    The result is one line: from a traceback, the line with the exception.
    """
    record = _record(line)
    if record is None:
        return None if INSIDE_TRACEBACK.match(line) else line.rstrip() or None
    if record.get("level") not in WARNINGS:
        return None
    extra = ", ".join(f"{key}={_last_line(value)}" for key, value in record.items() if key not in FIELDS)
    message = str(error_message(line) or record.get("message", "")).replace("\n", " ")
    return f"{str(record.get('time', ''))[11:19]}Z {message}{f' ({extra})' if extra else ''}"


def written_at(line: str) -> datetime | None:
    """Return when a line of core.process.logs or of Redis was written; None if the line has no time."""
    record = _record(line)
    try:
        if record is not None:
            return datetime.fromisoformat(str(record.get("time"))).astimezone()
        # `7:M 21 Nov 2026 15:11:43.123 * Ready`, in the machine's time zone.
        return datetime.strptime(" ".join(line.split()[1:5]), REDIS_TIME).astimezone()
    except ValueError:
        return None


def _last_line(value: object) -> str:
    return str(value).strip().rpartition("\n")[2]


def _record(line: bytes | str) -> dict[str, Any] | None:
    """Parse a line of core.process.logs; None if the line is something else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "level" in record else None


class LogFollower:
    """Reads what is appended to a file after its present end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """Return the whole lines that were appended since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            read = file.read()
        self._place += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        return lines
