"""Runs a server on this machine during a measurement, usually a whole Orca: starts it, waits for it, stops it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.bench.client import LoadTarget, get_json, served_models
from orca.core.domain.errors import OrcaError
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port

READY_WITHIN_S = 300.0
"""Enough to load a big model from a cold disk; a small one takes seconds. vLLM compiles for up to three minutes."""

STOP_WITHIN_S = 30.0


class ServerFailed(OrcaError):
    """A server ended or was not ready in time; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServer:
    """The command that starts a server of the OpenAI API on this machine."""

    name: str  # for messages
    command: Sequence[str]
    port: int  # of 127.0.0.1; `command` makes the server listen on it
    log: Path  # file for its output
    vocab_size: int
    ready_path: str = "/v1/models"  # answers 200 with JSON when the server takes requests
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that differ from this process's own


@asynccontextmanager
async def running_system(
    model: str,
    options: Sequence[str],
    folder: Path,
    *,
    vocab_size: int,
    environment: Mapping[str, str] | None = None,
    on_start: Callable[[int], None] | None = None,
) -> AsyncIterator[LoadTarget]:
    """Run `orca up --model MODEL OPTIONS` with an empty pool, and yield it when it is ready for requests.

    Args:
        folder: for its data and logs; its output goes to `up.log` there.
        environment: variables that differ from this process's own.
        on_start: called with the process id of `orca up`, before it is ready.
    Raises: ServerFailed.
    """
    port = free_port()
    with TemporaryDirectory(dir=folder, prefix="data-") as data:
        arguments = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--data", data, *options]
        server = BenchServer(
            name="`orca up`",
            command=[sys.executable, "-m", "orca.cli.main", "up", *arguments],
            port=port,
            log=folder / "up.log",
            vocab_size=vocab_size,
            ready_path="/ready",
            environment=environment or {},
        )
        async with running_server(server, on_start=on_start) as target:
            yield target


@asynccontextmanager
async def running_server(
    server: BenchServer, *, on_start: Callable[[int], None] | None = None
) -> AsyncIterator[LoadTarget]:
    """Run the server, and yield it when it is ready for requests.

    Args: on_start: called with its process id, before it is ready.
    Raises: ServerFailed.
    """
    process = _start(server)
    try:
        if on_start is not None:
            on_start(process.pid)
        yield await _ready(process, server)
    finally:
        await asyncio.to_thread(_stop, process)


def _start(server: BenchServer) -> "subprocess.Popen[bytes]":
    with server.log.open("wb") as output:
        return subprocess.Popen(
            die_with_parent(server.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment},
            # Its own process group: Ctrl-C for this process must not end the server before its results are written.
            start_new_session=True,
        )


async def _ready(process: "subprocess.Popen[bytes]", server: BenchServer) -> LoadTarget:
    url = f"http://127.0.0.1:{server.port}"
    probe = LoadTarget(url=url, model="", vocab_size=server.vocab_size, timeout_s=2)
    deadline = asyncio.get_running_loop().time() + READY_WITHIN_S
    while asyncio.get_running_loop().time() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"{server.name} ended with {process.returncode}:\n{log_tail(server.log)}")
        try:
            await get_json(probe, server.ready_path)
            [model, *_] = await served_models(probe)
        except (OSError, ValueError):
            await asyncio.sleep(0.2)
        else:
            return LoadTarget(url=url, model=model, vocab_size=server.vocab_size)
    raise ServerFailed(f"{server.name} was not ready within {READY_WITHIN_S:g} s:\n{log_tail(server.log)}")


def log_tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a server as Ctrl-C does; then, or after `STOP_WITHIN_S`, kill the rest of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
