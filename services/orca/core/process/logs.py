"""Log lines of every process: JSON for machines, one readable line for a person at a terminal.

A line is one event. Ids and numbers of a request or a step go into `extra`, never only into the message:

    log.info("request ended", extra={"request_id": request.id, "claim": claim.number, "epoch": epoch.number})

JSON fields: `time` (UTC, RFC 3339 with microseconds), `level`, `logger`, `service`, `message`, `exception` if there is
one (type, message and traceback in one string), and every key of `extra`.
"""

import io
import logging
import os
import stat
import sys
from datetime import UTC, datetime
from typing import IO, Any, Literal

import orjson

from orca.core.process.log_pipe import PipeHandler

Format = Literal["json", "text", "auto"]

# Attributes that logging itself puts on a record. All others came in through `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(
    service: str, *, fmt: Format = "auto", level: int | str = "INFO", stream: IO[str] | None = None
) -> None:
    """Send every log record of this process to `stream`, and drop any earlier configuration.

    Args:
        service: role and number of the process, such as `gateway` or `worker-0`; part of every line.
        fmt: "auto" is "text" when `stream` is a terminal and "json" otherwise.
        level: the lowest level that is written, by number or name.
        stream: standard error when None.
    Raises: ValueError when the format or the level is unknown.
    """
    if fmt not in ("json", "text", "auto"):
        raise ValueError(f"log format {fmt!r} is not one of json, text, auto")
    stream = sys.stderr if stream is None else stream
    is_text = stream.isatty() if fmt == "auto" else fmt == "text"
    handler = _handler(stream)
    handler.setFormatter(TextFormatter(service) if is_text else JsonFormatter(service))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(True)


def _handler(stream: IO[str]) -> logging.Handler:
    """Return a handler that writes directly to a file or memory, and through a queue to what may be read slowly."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return logging.StreamHandler(stream)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return logging.StreamHandler(stream)
    return PipeHandler(descriptor)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object. A value that JSON cannot hold is written as its `str`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "service": self._service,
            "message": record.getMessage(),
        }
        for key, value in _extra_of(record).items():
            # A field of the line wins over an `extra` of the same name.
            line.setdefault(key, value)
        if exception := self._exception(record):
            line["exception"] = exception
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()

    def _exception(self, record: logging.LogRecord) -> str | None:
        if record.exc_info and record.exc_info[0] is not None:
            return self.formatException(record.exc_info)
        return record.exc_text


class TextFormatter(logging.Formatter):
    """Formats `12:00:01.250 INFO worker-0 message (request_id=..., step=7)`: newlines escaped, a traceback below."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = _time_of(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        message = record.getMessage().replace("\n", "\\n")
        extra = ", ".join(f"{key}={value}" for key, value in _extra_of(record).items())
        line = f"{clock} {record.levelname:<7} {self._service} {message}{f' ({extra})' if extra else ''}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, tz=UTC)


def _extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of a record in the order given, without those that are None."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and value is not None}
