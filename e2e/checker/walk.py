"""Walks the named points of the write path (points/names.py): each call of each part, each action, while clients wait.

Before and behind every call to Redis and between scheduler and stages a process dies, or the reply is lost and nobody
dies. Points of forming are reached because a rank is killed; the others because tokens flow.
"""

import asyncio
import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from checker.history import Fault
from checker.points.names import ACTIONS, DROP_REPLY, POINTS, Point
from checker.processes import is_running, role_of
from checker.run import Scene

REACHED_WITHIN_S = 40.0
CALM_WITHIN_S = 90.0
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


def plan_walk(roles: Iterable[str], *, only: str = "") -> list[Stop]:
    """All points of parts that clients can survive the loss of, each with each action.

    Args:
        only: a part of the names of those that are wanted, such as `redis.commit`.
    """
    # In turns: a part that has just died may not die again at once.
    turns = sorted(POINTS, key=lambda point: [each for each in POINTS if each.part == point.part].index(point))
    wanted = [Stop(point, action) for action in ACTIONS for point in turns]
    can_die = {"worker" if role == "stage" else role for role in roles}
    return [stop for stop in wanted if only in stop.name and (stop.action == DROP_REPLY or stop.point.part in can_die)]


@dataclass(slots=True)
class Walk:
    """A disturbance (see run.Disturb)."""

    only: str = ""
    nth: int = 3  # which call behind the moment of arming; points of forming take the first
    limit_s: float = float("inf")  # of the whole walk; what it does not come to is said
    _deaths: dict[str, list[float]] = field(default_factory=dict)

    async def __call__(self, scene: Scene) -> None:
        stops, reached, ends = plan_walk(scene.roles, only=self.only), 0, time.monotonic() + self.limit_s
        for number, stop in enumerate(stops):
            if time.monotonic() > ends:
                scene.tell(f"time is over: {len(stops) - number} points were not come to, the first is {stop.name}")
                break
            is_reached = await self._visit(scene, stop, number)
            reached += is_reached
            scene.tell(f"{number + 1} of {len(stops)}: {stop.name}{'' if is_reached else ': not reached'}")
        scene.tell(f"{reached} of {len(stops)} points reached")

    async def _visit(self, scene: Scene, stop: Stop, number: int) -> bool:
        await self._calm(scene, stop.point.part)
        fired, ends = scene.inject / "fired", time.monotonic() + REACHED_WITHIN_S
        self._arm(scene, stop)
        if stop.point.is_of_forming:
            _provoke(scene)
        in_flight = scene.client.in_flight()
        while not fired.exists():
            scene.system.check_up()
            if time.monotonic() > ends:
                (scene.inject / "armed").unlink(missing_ok=True)
                return False
            in_flight = scene.client.in_flight()
            await asyncio.sleep(0.02)
        at = time.monotonic()
        fired.unlink()
        if stop.action != DROP_REPLY:
            self._deaths.setdefault(stop.point.part, []).append(at)
        targets = (stop.point.part,)
        scene.history.add(Fault(at=at, number=number, kind=stop.name, targets=targets, pids=(), in_flight=in_flight))
        return True

    async def _calm(self, scene: Scene, part: str) -> None:
        """Tokens flow again, and the part has not died too often of late."""
        wanted, ends = scene.client.tokens_heard + TOKENS_OF_CALM, time.monotonic() + CALM_WITHIN_S
        while (scene.client.tokens_heard < wanted or self._is_worn(part)) and time.monotonic() < ends:
            scene.system.check_up()
            await asyncio.sleep(0.05)

    def _is_worn(self, part: str) -> bool:
        recent = [at for at in self._deaths.get(part, ()) if at > time.monotonic() - DEATHS_WITHIN_S]
        return len(recent) >= DEATHS_MAX

    def _arm(self, scene: Scene, stop: Stop) -> None:
        nth = 1 if stop.point.is_of_forming else self.nth
        # The time makes each order another one: calls are counted from it on.
        order = {"part": stop.point.part, "call": stop.point.call, "nth": nth, "action": stop.action}
        draft = scene.inject / "draft"
        draft.write_text(json.dumps(order | {"armed_at": time.monotonic()}))
        # Whole at once: a process may read it at any time.
        draft.rename(scene.inject / "armed")


def _provoke(scene: Scene) -> None:
    """A rank dies, so the group forms again."""
    ranks = [process for name, process in scene.system.parts().items() if role_of(name) == "rank"]
    for rank in ranks[:1]:
        if is_running(rank):
            rank.send_signal(signal.SIGKILL)
