"""Finds processes that are there and do not move: stopped by a signal, blocked, or in an endless loop.

Each is asked as a kubelet would ask it (period, bound, failures in a row) for what only its own event loop can answer;
nothing else shows a freeze, since the kernel goes on taking its connections and gRPC answers pings by a thread. It is
asked from its first answer on, so that a start may take as long as it takes. Ranks are their controllers' to watch.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca.cli.up.supervisor import Supervised

MISSES_MAX = 3
"""In a row. One or two are a busy machine."""

_OWN_DELAY_S = 0.5
"""An answer that is waited for so much longer than its bound says that this process itself stood still."""


@dataclass(slots=True)
class Silence:
    """What a process and its successors under one name left unanswered: the decision, without clock or process."""

    _pid: int | None = None
    _has_come_up: bool = False
    _misses: int = 0

    def note(self, pid: int | None, *, is_answered: bool) -> bool:
        """Take note of one question. Returns: whether the process is frozen; it then gets as much time again.

        Args:
            pid: whom it went to; None when nobody ran.
        """
        if pid is None or pid != self._pid:
            self._pid, self._has_come_up, self._misses = pid, False, 0
        if is_answered:
            self._has_come_up, self._misses = True, 0
        elif self._has_come_up:
            self._misses += 1
        is_frozen = self._misses == MISSES_MAX
        if is_frozen:
            self._misses = 0
        return is_frozen


class Probe:
    """Asks every process of a system, and deals with those that are frozen."""

    def __init__(
        self,
        children: Sequence[Supervised],
        *,
        period_s: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            period_s: between two questions to a process, and bound on each answer; 0 asks nobody.
            tell: gets a sentence for people about each process that is frozen.
        """
        self._children = children
        self._period_s = period_s
        self._tell = tell
        self._clock = clock

    async def run(self) -> None:
        """Runs until cancelled."""
        if self._period_s:
            await asyncio.gather(*(self._watch(child) for child in self._children))

    async def _watch(self, child: Supervised) -> None:
        silence = Silence()
        while True:
            pid, asked_s = child.pid, self._clock()
            is_answered = pid is not None and await child.is_answering(self._period_s)
            took_s = self._clock() - asked_s
            if is_answered or took_s < self._period_s + _OWN_DELAY_S:
                is_frozen = silence.note(pid, is_answered=is_answered)
                if is_frozen and child.pid == pid:
                    self._tell(self._sentence(child, pid))
            await asyncio.sleep(max(0.0, self._period_s - took_s))

    def _sentence(self, child: Supervised, pid: int | None) -> str:
        """Ends the freeze, and says so."""
        bound_s = MISSES_MAX * self._period_s
        return f"{child.spec.name} (pid {pid}) is frozen: it answered nothing for {bound_s:g} s; {child.unfreeze()}"
