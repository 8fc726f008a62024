"""Runs `orca up` as a subprocess: starts it, calls it over HTTP, watches it in the process table, ends it."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from checker.systems.pool_reader import READER_ACL
from checker.systems.processes import find_parts, is_running, role_of

ENDS_WITHIN_S = 60.0
POLL_S = 0.1


class SystemFailure(Exception):
    """`orca up` ended, or did not start; the message has the end of its output."""


class System:
    """One system on one machine: `async with System(folder, flags) as system: system.url`."""

    ready_within_s = 600.0  # many processes start at once, perhaps on a shared machine
    takes_grammars = True  # False while no call with a grammar may be sent

    def __init__(self, folder: Path, flags: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
        """
        Args:
            folder: for its data, logs, iteration logs and output.
            flags: further options for `orca up`.
            environment: settings such as ORCA_POOL_RETENTION_MS.
        """
        self.folder = folder
        self.output_path = folder / "output"
        self.logs = folder / "data" / "logs"
        self.iterations = folder / "iterations"
        command = [sys.executable, "-m", "orca.cli.main", "up", "--port", "0", "--data", str(folder / "data")]
        self._command = [*command, "--iteration-log", str(self.iterations), *flags]
        self._environment = os.environ | (environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._family: set[psutil.Process] = set()

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
            await wait_for(self._is_ready, self.ready_within_s, "a system that is ready")
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._end()

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def check_up(self) -> None:
        """Check that `orca up` still runs. Raises: SystemFailure if it has ended."""
        if not self.is_up or "\nReady:" not in self.output:
            raise SystemFailure(self.output[-3000:])

    @property
    def url(self) -> str:
        return str(re.findall(r" at (http://\S+)", self.output)[0])

    @property
    def urls(self) -> list[str]:
        """The URLs of all gateways."""
        return [f"http://{address}" for name, address in self.addresses.items() if role_of(name) == "gateway"]

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each part, from the table that `orca up` prints."""
        return dict(re.findall(r"^  (\S+) +\d+  (\S+)$", self.output, re.MULTILINE))

    def parts(self) -> dict[str, psutil.Process]:
        """Return the running processes, by part."""
        assert self._process is not None
        parts = find_parts(self._process.pid)
        self._family |= set(parts.values())
        return parts

    async def _begin(self) -> None:
        """Start `orca up`; do not wait until it is ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        users = self.folder / "data" / "redis" / "users.acl"
        users.parent.mkdir(parents=True, exist_ok=True)
        users.write_text(READER_ACL)
        with self.output_path.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=output, stderr=output, stdin=asyncio.subprocess.DEVNULL, env=self._environment
            )

    def _is_ready(self) -> bool:
        """Is the system ready? Raises: SystemFailure if it has ended instead."""
        if not self.is_up:
            self.check_up()
        return "\nReady:" in self.output

    async def _end(self) -> None:
        """End the processes that this object started: first by a signal to end, then by force."""
        if self._process is None or not self.is_up:
            self._kill_family()
            return
        for process in self.parts().values():
            # A frozen process cannot end.
            _signal(process, signal.SIGCONT)
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), ENDS_WITHIN_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._kill_family()

    def _kill_family(self) -> None:
        for process in self._family:
            if is_running(process):
                _signal(process, signal.SIGKILL)


def model_of(flags: Sequence[str]) -> str:
    """Return the value of --model in flags of the form `--name value`."""
    return dict(zip(flags[::2], flags[1::2], strict=True))["--model"]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


async def wait_for(is_true: Callable[[], object], limit_s: float, what: str) -> None:
    """Wait until a condition is true. Raises: TimeoutError, which names what did not happen."""
    ends = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what} did not come within {limit_s:g} s")
        await asyncio.sleep(POLL_S)


async def can_resume(http: httpx.AsyncClient, url: str) -> bool:
    """Does the server have the route that resumes streams? Then it answers that a made-up request is unknown."""
    answer = await http.get(f"{url}/v1/requests/cmpl-0/events")
    return '"unknown_request"' in answer.text


async def can_repeat(http: httpx.AsyncClient, url: str, model: str) -> bool:
    """Does the server support Idempotency-Key? Then the same call twice is one request."""
    body = {"model": model, "prompt": [5], "max_tokens": 1, "seed": 1}
    headers = {"idempotency-key": f"checker-probe-{time.time_ns()}"}

    async def request_id() -> str | None:
        answer = await http.post(f"{url}/v1/completions", json=body, headers=headers)
        name: str | None = answer.headers.get("x-request-id")
        return name

    return await request_id() == await request_id()


async def poll(ask: Callable[[], Awaitable[bool]], limit_s: float) -> bool:
    """Wait until a condition is true. Returns: False if it was not true within the limit."""
    ends = time.monotonic() + limit_s
    while not await ask():
        if time.monotonic() > ends:
            return False
        await asyncio.sleep(POLL_S * 5)
    return True
