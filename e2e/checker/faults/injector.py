"""Plans faults from a seed (pure), and injects them into processes of a system."""

import asyncio
import contextlib
import random
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psutil

from checker.history.records import Fault, HistoryWriter
from checker.systems.processes import role_of
from checker.systems.system import System

ROLES = ("gateway", "scheduler", "stage", "rank", "redis")
HITS_MAX = 4
HIT_WINDOW_S = 65.0
"""`orca up` gives up on a part that dies six times in a minute; faults stay below that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault, and the number of tokens that clients receive before it."""

    kind: str  # kill | freeze
    roles: tuple[str, ...]  # hits one part of each role; ("all",) is every part
    after_tokens: int
    delay_s: float  # after those tokens, so that some faults fall between two steps
    choice: float  # from 0 to 1: selects the part of the role
    seconds: float = 0.0  # length of a freeze


def plan_faults(
    *, seed: int, kills: int, roles: Sequence[str], freezes: bool, tokens_between: int
) -> list[PlannedFault]:
    """Plan `kills` faults over the roles: mostly one process, some pairs, now and then all parts or a freeze.

    Every role gets a fault before one gets its second.
    """
    chance = random.Random(f"{seed} faults")
    planned: list[PlannedFault] = []
    turns: list[str] = []
    for _ in range(kills):
        if not turns:
            turns = chance.sample(list(roles), k=len(roles))
        chosen: tuple[str, ...] = (turns.pop(),)
        kind, seconds, draw = "kill", 0.0, chance.random()
        if draw < 0.15 and len(roles) > 1:
            chosen = (chosen[0], chance.choice([role for role in roles if role != chosen[0]]))
        elif draw < 0.2 and len(roles) == len(ROLES):
            chosen = ("all",)
        elif draw < 0.35 and freezes:
            # Some freezes end unnoticed, some last longer than the seat's lease of three seconds.
            kind, seconds = "freeze", chance.choice((0.3, 1.5, 5.0))
        planned.append(
            PlannedFault(
                kind=kind,
                roles=chosen,
                after_tokens=chance.randint(1, tokens_between),
                delay_s=chance.random() * 0.1,
                choice=chance.random(),
                seconds=seconds,
            )
        )
    return planned


class Injector:
    """Injects planned faults into a system, each while clients wait for tokens."""

    def __init__(
        self,
        system: System,
        history: HistoryWriter,
        *,
        in_flight: Callable[[Collection[str]], tuple[str, ...]],
        tokens_received: Callable[[], int],
        settle_s: float = 0.0,
        is_worst_moment: Callable[[PlannedFault], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            in_flight: returns accepted calls that are not over; those of some gateways (host:port), or of all for ().
            settle_s: a part gets no fault until it has run this long; 0 also hits parts that are starting.
            is_worst_moment: called while a part is frozen; True ends the freeze early.
        """
        self._system = system
        self._history = history
        self._in_flight = in_flight
        self._tokens_heard = tokens_received
        self._settle_s = settle_s
        self._is_worst_moment = is_worst_moment
        self._clock = clock
        self._hits: defaultdict[str, deque[float]] = defaultdict(deque)
        self.done = 0

    async def inject(self, fault: PlannedFault, *, limit_s: float) -> bool:
        """Wait for the moment of a fault and inject it. Returns: False if the moment did not come within the limit.

        Raises: SystemFailure if `orca up` has ended.
        """
        ends = self._clock() + limit_s
        while await self._wait_for_moment(fault, ends):
            targets = self._targets(fault)
            in_flight = self._hit_by(targets)
            # Since that moment a stream may have ended, or a part may have died by itself.
            if targets and in_flight and not any(map(self._was_hit_too_often, targets)):
                await self._apply(fault, targets, in_flight)
                return True
        return False

    async def _wait_for_moment(self, fault: PlannedFault, ends: float) -> bool:
        """Wait until tokens flow and every target of the fault runs."""
        wanted = self._tokens_heard() + fault.after_tokens
        while self._tokens_heard() < wanted or not (targets := self._targets(fault)) or not self._hit_by(targets):
            self._system.check_up()
            if self._clock() > ends:
                return False
            await asyncio.sleep(0.01)
        await asyncio.sleep(fault.delay_s)
        return True

    def _targets(self, fault: PlannedFault) -> dict[str, psutil.Process]:
        """Return the parts that the fault hits now; none while one of them does not run."""
        started_before = time.time() - self._settle_s
        parts = {name: part for name, part in self._system.parts().items() if _started(part) <= started_before}
        if fault.roles == ("all",):
            return parts
        chosen: dict[str, psutil.Process] = {}
        for role in fault.roles:
            names = sorted(name for name in parts if role_of(name) == role)
            if not names:
                return {}
            name = names[int(fault.choice * len(names))]
            chosen[name] = parts[name]
        return chosen

    def _hit_by(self, targets: Collection[str]) -> tuple[str, ...]:
        """Return the calls that the loss of these parts affects: those of a gateway, or all for any other part."""
        if any(role_of(name) != "gateway" for name in targets):
            return self._in_flight(())
        return self._in_flight([self._system.addresses[name] for name in targets])

    def _was_hit_too_often(self, name: str) -> bool:
        hits = self._hits[name]
        while hits and hits[0] < self._clock() - HIT_WINDOW_S:
            hits.popleft()
        return len(hits) >= HITS_MAX

    async def _apply(self, fault: PlannedFault, targets: dict[str, psutil.Process], in_flight: tuple[str, ...]) -> None:
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        self._history.add(
            Fault(
                at=self._clock(),
                number=self.done,
                kind=fault.kind,
                targets=tuple(targets),
                pids=tuple(process.pid for process in targets.values()),
                in_flight=in_flight,
                seconds=fault.seconds,
            )
        )
        self.done += 1
        for name, process in targets.items():
            self._hits[name].append(self._clock())
            _send(process, number)
        if fault.kind == "freeze":
            ends = self._clock() + fault.seconds
            while self._clock() < ends and not self._is_worst_moment(fault):
                await asyncio.sleep(0.005)
            for process in targets.values():
                _send(process, signal.SIGCONT)


def _started(process: psutil.Process) -> float:
    """Return the start of a process in Unix time; infinity if it has just died."""
    try:
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return float("inf")


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, unless the process has just died by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
