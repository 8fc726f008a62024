"""Shows on the terminal what the processes log as errors, and reads out of their logs what else people should know."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

POLL_S = 0.5
ERRORS = frozenset({"error", "critical"})
WARNINGS = ERRORS | {"warning"}
FIELDS = frozenset({"time", "level", "logger", "service", "message", "exception"})
"""Of every record; the others are its `extra`."""


async def follow_errors(
    logs: Sequence[tuple[str, Path]], tell: Callable[[str], None], note_reason: Callable[[str, str], object]
) -> None:
    """Read what is written to the (name, log file) pairs from now on. Runs until cancelled.

    Args:
        tell: gets each error as a sentence.
        note_reason: gets the name of a scheduler, and why its group broke up or did not form.
    """
    followers = [(name, Follower(path)) for name, path in logs]
    while True:
        for name, follower in followers:
            for line in follower.new_lines():
                if message := error_message(line):
                    tell(f"{name}: {message}")
                if reason := break_reason(line):
                    note_reason(name, reason)
        await asyncio.sleep(POLL_S)


def error_message(line: bytes | str) -> str | None:
    """What an error line says, with the last line of its exception; None for all other lines."""
    record = _record(line)
    if record is None or record.get("level") not in ERRORS:
        return None
    exception = str(record.get("exception") or "").strip().rpartition("\n")[2]
    return f"{record.get('message', '')}{f' ({exception})' if exception else ''}"


def break_reason(line: bytes | str) -> str | None:
    """Why an epoch ended, from the scheduler's line that says so; None for all other lines."""
    record = _record(line)
    if record is None or record.get("message") != "epoch over":
        return None
    return str(record.get("reason"))


def readable(line: str) -> str | None:
    """A warning or an error as `12:00:01Z message (epoch=3)`, what is no log record as it is; None for the rest."""
    record = _record(line)
    if record is None:
        return line.rstrip() or None
    if record.get("level") not in WARNINGS:
        return None
    extra = ", ".join(f"{key}={value}" for key, value in record.items() if key not in FIELDS)
    said = error_message(line) or record.get("message", "")
    return f"{str(record.get('time', ''))[11:19]}Z {said}{f' ({extra})' if extra else ''}"


def _record(line: bytes | str) -> dict[str, Any] | None:
    """One line of core.logs; None when it is something else."""
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
