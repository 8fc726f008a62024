"""core.process.log_pipe: logging into a pipe that nobody reads."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator

import orjson
import pytest

from orca.core.process.log_pipe import PipeHandler
from orca.core.process.logs import JsonFormatter
from support.waiting import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its ends for reading and writing, the writing one closed by the end of the process."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def logger_into(descriptor: int, queue_bytes_max: int) -> tuple[logging.Logger, PipeHandler]:
    handler = PipeHandler(descriptor, queue_bytes_max=queue_bytes_max)
    handler.setFormatter(JsonFormatter("gateway"))
    logger = logging.Logger("orca.test")
    logger.addHandler(handler)
    return logger, handler


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    logger, handler = logger_into(writing, 1 << 20)
    for number in range(100):
        logger.info("%d", number)
    handler.flush()
    lines = os.read(reading, 1 << 16).splitlines()
    assert [orjson.loads(line)["message"] for line in lines] == [str(number) for number in range(100)]


def test_an_unread_pipe_drops_lines_without_blocking_and_reports_their_number(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    logger, _ = logger_into(writing, 100_000)
    began = time.monotonic()
    for _ in range(2_000):
        logger.info("x" * 1_000)
    assert time.monotonic() - began < 10
    found = bytearray()

    def lines_told_of() -> int:
        found.extend(os.read(reading, 1 << 20))
        whole = [orjson.loads(line) for line in found.splitlines(keepends=True) if line.endswith(b"\n")]
        return sum(line.get("lines_lost", 1) for line in whole)

    wait_until(lambda: lines_told_of() == 2_000, 30)
    assert b"log lines lost: nobody read them in time" in found


def test_a_pipe_that_another_process_set_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    logger, _ = logger_into(writing, 1 << 20)
    # More than a pipe holds.
    for number in range(1_000):
        logger.info("%d %s", number, "x" * 200)
    os.set_blocking(reading, False)
    found = bytearray()

    def has_all() -> bool:
        with contextlib.suppress(BlockingIOError):
            found.extend(os.read(reading, 1 << 16))
        return found.count(b"\n") == 1_000

    wait_until(has_all, 30)
    numbers = [int(orjson.loads(line)["message"].split()[0]) for line in found.splitlines()]
    assert numbers == list(range(1_000))


def test_a_pipe_without_a_reader_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    logger, handler = logger_into(writing, 1 << 20)
    logger.info("into the void")
    handler.flush()
    logger.info("again")
    handler.flush()
