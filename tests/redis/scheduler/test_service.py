"""The scheduler as a process: how it starts, refuses to start, and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orca.pool.redis.embedded import EmbeddedRedis
from orca.scheduler.service import main

MODEL = Path(__file__).parents[3] / "services" / "orca" / "cli" / "small_model" / "orca-austen"


def silent_address() -> str:
    """An address where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as server:
        yield server


@pytest.fixture
def process(redis: EmbeddedRedis) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a scheduler against an embedded Redis, and ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "orca.scheduler.service", "--model", str(MODEL), "--pool", redis.url]
        command += ["--stages", silent_address(), "--log-format", "json", *flags]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()


def wait_for(child: subprocess.Popen[str], *messages: str) -> dict[str, object]:
    """Read log lines until one says one of the messages; fail when the process ends before."""
    assert child.stderr is not None
    seen = []
    for line in child.stderr:
        seen.append(line)
        if (fields := json.loads(line))["message"] in messages:
            return dict(fields)
    raise AssertionError(f"none of {messages} in\n{''.join(seen)}")


def test_a_bad_setting_is_exit_status_2_and_names_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(MODEL), "--stages", "h:1", "--prefetch", "7"]) == 2
    assert "prefetch" in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--stages", "h:1"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_sigterm_releases_the_seat_so_that_a_successor_takes_it_at_once(
    process: Callable[..., subprocess.Popen[str]],
) -> None:
    first = process()
    assert wait_for(first, "seat taken")["epoch"] == 1
    first.send_signal(signal.SIGTERM)
    assert wait_for(first, "left")["group"] == "g0"
    assert first.wait(10) == 0
    second = process()
    assert wait_for(second, "seat taken")["epoch"] == 2


def test_a_killed_schedulers_seat_is_free_at_once_for_a_process_that_saw_it_exit(
    process: Callable[..., subprocess.Popen[str]],
) -> None:
    first = process()
    wait_for(first, "seat taken")
    first.kill()
    second = process("--predecessor-exited")
    answer = wait_for(second, "seat taken", "another process holds the seat")
    assert (answer["message"], answer["epoch"]) == ("seat taken", 2)


def test_a_second_signal_ends_a_process_whose_release_of_the_seat_has_no_answer(
    process: Callable[..., subprocess.Popen[str]], redis: EmbeddedRedis
) -> None:
    child = process()
    wait_for(child, "seat taken")
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        child.send_signal(signal.SIGTERM)
        wait_for(child, "draining")
        child.send_signal(signal.SIGINT)
        wait_for(child, "ended at once, by a second signal")
        assert child.wait(10) == 1
    finally:
        os.kill(redis.pid, signal.SIGCONT)
