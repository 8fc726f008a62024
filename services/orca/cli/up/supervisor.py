"""Keeps the processes of a system running: starts them, restarts what dies, and ends them in order.

Each process leads a session of its own, so Ctrl-C reaches the supervisor only and a stop reaches a process together
with all its children. None outlives the supervisor (see core.process.parent_death). Output goes to one log file per
process.
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

from orca.cli.up.log_errors import error_message, readable, written_at
from orca.cli.up.questions import http_status
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.process.parent_death import die_with_parent

CRASH_WINDOW_S = 60.0
RESTART_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0)
REFUSES_SETTINGS = 2
"""Exit code of a part that cannot begin with what it was given (cli/main.py)."""
TAIL_LINES = 5
TAIL_BYTES = 16_384
TAIL_AGE = timedelta(seconds=10)
LINE_CHARACTERS = 200


class SystemFailed(Exception):
    """The system cannot go on; the message says why. `exit_code` is the supervisor's own then."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervised(Protocol):
    """A process and its successors under the same name."""

    spec: ProcessSpec

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        ...

    async def run_once(self) -> int:
        """Start it and wait for its end. Returns its exit code, negative for a signal."""
        ...

    async def stop(self) -> None:
        """End it politely, by force when its time is over; harmless when it does not run."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its children; harmless when it does not run."""
        ...

    async def is_answering(self, within_s: float) -> bool:
        """Whether its event loop answers a question in time."""
        ...

    def unfreeze(self) -> str:
        """Do what makes one that does not answer any more serve again. Returns: in words, what was done."""
        ...


class Supervisor:
    """Runs a fixed set of processes until `stop`."""

    def __init__(
        self,
        children: Sequence[Supervised],
        *,
        tell: Callable[[str], None],
        on_death: Callable[[ProcessSpec], object] = lambda _: None,
        restart_delays_s: Sequence[float] = RESTART_DELAYS_S,
    ) -> None:
        """
        Args:
            tell: gets a sentence for people whenever a process died or was restarted.
            on_death: called at once when a process of a system that was up dies.
            restart_delays_s: wait before restart number 1, 2, ... within CRASH_WINDOW_S; one exit more than there are
                delays ends the system. A part that served and now refuses its settings, such as a file of keys that was
                broken meanwhile, waits for the longest of them until they are mended: the others serve on.
        """
        self.children = children
        self._restart_delays_s = restart_delays_s
        # Set once the whole system was up. Until then a process that gives up ends the start: its reason (a bad model,
        # a bad setting) will not go away by itself.
        self.was_up = False
        self._tell = tell
        self._on_death = on_death
        self._is_stopping = False

    async def run(self) -> None:
        """Start everything and keep it running. Returns after `stop`.

        Raises: SystemFailed when a process dies again and again, or gives up before the system was ever up.
        """
        await asyncio.gather(*(self._keep(child) for child in self.children))

    async def stop(self) -> None:
        """End every process, role after role: SIGTERM, and SIGKILL once its time is over."""
        self._is_stopping = True
        for role in Role:
            await asyncio.gather(*(child.stop() for child in self.children if child.spec.role is role))

    def kill(self) -> None:
        """End every process at once."""
        self._is_stopping = True
        for child in self.children:
            child.signal(signal.SIGKILL)

    async def _keep(self, child: Supervised) -> None:
        crashes: deque[float] = deque()
        while not self._is_stopping:
            name, log = child.spec.name, child.spec.log
            # What its predecessor said would mislead.
            log_start = log.stat().st_size if log.exists() else 0
            code = await child.run_once()
            if self._is_stopping:
                return
            now = time.monotonic()
            crashes.append(now)
            while crashes[0] < now - CRASH_WINDOW_S:
                crashes.popleft()
            if self.was_up:
                self._on_death(child.spec)
            if not self.was_up and code > 0:
                raise SystemFailed(f"{name} did not start: {last_error(log)}\nIts log is {log}", exit_code=code)
            report = "\n".join([f"{name} {_how(code)}; its log is {log}", *tail(log, log_start, datetime.now(UTC))])
            if self.was_up and code == REFUSES_SETTINGS:
                crashes.clear()
                self._tell(f"{report}\n{name} is tried again until it accepts its settings")
                await asyncio.sleep(self._restart_delays_s[-1])
                continue
            if len(crashes) > len(self._restart_delays_s):
                raise SystemFailed(f"{report}\n{name} died {len(crashes)} times in {CRASH_WINDOW_S:.0f} s")
            self._tell(f"{report}\nrestarting {name}")
            await asyncio.sleep(self._restart_delays_s[len(crashes) - 1])


class Child:
    """A process described by its spec, leader of its own session."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._is_restart = False
        self._is_stopping = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run_once(self) -> int:
        command = self.spec.command + (self.spec.restart_arguments if self._is_restart else ())
        self._is_restart = True
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
            )
        if self._is_stopping:
            # `stop` came while it was being started and could not see it.
            self.signal(signal.SIGKILL)
        try:
            return await self._process.wait()
        finally:
            # Whatever it started and left behind goes with it: the next one begins alone.
            self.signal(signal.SIGKILL)

    async def stop(self) -> None:
        self._is_stopping = True
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
        """Any status will do: a gateway that is full says 503, and its loop turns."""
        return self.spec.health is None or await http_status(self.spec.health, "/health", within_s) is not None

    def unfreeze(self) -> str:
        self.signal(signal.SIGKILL)
        return "it is killed and started again"


def tail(log: Path, start: int, died: datetime) -> list[str]:
    """The last warnings and errors of a log from byte `start` on, indented, long ones cut.

    Nothing that was written more than TAIL_AGE before the death: it did not die of that.
    """
    oldest = died - TAIL_AGE
    if log.stat().st_mtime < oldest.timestamp():
        return []
    lines = _lines(log, start)
    # A line that does not say its time is as old as the next one that does.
    recent_from = max((at for at, line in enumerate(lines, 1) if (written_at(line) or died) < oldest), default=0)
    said = [text for line in lines[recent_from:] if (text := readable(line))]
    return [f"    {text[:LINE_CHARACTERS]}" for text in said[-TAIL_LINES:]]


def last_error(log: Path) -> str:
    """The newest error message of a log; its last line when it holds none."""
    lines = [line for line in _lines(log, 0) if line.strip()]
    messages = [message for line in lines if (message := error_message(line))]
    return (messages or lines or ["it said nothing"])[-1]


def _lines(log: Path, start: int) -> list[str]:
    """The lines of the end of a log that begin at byte `start` or behind it."""
    cut = log.stat().st_size - TAIL_BYTES
    with log.open("rb") as file:
        file.seek(max(start, cut))
        lines = file.read().decode(errors="replace").splitlines()
    # The first of a cut text is rarely whole.
    return lines[1:] if cut > start and len(lines) > 1 else lines


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
