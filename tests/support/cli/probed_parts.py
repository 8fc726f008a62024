"""Parts that a probe asks, and probes that ask them often."""

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from orca.cli.up.probe import Probe
from orca.cli.up.spec import ProcessSpec, Role
from support import waiting

PERIOD_S = 0.02

until = functools.partial(waiting.until, limit_s=90.0)


class FakePart:
    """Answers as told, in no time; counts what is done about it."""

    def __init__(self, folder: Path) -> None:
        self.spec = ProcessSpec(role=Role.WORKER, name="worker-0.1", command=(), address="-", log=folder / "log")
        self.pid: int | None = 7
        self.answers: bool | None = True  # None: the question itself finds the asker standing still
        self.asked = 0
        self.unfrozen = 0
        self.clock_s = 0.0

    async def run_once(self) -> int:
        raise AssertionError("nobody starts it")

    async def stop(self) -> None:
        raise AssertionError("nobody stops it")

    def signal(self, number: signal.Signals) -> None:
        raise AssertionError(f"nobody sends it {number}")

    async def is_answering(self, within_s: float) -> bool:
        self.asked += 1
        self.clock_s += 100 if self.answers is None else within_s
        return bool(self.answers)

    def unfreeze(self) -> str:
        self.unfrozen += 1
        return "it is killed"


@contextlib.asynccontextmanager
async def probing(part: FakePart) -> AsyncIterator[list[str]]:
    """The sentences that are told while the part is probed."""
    told: list[str] = []
    probe = Probe([part], period_s=PERIOD_S, report=told.append, clock=lambda: part.clock_s)
    running = asyncio.create_task(probe.run())
    yield told
    running.cancel()


class Counted:
    """Counts the answers of a real process: a probe that has heard one has seen it come up."""

    answers = 0

    async def is_answering(self, within_s: float) -> bool:
        is_answered = await super().is_answering(within_s)  # type: ignore[misc]
        self.answers += is_answered
        return is_answered
