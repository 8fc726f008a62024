"""The progress of a rank's work. Its main thread (or a kernel) writes it, its heartbeat sends it, and its controller
judges it (worker.controller.liveness).

The progress mark rises with every piece of work: a tensor read while loading, a layer of a step, a part of the head's
work, a wait that ended. So a long step moves the mark, and a hang does not. A rank that waits for another rank or for
orders may stand still for any time: it is not the rank that hangs.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

from orca.core.domain.step import Step

_TOKENS_PER_UNIT = 1024
"""Tokens for which a layer has one time limit. A longer step has one more for each further 1,024 tokens begun."""
_FIRST_STEP_UNITS = 12
"""Time limits of a layer in a process's first step, in which libraries initialise and kernels are compiled."""


@dataclass(slots=True)
class RankProgress:
    """The progress of one rank. The heartbeat reads it field by field, so one heartbeat may carry half of a change."""

    doing: str = "starts"
    is_waiting: bool = False  # for an order or another rank
    units: int = 1  # time limits that a piece of the present work may take
    loaded_permille: int = 0
    _has_run: bool = field(default=False, init=False)
    _moves: int = field(default=0, init=False)
    _layers: ctypes.c_int64 = field(default_factory=ctypes.c_int64, init=False)

    @property
    def mark(self) -> int:
        return self._moves + self._layers.value

    @property
    def layer_count_address(self) -> int:
        """The address of a 64-bit number that kernels increment after each layer, also while no Python runs."""
        return ctypes.addressof(self._layers)

    def at(self, doing: str, *, is_waiting: bool = False) -> None:
        """Begin another piece of work, or a wait."""
        self._moves += 1
        self.doing = doing
        self.is_waiting = is_waiting

    def move(self) -> None:
        """Count one more piece of the same work."""
        self._moves += 1

    def read(self, permille: int) -> None:
        """Count one more tensor read while loading. Args: permille: share of the weights read so far."""
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
        """Mark a wait for another rank. If the wait fails, `is_waiting` stays set: the other rank has failed."""
        before, self.is_waiting = self.is_waiting, True
        try:
            yield
        finally:
            self._moves += 1
        self.is_waiting = before
