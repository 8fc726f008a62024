"""Runs Redis, scheduler and gateway during a measurement, each in its own process, as `orca up` does.

The measured quantity is the processor time of each process. Other work on the machine makes a run slower, but changes
this time little.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from orca.bench.client import LoadTarget, get_json
from orca.core.domain.errors import OrcaError
from orca.core.domain.model import ModelInfo
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port
from orca.pool.redis.access import LOCAL_USER, LocalAccess
from orca.pool.redis.embedded import EmbeddedRedis

DEPLOYMENT = "host"
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 15.0
LOG_LINES_SHOWN = 12

POOL_SETTINGS = {
    "ORCA_POOL_MAX_QUEUED": str(1 << 30),
    "ORCA_POOL_MAX_QUEUED_PROMPT_TOKENS": str(1 << 40),
    "ORCA_POOL_BYTES_MAX": str(1 << 44),
}
"""Bounds of the pool that no measurement reaches."""


class HostFailed(OrcaError):
    """A process ended or hung, or the output does not match the engine's tokens: there is no figure."""


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class PoolServer:
    """A Redis for one measurement, and the environment variables of its clients."""

    redis: EmbeddedRedis
    access: LocalAccess
    environment: Mapping[str, str]

    async def wait_until_quiet(self) -> None:
        """Wait while Redis rewrites its append-only file, as it does after many submits.

        A rewrite costs a fork, and a copy of each page that changes during the rewrite.
        """
        client = Redis.from_url(self.redis.url, username=LOCAL_USER, password=self.access.password)
        try:
            while (await client.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110 - Redis sends no event
                await asyncio.sleep(0.2)
        finally:
            await client.aclose()


@contextmanager
def running_redis(folder: Path) -> Iterator[PoolServer]:
    """Run a Redis with its data in `folder`."""
    access = LocalAccess.prepare(folder, DEPLOYMENT)
    login = {"ORCA_POOL_USER": LOCAL_USER, "ORCA_POOL_PASSWORD_FILE": str(access.password_file)}
    with EmbeddedRedis(folder / "redis", access=access) as redis:
        yield PoolServer(redis, access, {**login, **POOL_SETTINGS})


class NullScheduler:
    """The process of a scheduler with a null engine (scheduler_process.py)."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    async def wait_until_seated(self) -> None:
        """Wait until the scheduler holds its group's seat. Raises: HostFailed."""
        assert self._process.stdout is not None
        if await asyncio.to_thread(self._process.stdout.readline) != b"ready\n":
            raise _failed("the scheduler did not start", self._log)

    def start_group(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Check that the process still runs. Raises: HostFailed if it has ended."""
        if self._process.poll() is not None:
            raise _failed(f"the scheduler ended with {self._process.returncode}", self._log)

    def terminate(self) -> None:
        """Ask the process to drain and end; do not wait for it."""
        self._process.send_signal(signal.SIGTERM)

    def wait_until_drained(self) -> tuple[int, int]:
        """Wait until the scheduler has drained after `terminate`.

        Returns: the number of steps and of tokens of its engine.
        Raises: HostFailed.
        """
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if len(words) != 2:
            raise _failed("the scheduler did not drain", self._log)
        return int(words[0]), int(words[1])


@contextmanager
def running_scheduler(
    server: PoolServer, model: ModelInfo, folder: Path, number: int = 0, *, batch_size: int, step_us: int
) -> Iterator[NullScheduler]:
    """Run a scheduler with a null engine. Args: number: of its group, from 0."""
    flags = ["--model", str(model.folder), "--pool", server.redis.url, "--deployment", DEPLOYMENT]
    # Nothing listens at this address: the null engine calls no stage.
    flags += ["--stages", "127.0.0.1:1", "--group", f"g{number}"]
    flags += ["--max-batch-size", str(batch_size), "--log-format", "json"]
    command = [sys.executable, "-m", "orca.bench.host.scheduler_process", str(step_us), *flags]
    log = folder / f"scheduler-{number}.log"
    with _running(command, server, log) as process:
        yield NullScheduler(process, log)


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    pid: int
    target: LoadTarget
    log: Path


@contextmanager
def running_gateway(server: PoolServer, model: ModelInfo, folder: Path, number: int = 0) -> Iterator[GatewayProcess]:
    """Run a gateway. Args: number: its index among several, from 0."""
    port = free_port()
    flags = ["--model", str(model.folder), "--pool", server.redis.url, "--deployment", DEPLOYMENT]
    flags += ["--host", "127.0.0.1", "--port", str(port), "--drain-seconds", "1", "--log-format", "json"]
    log = folder / f"gateway-{number}.log"
    with _running([sys.executable, "-m", "orca.cli.main", "gateway", *flags], server, log) as process:
        url = f"http://127.0.0.1:{port}"
        yield GatewayProcess(process.pid, LoadTarget(url=url, model=model.name, vocab_size=model.vocab_size), log)


async def wait_until_healthy(gateway: GatewayProcess) -> None:
    """Wait until the gateway answers its health check. Raises: HostFailed."""
    clock = asyncio.get_running_loop().time
    limit_s = clock() + READY_WITHIN_S
    while clock() < limit_s:
        try:
            await get_json(gateway.target, "/health")
        except (OSError, ValueError):
            await asyncio.sleep(0.1)
        else:
            return
    raise _failed("the gateway did not start", gateway.log)


@contextmanager
def _running(command: Sequence[str], server: PoolServer, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            die_with_parent(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
        stack.enter_context(process)  # closes its pipes
        stack.callback(_stop, process)
        yield process


def _failed(complaint: str, log: Path) -> HostFailed:
    """Return an error that shows the end of the log: its folder may be gone when the error is read."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return HostFailed("\n".join([f"{complaint}; the end of its log:", *(lines or ["(it is empty)"])]))


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
