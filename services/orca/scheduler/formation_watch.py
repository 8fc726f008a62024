"""Logs that a group has not been formed for long, so that nobody has to notice missing lines in the log or metrics."""

import asyncio
import logging
from collections.abc import Callable

import orjson

from orca.core.domain.step import Epoch
from orca.core.process.internal_port import Page
from orca.scheduler.observer import Observer

log = logging.getLogger("orca.scheduler")

POLL_S = 0.5


class FormationWatch(Observer):
    """The time for which this process, as the holder of the seat, has had no formed group, and the reason."""

    def __init__(self, log_after_s: float, clock_s: Callable[[], float]) -> None:
        """
        Args:
            log_after_s: time after which it is logged, and again whenever the time has doubled.
            clock_s: monotonic.
        """
        self._log_after_s = log_after_s
        self._clock_s = clock_s
        self._since_s: float | None = clock_s()
        self._reason: str | None = None  # None until an epoch has ended
        self._next_s = log_after_s

    def unformed_s(self) -> float:
        """Return 0 while the group is formed, and while another process holds its seat."""
        return 0.0 if self._since_s is None else self._clock_s() - self._since_s

    def ready_page(self) -> Page:
        """Return the page `/ready`: 200 while this process has formed the group and serves it, otherwise 503.

        The body of a 503 holds the reason. A process that waits while another one holds the seat does not serve, so it
        is not ready either.
        """
        if self._since_s is None:
            return Page(b'{"ready":true}')
        body = {"ready": False, "for_seconds": round(self.unformed_s()), "reason": self.reason}
        return Page(orjson.dumps(body), status=503)

    @property
    def reason(self) -> str:
        """The reason why the group is not formed."""
        return self._reason or "it forms for the first time, its stages load or do not answer"

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(POLL_S)

    def poll(self) -> None:
        """Log the time if it is due."""
        if self.unformed_s() < self._next_s:
            return
        # On a first start stages may load for any time.
        level = logging.WARNING if self._reason is None else logging.ERROR
        log.log(level, "the group has not been formed for %.0f s: %s", self.unformed_s(), self.reason)
        self._next_s = max(2 * self._next_s, self.unformed_s())

    def formed(self, epoch: Epoch, slots: int, description: str) -> None:  # noqa: ARG002 - an observer's shape
        self._since_s, self._next_s = None, self._log_after_s

    def broke(self, epoch: Epoch, reason: str) -> None:  # noqa: ARG002 - an observer's shape
        self._reason = reason
        if self._since_s is None:
            self._since_s = self._clock_s()

    def stood_by(self) -> None:
        self._since_s, self._next_s = self._clock_s(), self._log_after_s
