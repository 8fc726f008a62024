"""Walks the named points of the write path (points/names.py): each call of each part, each action, while clients wait.

Before and after every call to Redis and between scheduler and stages, a process dies, or the reply is lost without a
death. To reach the points of forming, the walk kills a rank; to reach the point of cancelling, its own client cancels;
the other points are reached while tokens flow. Each stop has a time limit (TOKENS_WITHIN_S, REACHED_WITHIN_S). The walk
reports a point that was not reached, with the reason.
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
from checker.runs.context import RunContext
from checker.systems.processes import is_running, role_of
from checker.systems.system import wait_for

REACHED_WITHIN_S = 120.0
TOKENS_WITHIN_S = 180.0
TOKENS_WANTED = 40
"""Tokens after the last fault that show that the group serves again."""
DEATHS_MAX, DEATHS_WITHIN_S = 4, 65.0
"""`orca up` gives up on a part that dies six times in a minute."""


@dataclass(frozen=True, slots=True)
class WalkStop:
    """One stop of the walk: a point and an action."""

    point: Point
    action: str

    @property
    def name(self) -> str:
        return f"{self.point.name}: {self.action}"

    @property
    def is_late(self) -> bool:
        """Does a call come late, which its process reports?"""
        return LATE_POINTS.get(self.point) == self.action

    @property
    def kills(self) -> bool:
        return self.action not in (DROP_REPLY, COME_LATE)


def plan_walk(roles: Iterable[str], *, only: str = "") -> list[WalkStop]:
    """Plan all points of parts whose loss clients can survive, each with each action.

    Args:
        only: a part of the names of the wanted points, such as `redis.commit`.
    """
    # Parts take turns: a part that has just died must not die again at once.
    turns = sorted(POINTS, key=lambda point: [each for each in POINTS if each.part == point.part].index(point))
    wanted = [WalkStop(point, action) for action in ACTIONS for point in turns]
    wanted += [WalkStop(point, action) for point, action in LATE_POINTS.items()]
    can_die = {"worker" if role == "stage" else role for role in roles}
    return [stop for stop in wanted if only in stop.name and (not stop.kills or stop.point.part in can_die)]


@dataclass(slots=True)
class Walk:
    """A disturbance (see checker.runs.context.Disturbance)."""

    only: str = ""
    nth: int = 3  # number of the call after arming; points of forming take the first
    limit_s: float = float("inf")  # of the whole walk; it reports the points that it did not get to
    _deaths: dict[str, list[float]] = field(default_factory=dict)

    async def __call__(self, context: RunContext) -> None:
        stops, missed, ends = plan_walk(context.roles, only=self.only), 0, time.monotonic() + self.limit_s
        for number, stop in enumerate(stops):
            if time.monotonic() > ends:
                context.report(
                    f"the time is over: {len(stops) - number} points were not visited, the first is {stop.name}"
                )
                missed += len(stops) - number
                break
            failure = await self._visit(context, stop, number)
            missed += failure is not None
            context.report(
                f"{number + 1} of {len(stops)}: {stop.name}" + (f": not reached, {failure}" if failure else "")
            )
        await self._wait_for_tokens(context, "")
        context.report(f"{len(stops) - missed} of {len(stops)} points reached")

    async def _visit(self, context: RunContext, stop: WalkStop, number: int) -> str | None:
        """Visit a stop. Returns: the reason why the point was not reached; None if it was."""
        has_tokens = await self._wait_for_tokens(context, stop.point.part)
        self._arm(context, stop)
        provoking = asyncio.create_task(_provoke(context, stop.point, number))
        is_reached = await _wait_for_file(context, "fired")
        if not is_reached:
            (context.inject / "armed").unlink(missing_ok=True)
        else:
            at, targets, in_flight = time.monotonic(), (stop.point.part,), context.client.in_flight()
            if stop.kills:
                self._deaths.setdefault(stop.point.part, []).append(at)
            fault = Fault(at=at, number=number, kind=stop.name, targets=targets, pids=(), in_flight=in_flight)
            context.history.add(fault)
        await provoking
        if not is_reached:
            tokens = "" if has_tokens else f", nor {TOKENS_WANTED} tokens in the {TOKENS_WITHIN_S:g} s before"
            return f"no such call came within {REACHED_WITHIN_S:g} s{tokens}"
        if stop.action == COME_LATE:
            _kill_a_rank(context)
        if stop.is_late and not await _wait_for_file(context, CAME_LATE):
            return f"no join or claim within {REACHED_WITHIN_S:g} s"
        return None

    async def _wait_for_tokens(self, context: RunContext, part: str) -> bool:
        """Wait until tokens flow again and the part has not died too often. Returns: False after the limit."""
        wanted, ends = context.client.tokens_received + TOKENS_WANTED, time.monotonic() + TOKENS_WITHIN_S
        while context.client.tokens_received < wanted or self._was_hit_too_often(part):
            context.system.check_up()
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(0.05)
        return True

    def _was_hit_too_often(self, part: str) -> bool:
        recent = [at for at in self._deaths.get(part, ()) if at > time.monotonic() - DEATHS_WITHIN_S]
        return len(recent) >= DEATHS_MAX

    def _arm(self, context: RunContext, stop: WalkStop) -> None:
        nth = self.nth if stop.point.made_for == TOKENS else 1
        # The time makes each order different, because calls are counted per order.
        order = {"part": stop.point.part, "call": stop.point.call, "nth": nth, "action": stop.action}
        draft = context.inject / "draft"
        draft.write_text(json.dumps(order | {"armed_at": time.monotonic()}))
        # The rename makes the whole file visible at once, because a process may read it at any time.
        draft.rename(context.inject / "armed")


async def _wait_for_file(context: RunContext, name: str) -> bool:
    """Wait until a process made the file, and remove it. Returns: False if no process did in time."""

    def is_there() -> bool:
        context.system.check_up()
        return (context.inject / name).exists()

    try:
        await wait_for(is_there, REACHED_WITHIN_S, name)
    except TimeoutError:
        return False
    (context.inject / name).unlink()
    return True


async def _provoke(context: RunContext, point: Point, number: int) -> None:
    """Cause the call of a point, if the flow of tokens does not."""
    if point.made_for == FORMING:
        _kill_a_rank(context)
    if point.made_for == CANCEL:
        body = {"model": context.settings.prompt_source.model, "prompt": [5], "max_tokens": 50, "stream": True}
        walker = PlannedCall(
            name=f"walk{number}",
            due_s=0.0,
            path=COMPLETIONS,
            body=body,
            intent="cancel",
            leave_after=1,
            sends_cancel=True,
        )
        await context.run_call(walker)


def _kill_a_rank(context: RunContext) -> None:
    """Kill one rank, so that the group forms again."""
    ranks = [process for name, process in context.system.parts().items() if role_of(name) == "rank"]
    for rank in ranks[:1]:
        if is_running(rank):
            rank.send_signal(signal.SIGKILL)
