"""core.process.logs: the format of log lines."""

import io
import logging
from typing import Any

import orjson
import pytest

from orca.core.process.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(stream: io.StringIO) -> dict[str, Any]:
    [line] = stream.getvalue().splitlines()
    return orjson.loads(line)


def test_a_json_line_carries_service_level_message_and_every_extra_field() -> None:
    configure_logging("gateway", stream=(stream := io.StringIO()))
    logging.getLogger("orca").warning("request %s", "ended", extra={"request_id": "r.0", "claim": 3, "step": None})
    line = logged(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "orca",
        "service": "gateway",
        "message": "request ended",
        "request_id": "r.0",
        "claim": 3,
    }


def test_an_exception_is_one_field_of_one_line() -> None:
    configure_logging("worker-1", fmt="json", stream=(stream := io.StringIO()))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("orca").exception("the step failed")
    exception = logged(stream)["exception"]
    assert exception.startswith("Traceback")
    assert exception.endswith("ValueError: two\nlines")


def test_an_extra_field_cannot_replace_a_field_of_the_line() -> None:
    configure_logging("gateway", fmt="json", stream=(stream := io.StringIO()))
    logging.getLogger("orca").info("true", extra={"service": "false", "level": "false"})
    assert (logged(stream)["service"], logged(stream)["level"]) == ("gateway", "info")


def test_values_that_json_cannot_hold_are_written_as_text() -> None:
    configure_logging("gateway", fmt="json", stream=(stream := io.StringIO()))
    logging.getLogger("orca").info("odd", extra={"error": OSError("gone"), "sizes": {1: 2}})
    assert (logged(stream)["error"], logged(stream)["sizes"]) == ("gone", {"1": 2})


def test_a_terminal_gets_one_readable_line() -> None:
    configure_logging("worker-0", stream=(stream := Terminal()))
    logging.getLogger("orca").info("joined\nnow", extra={"epoch": 4})
    [line] = stream.getvalue().splitlines()
    assert line.endswith("INFO    worker-0 joined\\nnow (epoch=4)")


def test_configuring_again_replaces_the_handlers() -> None:
    configure_logging("first", stream=(first := io.StringIO()))
    configure_logging("second", level="ERROR", stream=(second := io.StringIO()))
    logging.getLogger("orca").warning("below the level")
    logging.getLogger("orca").error("above")
    assert first.getvalue() == ""
    assert logged(second)["service"] == "second"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'yaml' is not one of json, text, auto"):
        configure_logging("gateway", fmt="yaml")  # type: ignore[arg-type]
