"""Says when a group has not been formed for long: nobody who reads the log or the metrics has to notice an absence."""

import asyncio
import logging
from collections.abc import Callable

import orjson

from orca.core.domain.step import Epoch
from orca.core.process.internal_port import Page
from orca.scheduler.observer import Observer

log = logging.getLogger("orca.scheduler")

LOOK_S = 0.5


class FormationWatch(Observer):
    """Since when this process, as the holder of the seat, has no formed group, and why."""

    def __init__(self, said_after_s: float, clock_s: Callable[[], float]) -> None:
        """
        Args:
            said_after_s: the log says it after so long, and again whenever the time has doubled.
            clock_s: monotonic.
        """
        self._said_after_s = said_after_s
        self._clock_s = clock_s
        self._since_s: float | None = clock_s()
        self._reason: str | None = None  # None until an epoch has ended
        self._next_s = said_after_s

    def unformed_s(self) -> float:
        """0 while the group is formed, and while another process holds its seat."""
        return 0.0 if self._since_s is None else self._clock_s() - self._since_s

    def ready_page(self) -> Page:
        """`/ready`: 200 while this process has formed the group and serves it, else 503 with the reason.

        A process that stands by for the holder of the seat is not ready either: it does not serve.
        """
        if self._since_s is None:
            return Page(b'{"ready":true}')
        body = {"ready": False, "for_seconds": round(self.unformed_s()), "reason": self.reason}
        return Page(orjson.dumps(body), status=503)

    @property
    def reason(self) -> str:
        """Why the group is not formed."""
        return self._reason or "it forms for the first time, its stages load or do not answer"

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Say it if it is time."""
        if self.unformed_s() < self._next_s:
            return
        # A first start may load for as long as it likes.
        level = logging.WARNING if self._reason is None else logging.ERROR
        log.log(level, "the group has not been formed for %.0f s: %s", self.unformed_s(), self.reason)
        self._next_s = max(2 * self._next_s, self.unformed_s())

    def formed(self, epoch: Epoch, slots: int, description: str) -> None:  # noqa: ARG002 - an observer's shape
        self._since_s, self._next_s = None, self._said_after_s

    def broke(self, epoch: Epoch, reason: str) -> None:  # noqa: ARG002 - an observer's shape
        self._reason = reason
        if self._since_s is None:
            self._since_s = self._clock_s()

    def stood_by(self) -> None:
        self._since_s, self._next_s = self._clock_s(), self._said_after_s
