"""Walks the named points of the write path (points/names.py): each call of each part, each action, while clients wait.

Before and behind every call to Redis and between scheduler and stages a process dies, or the reply is lost and nobody
dies. Points of forming are reached because a rank is killed, that of cancelling because a client of the walk's own
cancels, the others because tokens flow. Each station has a bound (CALM_WITHIN_S, REACHED_WITHIN_S); one that was not
reached is told with the reason.
"""

import asyncio
import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from checker.clients.workload import COMPLETIONS, PlannedCall
from checker.history.records import Fault
from checker.points.names import (
    ACTIONS,
    CAME_LATE,
    CANCEL,
    COME_LATE,
    DROP_REPLY,
    FORMING,
    LATE_POINTS,
    POINTS,
    TOKENS,
    Point,
)
from checker.runs.run import Scene
from checker.systems.processes import is_running, role_of
from checker.systems.system import wait_for

REACHED_WITHIN_S = 120.0
CALM_WITHIN_S = 180.0
TOKENS_OF_CALM = 40
"""Heard since the last fault: the group serves again."""
DEATHS_MAX, DEATHS_WITHIN_S = 4, 65.0
"""`orca up` gives up on a part that dies six times in a minute."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One station of the walk."""

    point: Point
    action: str

    @property
    def name(self) -> str:
        return f"{self.point.name}: {self.action}"

    @property
    def kills(self) -> bool:
        return self.action not in (DROP_REPLY, COME_LATE)


def plan_walk(roles: Iterable[str], *, only: str = "") -> list[Stop]:
    """All points of parts that clients can survive the loss of, each with each action.

    Args:
        only: a part of the names of those that are wanted, such as `redis.commit`.
    """
    # In turns: a part that has just died may not die again at once.
    turns = sorted(POINTS, key=lambda point: [each for each in POINTS if each.part == point.part].index(point))
    wanted = [Stop(point, action) for action in ACTIONS for point in turns]
    wanted += [Stop(point, action) for point, action in LATE_POINTS.items()]
    can_die = {"worker" if role == "stage" else role for role in roles}
    return [stop for stop in wanted if only in stop.name and (not stop.kills or stop.point.part in can_die)]


@dataclass(slots=True)
class Walk:
    """A disturbance (see checker.runs.run.Disturb)."""

    only: str = ""
    nth: int = 3  # which call behind the moment of arming; points of forming take the first
    limit_s: float = float("inf")  # of the whole walk; what it does not come to is said
    _deaths: dict[str, list[float]] = field(default_factory=dict)

    async def __call__(self, scene: Scene) -> None:
        stops, missed, ends = plan_walk(scene.roles, only=self.only), 0, time.monotonic() + self.limit_s
        for number, stop in enumerate(stops):
            if time.monotonic() > ends:
                scene.tell(f"time is over: {len(stops) - number} points were not come to, the first is {stop.name}")
                missed += len(stops) - number
                break
            why_not = await self._visit(scene, stop, number)
            missed += why_not is not None
            scene.tell(f"{number + 1} of {len(stops)}: {stop.name}" + (f": not reached, {why_not}" if why_not else ""))
        await self._calm(scene, "")
        scene.tell(f"{len(stops) - missed} of {len(stops)} points reached")

    async def _visit(self, scene: Scene, stop: Stop, number: int) -> str | None:
        """Returns: why the point was not reached, None when it was."""
        is_calm = await self._calm(scene, stop.point.part)
        self._arm(scene, stop)
        provoking = asyncio.create_task(_provoke(scene, stop.point, number))
        is_reached = await _appears(scene, "fired")
        if not is_reached:
            (scene.inject / "armed").unlink(missing_ok=True)
        else:
            at, targets, in_flight = time.monotonic(), (stop.point.part,), scene.client.in_flight()
            if stop.kills:
                self._deaths.setdefault(stop.point.part, []).append(at)
            fault = Fault(at=at, number=number, kind=stop.name, targets=targets, pids=(), in_flight=in_flight)
            scene.history.add(fault)
        await provoking
        if not is_reached:
            tokens = "" if is_calm else f", nor {TOKENS_OF_CALM} tokens in the {CALM_WITHIN_S:g} s before"
            return f"no such call came within {REACHED_WITHIN_S:g} s{tokens}"
        if stop.action == COME_LATE:
            _kill_a_rank(scene)
        if stop.point in LATE_POINTS and not await _appears(scene, CAME_LATE):
            return f"nobody joined or claimed within {REACHED_WITHIN_S:g} s"
        return None

    async def _calm(self, scene: Scene, part: str) -> bool:
        """Do tokens flow again, and has the part not died too often of late?"""
        wanted, ends = scene.client.tokens_heard + TOKENS_OF_CALM, time.monotonic() + CALM_WITHIN_S
        while scene.client.tokens_heard < wanted or self._is_worn(part):
            scene.system.check_up()
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(0.05)
        return True

    def _is_worn(self, part: str) -> bool:
        recent = [at for at in self._deaths.get(part, ()) if at > time.monotonic() - DEATHS_WITHIN_S]
        return len(recent) >= DEATHS_MAX

    def _arm(self, scene: Scene, stop: Stop) -> None:
        nth = self.nth if stop.point.made_for == TOKENS else 1
        # The time makes each order another one: calls are counted from it on.
        order = {"part": stop.point.part, "call": stop.point.call, "nth": nth, "action": stop.action}
        draft = scene.inject / "draft"
        draft.write_text(json.dumps(order | {"armed_at": time.monotonic()}))
        # Whole at once: a process may read it at any time.
        draft.rename(scene.inject / "armed")


async def _appears(scene: Scene, name: str) -> bool:
    """Whether the processes made the file in time; it is taken away again."""

    def is_there() -> bool:
        scene.system.check_up()
        return (scene.inject / name).exists()

    try:
        await wait_for(is_there, REACHED_WITHIN_S, name)
    except TimeoutError:
        return False
    (scene.inject / name).unlink()
    return True


async def _provoke(scene: Scene, point: Point, number: int) -> None:
    """See that the call is made, where tokens alone do not."""
    if point.made_for == FORMING:
        _kill_a_rank(scene)
    if point.made_for == CANCEL:
        body = {"model": scene.settings.speech.model, "prompt": [5], "max_tokens": 50, "stream": True}
        walker = PlannedCall(
            name=f"walk{number}",
            due_s=0.0,
            path=COMPLETIONS,
            body=body,
            intent="cancel",
            leave_after=1,
            says_cancel=True,
        )
        await scene.follow(walker)


def _kill_a_rank(scene: Scene) -> None:
    """So the group forms again."""
    ranks = [process for name, process in scene.system.parts().items() if role_of(name) == "rank"]
    for rank in ranks[:1]:
        if is_running(rank):
            rank.send_signal(signal.SIGKILL)
