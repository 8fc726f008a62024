"""A whole Orca on this machine for the length of a measurement: starts `orca up`, waits for it, and takes it down."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.cli.bench.client import Target, get_json, served_models
from orca.core.errors import OrcaError
from orca.core.leash import leashed
from orca.core.ports import free_port

READY_WITHIN_S = 180.0
"""Loading a big model from a cold disk; a small one takes seconds."""

STOP_WITHIN_S = 30.0


class SystemFailed(OrcaError):
    """`orca up` ended or was not ready in time; carries the end of what it printed."""


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
    port, log = free_port(), folder / "up.log"
    with TemporaryDirectory(dir=folder, prefix="data-") as data:
        arguments = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--data", data, *options]
        process = _start(arguments, log, environment or {})
        try:
            if on_start is not None:
                on_start(process.pid)
            yield await _ready(process, port, log, vocab_size)
        finally:
            await asyncio.to_thread(_stop, process)


def _start(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            leashed([sys.executable, "-m", "orca.cli.main", "up", *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # Its own process group: a Ctrl-C meant for us must not end it before its results are in.
            start_new_session=True,
        )


async def _ready(process: "subprocess.Popen[bytes]", port: int, log: Path, vocab_size: int) -> Target:
    url = f"http://127.0.0.1:{port}"
    probe = Target(url=url, model="", vocab_size=vocab_size, timeout_s=2)
    deadline = asyncio.get_running_loop().time() + READY_WITHIN_S
    while asyncio.get_running_loop().time() < deadline:
        if process.poll() is not None:
            raise SystemFailed(f"`orca up` ended with {process.returncode}:\n{_tail(log)}")
        try:
            await get_json(probe, "/ready")
            [model, *_] = await served_models(probe)
        except (OSError, ValueError):
            await asyncio.sleep(0.2)
        else:
            return Target(url=url, model=model, vocab_size=vocab_size)
    raise SystemFailed(f"`orca up` was not ready within {READY_WITHIN_S:g} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C does; after a bound, whatever of its process group is left is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
