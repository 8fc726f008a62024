"""A server on this machine for the length of a measurement, mostly a whole Orca: starts it, waits, takes it down."""

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

from orca.bench.client import Target, get_json, served_models
from orca.core.domain.errors import OrcaError
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port

READY_WITHIN_S = 300.0
"""Loading a big model from a cold disk; a small one takes seconds. vLLM compiles for up to three minutes."""

STOP_WITHIN_S = 30.0


class SystemFailed(OrcaError):
    """A server ended or was not ready in time; carries the end of what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a server of the OpenAI API is started on this machine."""

    name: str  # for people
    command: Sequence[str]
    port: int  # of 127.0.0.1, where `command` makes it listen
    log: Path  # gets what it prints
    vocab_size: int
    ready_path: str = "/v1/models"  # answers 200 with JSON once requests are welcome
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
) -> AsyncIterator[Target]:
    """`orca up --model MODEL OPTIONS`, ready for requests, with nothing in its pool.

    Args:
        folder: for its data and logs; what it prints goes to `up.log` there.
        environment: variables that differ from this process's own.
        on_start: told the process id of `orca up`, before it is ready.
    Raises: SystemFailed.
    """
    port = free_port()
    with TemporaryDirectory(dir=folder, prefix="data-") as data:
        arguments = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--data", data, *options]
        server = Server(
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
async def running_server(server: Server, *, on_start: Callable[[int], None] | None = None) -> AsyncIterator[Target]:
    """The server, ready for requests.

    Args: on_start: told its process id before it is ready.
    Raises: SystemFailed.
    """
    process = _start(server)
    try:
        if on_start is not None:
            on_start(process.pid)
        yield await _ready(process, server)
    finally:
        await asyncio.to_thread(_stop, process)


def _start(server: Server) -> "subprocess.Popen[bytes]":
    with server.log.open("wb") as output:
        return subprocess.Popen(
            die_with_parent(server.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment},
            # Its own process group: a Ctrl-C meant for us must not end it before its results are in.
            start_new_session=True,
        )


async def _ready(process: "subprocess.Popen[bytes]", server: Server) -> Target:
    url = f"http://127.0.0.1:{server.port}"
    probe = Target(url=url, model="", vocab_size=server.vocab_size, timeout_s=2)
    deadline = asyncio.get_running_loop().time() + READY_WITHIN_S
    while asyncio.get_running_loop().time() < deadline:
        if process.poll() is not None:
            raise SystemFailed(f"{server.name} ended with {process.returncode}:\n{tail(server.log)}")
        try:
            await get_json(probe, server.ready_path)
            [model, *_] = await served_models(probe)
        except (OSError, ValueError):
            await asyncio.sleep(0.2)
        else:
            return Target(url=url, model=model, vocab_size=server.vocab_size)
    raise SystemFailed(f"{server.name} was not ready within {READY_WITHIN_S:g} s:\n{tail(server.log)}")


def tail(log: Path) -> str:
    """The last lines of what was printed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C does; whatever of its process group is left behind that, or after a bound, is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
