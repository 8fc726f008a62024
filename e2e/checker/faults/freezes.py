"""Freezes each part for longer than any time limit for it, and then lets it continue.

A second scheduler of the same group is on standby. It takes the seat while the first one is frozen. The first one then
wakes with commits and steps of an ended claim and an ended epoch; the recorder counts both (checker.points.recorder).
It wakes at the worst moment: when the other one has claimed its requests but not committed any token of them. Then each
late token would continue the log, and only the fence keeps it out.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from checker.faults.injector import PlannedFault
from checker.faults.kills import inject, make_injector
from checker.runs.context import RunContext
from checker.systems.ports import free_port
from checker.systems.system import wait_for

FREEZES_S = {
    "gateway": 7.0,  # readers have a lease of 5 s, and gRPC expects the answer to a ping within 7 s
    "scheduler": 12.0,  # its seat has a lease of 3 s; it wakes when another one has claimed
    "stage": 9.0,  # pings or the time limit of a step detect its silence
    "rank": 8.0,  # rank_silent_s is 5
    "redis": 6.0,  # a call to it has a timeout of 2 s
}
STANDS_BY_WITHIN_S = 90.0
WAITS_FOR_SEAT = "another process holds the seat"
"""Message in the log of a scheduler on standby."""
OWN_FLAGS = ("--listen", "--metrics-listen")
"""Options of a scheduler that two of them on one machine cannot share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freezes:
    """A disturbance (see checker.runs.context.Disturbance)."""

    rounds: int
    tokens_between: int = 60

    async def __call__(self, context: RunContext) -> None:
        planned = [
            PlannedFault(
                kind="freeze",
                roles=(role,),
                after_tokens=self.tokens_between,
                delay_s=0.0,
                choice=number / self.rounds,
                seconds=FREEZES_S[role],
            )
            for number in range(self.rounds)
            for role in context.roles
        ]
        injector = make_injector(context, settle_s=1.0, is_worst_moment=NewClaims(context.inject))
        for fault in planned:
            # The standby runs only during this freeze: otherwise it would hold the seat at the next one.
            standby = running_standby(context) if fault.roles == ("scheduler",) else contextlib.nullcontext()
            async with standby:
                await inject(context, injector, fault, of=len(planned))


class NewClaims:
    """Answers if a scheduler has claimed requests since the freeze started."""

    def __init__(self, inject: Path) -> None:
        self._records = inject / "records"
        self._before: dict[PlannedFault, int] = {}

    def __call__(self, fault: PlannedFault) -> bool:
        if fault.roles != ("scheduler",):
            return False
        claims = sum(path.read_bytes().count(b'"claimed"') for path in self._records.glob("scheduler-*.jsonl"))
        return claims > self._before.setdefault(fault, claims)


@contextlib.asynccontextmanager
async def running_standby(context: RunContext) -> AsyncIterator[None]:
    """Run a second scheduler of the same group inside the block; it waits for the seat."""
    first = context.system.parts()["scheduler-0"]
    log = context.system.logs / f"scheduler-0-standby-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *standby_command(first.cmdline()), stdout=output, stderr=output, env=_environ(first)
        )
    try:
        await wait_for(lambda: WAITS_FOR_SEAT in log.read_text(), STANDS_BY_WITHIN_S, "a stand-by")
        yield
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()


def standby_command(command: list[str]) -> list[str]:
    """Return a scheduler's command with new addresses, and without the flag that its predecessor has exited."""
    words = [word for word in command if word != "--predecessor-exited"]
    for place, word in enumerate(words[:-1]):
        if word in OWN_FLAGS:
            words[place + 1] = f"127.0.0.1:{free_port()}"
        if word == "--iteration-log":
            path = Path(words[place + 1])
            words[place + 1] = str(path.with_name(f"{path.stem}-standby.jsonl"))
    # The command may start with a program that ties the process to its supervisor; it stays.
    return words


def _environ(process: psutil.Process) -> dict[str, str]:
    """Return the environment that the supervisor gave a process, including Redis's password."""
    return os.environ | dict(process.environ())
