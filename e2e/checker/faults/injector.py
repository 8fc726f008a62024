"""Which faults to do, drawn from a seed (pure), and the hand that does them to processes of a system."""

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
"""`orca up` gives up on a part that dies six times in a minute; faults keep below that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """What to do, and after how many tokens that clients hear from now on."""

    kind: str  # kill | freeze
    roles: tuple[str, ...]  # a part of each is chosen when it is done; ("all",) is every part
    after_tokens: int
    delay_s: float  # behind those tokens: so that moments fall between steps too
    choice: float  # from 0 to 1: which part of the role
    seconds: float = 0.0  # of a freeze


def plan_faults(
    *, seed: int, kills: int, roles: Sequence[str], freezes: bool, tokens_between: int
) -> list[PlannedFault]:
    """`kills` faults over the roles: mostly one process, some pairs, now and then all at once or a freeze.

    Every role has its turn before one has its second.
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
            # Some end before anybody notices, some outlast the seat's lease of three seconds.
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
    """Does planned faults to a system, each while clients wait for tokens."""

    def __init__(
        self,
        system: System,
        history: HistoryWriter,
        *,
        in_flight: Callable[[Collection[str]], tuple[str, ...]],
        tokens_heard: Callable[[], int],
        settle_s: float = 0.0,
        is_worst_moment: Callable[[PlannedFault], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            in_flight: calls that are accepted and not over; of some gateways (host:port), or of all when it gets none.
            settle_s: a part is spared until it has run so long; 0 also hits what has only begun to start.
            is_worst_moment: asked while a part is frozen; True wakes it before its time.
        """
        self._system = system
        self._history = history
        self._in_flight = in_flight
        self._tokens_heard = tokens_heard
        self._settle_s = settle_s
        self._is_worst_moment = is_worst_moment
        self._clock = clock
        self._hits: defaultdict[str, deque[float]] = defaultdict(deque)
        self.done = 0

    async def inject(self, fault: PlannedFault, *, limit_s: float) -> bool:
        """Wait for the moment and do it. Returns: False when the moment did not come within the limit.

        Raises: SystemBroke when `orca up` has ended.
        """
        ends = self._clock() + limit_s
        while await self._moment(fault, ends):
            targets = self._targets(fault)
            in_flight = self._hit_by(targets)
            # Between the moment and now a stream may have ended, or a part died by itself.
            if targets and in_flight and not any(map(self._is_worn, targets)):
                await self._do(fault, targets, in_flight)
                return True
        return False

    async def _moment(self, fault: PlannedFault, ends: float) -> bool:
        """Tokens flow, and every part that the fault asks for runs."""
        wanted = self._tokens_heard() + fault.after_tokens
        while self._tokens_heard() < wanted or not (targets := self._targets(fault)) or not self._hit_by(targets):
            self._system.check_up()
            if self._clock() > ends:
                return False
            await asyncio.sleep(0.01)
        await asyncio.sleep(fault.delay_s)
        return True

    def _targets(self, fault: PlannedFault) -> dict[str, psutil.Process]:
        """The parts that it hits now; none while one of them is away."""
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
        """Calls that losing these parts touches: of a gateway, those that it answers; of any other part, all."""
        if any(role_of(name) != "gateway" for name in targets):
            return self._in_flight(())
        return self._in_flight([self._system.addresses[name] for name in targets])

    def _is_worn(self, name: str) -> bool:
        hits = self._hits[name]
        while hits and hits[0] < self._clock() - HIT_WINDOW_S:
            hits.popleft()
        return len(hits) >= HITS_MAX

    async def _do(self, fault: PlannedFault, targets: dict[str, psutil.Process], in_flight: tuple[str, ...]) -> None:
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
    """Unix time; for ever away when it has just died."""
    try:
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return float("inf")


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """A process that has just died by itself needs no fault."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
