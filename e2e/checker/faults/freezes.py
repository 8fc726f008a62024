"""Each part is frozen for longer than anything that waits for it, and goes on as if nothing had been.

A second scheduler of the same group stands by: it takes the seat while the first one is frozen, which then wakes with
commits and steps of a claim and an epoch that are over. Both are counted by the recorder (checker.points.recorder). It
wakes at the worst moment: when the other one has claimed its requests and committed nothing of them yet, so that each
late token fits the log and the fence alone keeps it out.
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
from checker.runs.run import Scene
from checker.systems.ports import free_port
from checker.systems.system import wait_for

FREEZES_S = {
    "gateway": 7.0,  # readers have a lease of 5 s, and gRPC's pings an answer within 7
    "scheduler": 12.0,  # its seat has a lease of 3 s; it wakes when another one has claimed
    "stage": 9.0,  # its silence is noticed by pings, or by the bound of a step
    "rank": 8.0,  # rank_silent_s is 5
    "redis": 6.0,  # a call to it has 2 s
}
STANDS_BY_WITHIN_S = 90.0
OWN_FLAGS = ("--listen", "--metrics-listen")
"""Of a scheduler: what two of them on one machine cannot share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freezes:
    """A disturbance (see checker.runs.run.Disturb)."""

    rounds: int
    tokens_between: int = 60

    async def __call__(self, scene: Scene) -> None:
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
            for role in scene.roles
        ]
        injector = make_injector(scene, settle_s=1.0, is_worst_moment=NewClaims(scene.inject))
        for fault in planned:
            # Only while the other one is frozen: it would hold the seat the next time.
            standby = standing_by(scene) if fault.roles == ("scheduler",) else contextlib.nullcontext()
            async with standby:
                await inject(scene, injector, fault, of=len(planned))


class NewClaims:
    """Has anybody claimed since the scheduler stands still?"""

    def __init__(self, inject: Path) -> None:
        self._records = inject / "records"
        self._before: dict[PlannedFault, int] = {}

    def __call__(self, fault: PlannedFault) -> bool:
        if fault.roles != ("scheduler",):
            return False
        claims = sum(path.read_bytes().count(b'"claimed"') for path in self._records.glob("scheduler-*.jsonl"))
        return claims > self._before.setdefault(fault, claims)


@contextlib.asynccontextmanager
async def standing_by(scene: Scene) -> AsyncIterator[None]:
    """A scheduler process of the same group, which waits for the seat; it leaves with the block."""
    first = scene.system.parts()["scheduler-0"]
    log = scene.system.logs / f"scheduler-0-standby-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *standby_command(first.cmdline()), stdout=output, stderr=output, env=_environ(first)
        )
    try:
        await wait_for(lambda: "another process holds the seat" in log.read_text(), STANDS_BY_WITHIN_S, "a stand-by")
        yield
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()


def standby_command(command: list[str]) -> list[str]:
    """The command of a scheduler, for addresses of its own, and without the word that its predecessor has exited."""
    words = [word for word in command if word != "--predecessor-exited"]
    for place, word in enumerate(words[:-1]):
        if word in OWN_FLAGS:
            words[place + 1] = f"127.0.0.1:{free_port()}"
        if word == "--iteration-log":
            path = Path(words[place + 1])
            words[place + 1] = str(path.with_name(f"{path.stem}-standby.jsonl"))
    # Whatever leashes the first one to its supervisor stands before the interpreter.
    return words


def _environ(process: psutil.Process) -> dict[str, str]:
    """The settings that its supervisor gave it, Redis's password among them."""
    return os.environ | dict(process.environ())
