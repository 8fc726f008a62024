"""Keeps the processes of a system running: starts them, restarts those that die, and stops them in order.

Each process leads a session of its own, so Ctrl-C reaches only the supervisor, and a stop reaches a process together
with all its children. No process outlives the supervisor (see core.process.parent_death). Each process writes its
output to a log file of its own.
"""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from orca.cli.up.health_checks import http_status
from orca.cli.up.log_errors import error_message, readable, written_at
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.process.parent_death import die_with_parent

CRASH_WINDOW_S = 60.0
RESTART_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0)
REFUSES_SETTINGS = 2
"""Exit code of a part that refuses its settings (cli/main.py)."""
TAIL_LINES = 5
TAIL_BYTES = 16_384
TAIL_AGE = timedelta(seconds=10)
LINE_CHARACTERS = 200


class SystemFailed(Exception):
    """The system cannot go on; the message says why. `exit_code` becomes the exit code of `orca up`."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervised(Protocol):
    """A process under supervision, together with its later restarts under the same name."""

    spec: ProcessSpec

    @property
    def pid(self) -> int | None:
        """The process id; None while the process does not run."""
        ...

    async def run_once(self) -> int:
        """Start the process and wait for its end. Returns: the exit code; negative for a signal."""
        ...

    async def stop(self) -> None:
        """Ask the process to end, and kill it after a time limit. No effect if it does not run."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its children. No effect if it does not run."""
        ...

    async def is_answering(self, within_s: float) -> bool:
        """Return whether the event loop of the process answers a health check in time."""
        ...

    def unfreeze(self) -> str:
        """Make a process that no longer answers serve again. Returns: a phrase that says what was done."""
        ...


class Supervisor:
    """Runs a fixed set of processes until `stop` is called."""

    def __init__(
        self,
        children: Sequence[Supervised],
        *,
        report: Callable[[str], None],
        on_death: Callable[[ProcessSpec], object] = lambda _: None,
        restart_delays_s: Sequence[float] = RESTART_DELAYS_S,
    ) -> None:
        """
        Args:
            report: prints a sentence for people whenever a process has died or restarts.
            on_death: called at once when a process dies after the system was up.
            restart_delays_s: delay before restart 1, 2, ... within CRASH_WINDOW_S; one exit more than there are delays
                ends the system. If a part that has served refuses its settings, for example because a key file became
                invalid, it is retried with the longest delay until they are valid. The other parts keep serving.
        """
        self.children = children
        self._restart_delays_s = restart_delays_s
        # True once the whole system has been up. Before that, a process that gives up ends the start: its reason (a bad
        # model, a bad setting) does not go away by itself.
        self.was_up = False
        self._report = report
        self._on_death = on_death
        self._is_stopping = False

    async def run(self) -> None:
        """Start all processes and keep them running until `stop`.

        Raises: SystemFailed when a process dies too often, or gives up before the system was ever up.
        """
        await asyncio.gather(*(self._keep(child) for child in self.children))

    async def stop(self) -> None:
        """Stop all processes, role after role: SIGTERM first, SIGKILL after `stop_seconds`."""
        self._is_stopping = True
        for role in Role:
            await asyncio.gather(*(child.stop() for child in self.children if child.spec.role is role))

    async def restart(self, child: "Child", spec: ProcessSpec) -> None:
        """Run a process by another spec from now on: it is asked to end as by `stop`, and starts again at once.

        Returns when the old process has ended. If it is just starting, it ends as soon as it has.
        """
        child.spec = spec
        await child.end()

    def kill(self) -> None:
        """Kill all processes at once."""
        self._is_stopping = True
        for child in self.children:
            child.signal(signal.SIGKILL)

    async def _keep(self, child: Supervised) -> None:
        crashes: deque[float] = deque()
        while not self._is_stopping:
            spec = child.spec
            name, log = spec.name, spec.log
            # Lines of the previous process would mislead.
            log_start = log.stat().st_size if log.exists() else 0
            code = await child.run_once()
            if self._is_stopping:
                return
            if child.spec is not spec:
                self._report(f"restarting {name} with other options")
                if self.was_up:
                    self._on_death(child.spec)
                continue
            now = time.monotonic()
            crashes.append(now)
            while crashes[0] < now - CRASH_WINDOW_S:
                crashes.popleft()
            if self.was_up:
                self._on_death(child.spec)
            if not self.was_up and code > 0:
                raise SystemFailed(f"{name} did not start: {last_error(log)}\nIts log is {log}", exit_code=code)
            message = "\n".join(
                [f"{name} {_exit_description(code)}; its log is {log}", *tail(log, log_start, datetime.now(UTC))]
            )
            if self.was_up and code == REFUSES_SETTINGS:
                crashes.clear()
                self._report(f"{message}\n{name} is tried again until it accepts its settings")
                await asyncio.sleep(self._restart_delays_s[-1])
                continue
            if len(crashes) > len(self._restart_delays_s):
                raise SystemFailed(f"{message}\n{name} died {len(crashes)} times in {CRASH_WINDOW_S:.0f} s")
            self._report(f"{message}\nrestarting {name}")
            await asyncio.sleep(self._restart_delays_s[len(crashes) - 1])


class Child:
    """A process that a spec describes. It leads a session of its own."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._is_restart = False
        self._is_stopping = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run_once(self) -> int:
        spec = self.spec
        command = spec.command + (spec.restart_arguments if self._is_restart else ())
        self._is_restart = True
        with spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
        if self._is_stopping or self.spec is not spec:
            # `stop` or `Supervisor.restart` was called while the process was starting and could not see it.
            self.signal(signal.SIGKILL)
        try:
            return await self._process.wait()
        finally:
            # Kill whatever the process left behind, so that the next one starts alone.
            self.signal(signal.SIGKILL)

    async def stop(self) -> None:
        self._is_stopping = True
        await self.end()

    async def end(self) -> None:
        """Ask the process to end, and kill it after a time limit. It may start again."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.spec.stop_seconds)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def is_answering(self, within_s: float) -> bool:
        """Return whether any HTTP status comes: a full gateway answers 503, and its event loop still runs."""
        return self.spec.health is None or await http_status(self.spec.health, "/health", within_s) is not None

    def unfreeze(self) -> str:
        self.signal(signal.SIGKILL)
        return "it is killed and started again"


def tail(log: Path, start: int, died: datetime) -> list[str]:
    """Return the last warnings and errors of a log from byte `start` on, indented; long lines are cut.

    Lines written more than TAIL_AGE before the death are left out: they are not its cause.
    """
    oldest = died - TAIL_AGE
    if log.stat().st_mtime < oldest.timestamp():
        return []
    lines = _lines(log, start)
    # A line without a time is as old as the next line that has one.
    recent_from = max((at for at, line in enumerate(lines, 1) if (written_at(line) or died) < oldest), default=0)
    messages = [text for line in lines[recent_from:] if (text := readable(line))]
    return [f"    {text[:LINE_CHARACTERS]}" for text in messages[-TAIL_LINES:]]


def last_error(log: Path) -> str:
    """Return the newest error message of a log, or its last line if there is no error."""
    lines = [line for line in _lines(log, 0) if line.strip()]
    messages = [message for line in lines if (message := error_message(line))]
    return (messages or lines or ["its log is empty"])[-1]


def _lines(log: Path, start: int) -> list[str]:
    """Return the last lines of a log that begin at byte `start` or later."""
    cut = log.stat().st_size - TAIL_BYTES
    with log.open("rb") as file:
        file.seek(max(start, cut))
        lines = file.read().decode(errors="replace").splitlines()
    # The first line of a cut text is rarely whole.
    return lines[1:] if cut > start and len(lines) > 1 else lines


def _exit_description(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
