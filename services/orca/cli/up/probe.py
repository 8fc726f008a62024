"""Finds processes that are there and do not move: stopped by a signal, blocked, or in an endless loop.

Each is asked for what only its own event loop can answer; nothing else shows a freeze, since the kernel goes on taking
its connections and gRPC answers pings by a thread. A question is waited for until the bound on silence is over, not
dropped and put again: one that is slow, because others keep the machine busy or a crowd is at its door, answers in the
end, and each new question would have to queue behind the crowd anew. A process is asked from its first answer on, so
that a start may take as long as it takes. Ranks are their controllers' to watch.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca.cli.up.supervisor import Supervised

SILENT_PERIODS = 3
"""So many periods without any answer are a freeze."""

_OWN_DELAY_S = 0.5
"""An answer that is waited for so much longer than its bound says that this process itself stood still."""


@dataclass(slots=True, kw_only=True)
class Silence:
    """What a process and its successors under one name left unanswered: the decision, without clock or process."""

    bound_s: float
    _pid: int | None = None
    _has_come_up: bool = False
    _since_s: float | None = None  # when the oldest question without an answer was put

    def patience_s(self, now_s: float) -> float:
        """How long a question that is put now may be waited for."""
        return self.bound_s if self._since_s is None else max(self._since_s + self.bound_s - now_s, 0.0)

    def note(self, pid: int | None, asked_s: float, now_s: float, *, is_answered: bool) -> bool:
        """Take note of one question. Returns: whether the process is frozen; it then gets as much time again.

        Args:
            pid: whom it went to; None when nobody ran.
            asked_s, now_s: when it was put, and when its answer came or was given up.
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
            period_s: between two questions to a process that answers; 0 asks nobody.
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
        silence = Silence(bound_s=SILENT_PERIODS * self._period_s)
        while True:
            pid, asked_s = child.pid, self._clock()
            is_answered = pid is not None and await child.is_answering(silence.patience_s(asked_s))
            now_s = self._clock()
            if silence.note(pid, asked_s, now_s, is_answered=is_answered) and child.pid == pid:
                said = f"{child.spec.name} (pid {pid}) is frozen: it answered nothing for {silence.bound_s:g} s"
                self._tell(f"{said}; {child.unfreeze()}")
            # Who is dead and not yet collected refuses at once, and is not to be asked in a busy loop.
            await asyncio.sleep(min(max(asked_s + self._period_s - now_s, 0.0), silence.patience_s(now_s)))
