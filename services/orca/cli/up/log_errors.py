"""Shows on the terminal what the processes log as errors, and reads out of their logs what else people should know."""

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
"""Of every record; the others are its `extra`."""
REDIS_TIME = "%d %b %Y %H:%M:%S.%f"
INSIDE_TRACEBACK = re.compile(
    r"(?: *[|+] )?(?:  (?! *[|+] )|(?:Exception Group )?Traceback \(most recent call last\))"
    r"| *\+-|During handling of the above exception|The above exception was the direct cause"
)
"""How its lines begin but the last; those of a group of exceptions have a margin."""


async def follow_errors(
    logs: Sequence[tuple[str, Path]], tell: Callable[[str], None], note_break: Callable[[str, int, str], object]
) -> None:
    """Read what is written to the (name, log file) pairs from now on. Runs until cancelled.

    Args:
        tell: gets each error as a sentence.
        note_break: gets the name of a scheduler, the number of an epoch that is over, and why its group broke up or did
            not form.
    """
    followers = [(name, Follower(path)) for name, path in logs]
    while True:
        for name, follower in followers:
            for line in follower.new_lines():
                if message := error_message(line):
                    tell(f"{name}: {message}")
                if broken := broken_epoch(line):
                    note_break(name, *broken)
        await asyncio.sleep(POLL_S)


def error_message(line: bytes | str) -> str | None:
    """What an error line says, with the last line of its exception; None for all other lines."""
    record = _record(line)
    if record is None or record.get("level") not in ERRORS:
        return None
    exception = _last_line(record.get("exception") or "")
    return f"{record.get('message', '')}{f' ({exception})' if exception else ''}"


def broken_epoch(line: bytes | str) -> tuple[int, str] | None:
    """The number of an epoch and why it ended, from the scheduler's line that says so; None for all other lines."""
    record = _record(line)
    if record is None or record.get("message") != "epoch over":
        return None
    return int(record["epoch"]), str(record.get("reason"))


def readable(line: str) -> str | None:
    """A warning or an error as `12:00:01Z message (epoch=3)`, what is no log record as it is; None for the rest.

    Always one line: of a traceback, that of the exception.
    """
    record = _record(line)
    if record is None:
        return None if INSIDE_TRACEBACK.match(line) else line.rstrip() or None
    if record.get("level") not in WARNINGS:
        return None
    extra = ", ".join(f"{key}={_last_line(value)}" for key, value in record.items() if key not in FIELDS)
    said = str(error_message(line) or record.get("message", "")).replace("\n", " ")
    return f"{str(record.get('time', ''))[11:19]}Z {said}{f' ({extra})' if extra else ''}"


def written_at(line: str) -> datetime | None:
    """When a line of core.process.logs or of Redis was written; None when it does not say."""
    record = _record(line)
    try:
        if record is not None:
            return datetime.fromisoformat(str(record.get("time"))).astimezone()
        # `7:M 21 Nov 2026 15:11:43.123 * Ready`, by the clock of the machine's own zone.
        return datetime.strptime(" ".join(line.split()[1:5]), REDIS_TIME).astimezone()
    except ValueError:
        return None


def _last_line(value: object) -> str:
    return str(value).strip().rpartition("\n")[2]


def _record(line: bytes | str) -> dict[str, Any] | None:
    """One line of core.process.logs; None when it is something else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "level" in record else None


class Follower:
    """Reads a growing file from its present end on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """Whole lines added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            read = file.read()
        self._place += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        return lines
