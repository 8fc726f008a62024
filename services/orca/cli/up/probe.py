"""Finds processes that are frozen: stopped by a signal, blocked, or in an endless loop.

A health check asks for an answer that only the process's own event loop can give. Nothing else shows a freeze: the
kernel still accepts connections, and gRPC answers pings from a thread. A check waits until the bound on silence is
over; it is not dropped and sent again. A process that is slow, because the machine is busy or many clients wait,
answers in the end, and each new check would queue after those clients again. A process counts as silent only after its
first answer, so a start may take long. Controllers watch their own ranks.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca.cli.up.supervisor import Supervised

SILENT_PERIODS_MAX = 3
"""A process that does not answer for this many periods is frozen."""

_OWN_DELAY_S = 0.5
"""Excess of a check over its bound that shows that this process itself stood still."""


@dataclass(slots=True, kw_only=True)
class Silence:
    """Decides whether a process, or its restart under the same name, is frozen. Uses no clock and no process."""

    bound_s: float
    _pid: int | None = None
    _has_come_up: bool = False
    _since_s: float | None = None  # when the oldest unanswered check began

    def patience_s(self, now_s: float) -> float:
        """Return how long a check that begins now may wait for its answer."""
        return self.bound_s if self._since_s is None else max(self._since_s + self.bound_s - now_s, 0.0)

    def record(self, pid: int | None, asked_s: float, now_s: float, *, is_answered: bool) -> bool:
        """Record the result of one check. Returns: whether the process is frozen; it then gets the same time again.

        Args:
            pid: the process that was checked; None when none ran.
            asked_s, now_s: when the check began, and when its answer came or it was given up.
        """
        if pid is None or pid != self._pid:
            self._pid, self._has_come_up, self._since_s = pid, False, None
        is_late = now_s - asked_s > self.patience_s(asked_s) + _OWN_DELAY_S
        if is_answered:
            self._has_come_up = True
        if is_answered or is_late or not self._has_come_up:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = asked_s
        is_frozen = self.patience_s(now_s) == 0
        if is_frozen:
            self._since_s = None
        return is_frozen


class Probe:
    """Checks every process of a system, and unfreezes those that are frozen."""

    def __init__(
        self,
        children: Sequence[Supervised],
        *,
        period_s: float,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            period_s: time between two checks of a process that answers; 0 turns checks off.
            report: prints a sentence for people about each process that is frozen.
        """
        self._children = children
        self._period_s = period_s
        self._report = report
        self._clock = clock

    async def run(self) -> None:
        """Run until cancelled."""
        if self._period_s:
            await asyncio.gather(*(self._watch(child) for child in self._children))

    async def _watch(self, child: Supervised) -> None:
        silence = Silence(bound_s=SILENT_PERIODS_MAX * self._period_s)
        while True:
            pid, asked_s = child.pid, self._clock()
            is_answered = pid is not None and await child.is_answering(silence.patience_s(asked_s))
            now_s = self._clock()
            if silence.record(pid, asked_s, now_s, is_answered=is_answered) and child.pid == pid:
                finding = f"{child.spec.name} (pid {pid}) is frozen: it did not answer for {silence.bound_s:g} s"
                self._report(f"{finding}; {child.unfreeze()}")
            # A dead process refuses at once until it is collected: wait, so that this is no busy loop.
            await asyncio.sleep(min(max(asked_s + self._period_s - now_s, 0.0), silence.patience_s(now_s)))
