"""Where a rank's work stands. Its main thread writes it, or a kernel for it, its heartbeat sends it,
worker.controller.liveness judges it.

The mark rises with every piece of work: a tensor read while loading, a layer of a step, a part of what the head does, a
wait that ended. So a long step moves and a hang stands still; and a rank that waits for another one or for orders may
stand still as long as it likes, for it is not the one that hangs.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

from orca.core.domain.step import Step

_TOKENS_PER_UNIT = 1024
"""A layer over so many tokens must end within the bound; a longer step has the bound once for each of them begun."""
_FIRST_STEP_UNITS = 12
"""In a process's first step libraries set themselves up and kernels are compiled, inside a layer."""


@dataclass(slots=True)
class Progress:
    """One rank's. The heartbeat reads it field by field: what it sends may be half of a change, the next is right."""

    doing: str = "starts"
    is_waiting: bool = False  # for an order or another rank
    units: int = 1  # times the usual bound that a piece of the present work may take
    loaded_permille: int = 0
    _has_run: bool = field(default=False, init=False)
    _moves: int = field(default=0, init=False)
    _layers: ctypes.c_int64 = field(default_factory=ctypes.c_int64, init=False)

    @property
    def mark(self) -> int:
        return self._moves + self._layers.value

    @property
    def layers_at(self) -> int:
        """The address of a number of 64 bits that rises with each layer, also while no Python runs."""
        return ctypes.addressof(self._layers)

    def at(self, doing: str, *, is_waiting: bool = False) -> None:
        """Begin another piece of work, or a wait."""
        self._moves += 1
        self.doing = doing
        self.is_waiting = is_waiting

    def move(self) -> None:
        """One more piece of the same work is done."""
        self._moves += 1

    def read(self, permille: int) -> None:
        """While loading: one more tensor was read, and the share of the weights read is now this."""
        self._moves += 1
        self.loaded_permille = permille

    def begin_step(self, step: Step) -> None:
        self.units = max(1, -(-step.tokens // _TOKENS_PER_UNIT)) * (1 if self._has_run else _FIRST_STEP_UNITS)
        self.at(f"step {step.number}: state")

    def end_step(self, step: Step) -> None:
        self._has_run |= step.tokens > 0
        self.at(f"step {step.number}: done", is_waiting=True)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for another rank. One that fails leaves `is_waiting` set: it was the other one's failure."""
        before, self.is_waiting = self.is_waiting, True
        try:
            yield
        finally:
            self._moves += 1
        self.is_waiting = before
