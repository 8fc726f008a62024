"""The embedded Redis: found, started, stopped, and never left behind."""

import contextlib
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orca.core.domain.errors import SettingError
from orca.pool.redis.embedded import EmbeddedRedis, RedisDidNotStart, find_redis_server, find_wheel_redis_server
from orca.pool.redis.pool import open_redis_pool
from support.waiting import PATIENT_POOL, wait_until


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; only its parent has not asked yet.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_running(pid), 60, lambda: f"process {pid} still runs")


@pytest.mark.parametrize("port", [None, 0])
async def test_an_embedded_server_serves_a_pool_until_it_is_stopped(tmp_path: Path, port: int | None) -> None:
    with EmbeddedRedis(tmp_path, port=port) as redis:
        assert redis.url.startswith("unix://" if port is None else "redis://127.0.0.1:")
        pool = await open_redis_pool(redis.url, "d", PATIENT_POOL)
        assert await pool.set_revision("r", 1) == "r"
        await pool.close()
    wait_until_gone(redis.pid)


async def test_a_server_restarted_in_the_same_folder_has_the_same_data(tmp_path: Path) -> None:
    for _ in range(2):
        with EmbeddedRedis(tmp_path) as redis:
            pool = await open_redis_pool(redis.url, "d", PATIENT_POOL)
            await pool.set_revision("first", 1)
            assert await pool.set_revision("second", 2) == "first"
            await pool.close()


def test_a_frozen_server_can_be_stopped(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    os.kill(redis.pid, signal.SIGSTOP)
    redis.stop()
    wait_until_gone(redis.pid)
    redis.stop()


def test_a_long_folder_name_still_gets_a_socket(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / ("x" * 120)) as redis:
        assert len(redis.url) < 110


def test_a_server_that_does_not_start_reports_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="maxmemory"):
        EmbeddedRedis(tmp_path, options=("--maxmemory", "much"))


@contextlib.contextmanager
def answering(folder: Path, answer: Callable[[], bytes]) -> Iterator[Path]:
    """Answers of a server to each PING while it starts. Yields: its program, which prints nothing itself."""
    program = folder / "redis-server"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answer())

    with socketserver.ThreadingUnixStreamServer(str(folder / "redis.sock"), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield program
        server.shutdown()


def test_a_server_that_reports_loading_is_waited_for_beyond_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()

    def answer() -> bytes:
        is_loading = time.monotonic() < began + 4.5
        return b"-LOADING Redis is loading the dataset in memory\r\n" if is_loading else b"+PONG\r\n"

    with answering(tmp_path, answer) as program, EmbeddedRedis(tmp_path, binary=program, silent_s=3.0):
        assert time.monotonic() > began + 4.5


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with answering(tmp_path, lambda: b"") as program, pytest.raises(RedisDidNotStart) as refused:
        EmbeddedRedis(tmp_path, binary=program, silent_s=0.2)
    assert refused.value.exit_code == -signal.SIGKILL


def test_without_a_binary_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_redis_server() == find_wheel_redis_server()


def test_an_embedded_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from orca.pool.redis.embedded import EmbeddedRedis\n"
        "redis = EmbeddedRedis(Path(sys.argv[1])); print(redis.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until_gone(pid)
