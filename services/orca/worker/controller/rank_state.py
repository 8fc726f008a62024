"""The latest reports of a rank, and its liveness as of now."""

import asyncio
import dataclasses
from collections.abc import Callable

from orca.worker.controller.liveness import RankLiveness
from orca.worker.messages.frames import LoadReport, RankHeartbeat

_COMPUTED_S = 0.5
"""Processor time that counts as progress while a rank loads: far more than its heartbeat uses in a minute."""


class RankState:
    """The state of one rank process, as its frames report it."""

    def __init__(self, clock: Callable[[], float], cpu_time_s: Callable[[], float]) -> None:
        """
        Args:
            clock: seconds by which silence is counted.
            cpu_time_s: processor time of the process so far.
        """
        self.loaded: LoadReport | None = None  # None again when the process is gone
        self.loaded_event = asyncio.Event()
        self.refusal: str | None = None  # why this model or these settings can never be served
        self.heartbeat = RankHeartbeat()  # the latest
        self._clock = clock
        self._processor_time_s = cpu_time_s
        self._heard = self._moved = clock()  # time of the last frame, and of the last progress
        self._computed_s = 0.0  # processor time when it last counted as progress

    @property
    def loaded_permille(self) -> int:
        """Share of the weights that the process holds."""
        return self.heartbeat.loaded_permille if self.loaded is None else 1000

    @property
    def liveness(self) -> RankLiveness:
        now = self._clock()
        if self.loaded is None:
            self._count_processor_time(now)
        return RankLiveness(
            is_loaded=self.loaded is not None,
            silent_s=now - self._heard,
            still_s=now - self._moved,
            is_waiting=self.heartbeat.is_waiting,
            units=self.heartbeat.units,
            doing=self.heartbeat.doing,
        )

    def note_frame(self) -> None:
        """Note that a frame of any kind has arrived."""
        self._heard = self._clock()

    def note_heartbeat(self, heartbeat: RankHeartbeat) -> None:
        if heartbeat.mark != self.heartbeat.mark:
            self._moved = self._heard
        self.heartbeat = heartbeat

    def note_loaded(self, report: LoadReport) -> None:
        self.loaded = report
        self._moved = self._heard
        self.loaded_event.set()

    def forget_load(self) -> None:
        """Note that the process is gone, or will be soon."""
        self.loaded, self.heartbeat = None, dataclasses.replace(self.heartbeat, loaded_permille=0)

    def _count_processor_time(self, now: float) -> None:
        """Count processor time as progress: a rank that imports its libraries has no progress mark to move yet.

        On a machine that others keep busy, the imports alone may take longer than the bound on silence.
        """
        computed_s = self._processor_time_s()
        if computed_s - self._computed_s >= _COMPUTED_S:
            self._computed_s, self._moved = computed_s, now
