"""The group's seat in the pool, as this process takes it, holds it and leaves it."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Claim, Epoch
from orca.pool.api import StaleCall
from orca.pool.records import SeatEntered, SeatHeld
from orca.scheduler.dependencies import Dependencies

log = logging.getLogger("orca.scheduler")


class GroupSeat:
    """Enters the seat for each epoch, with what the epochs before have shown."""

    def __init__(self, dependencies: Dependencies, *, is_predecessor_dead: bool) -> None:
        """
        Args:
            is_predecessor_dead: the last holder was seen to exit. Only the first enter uses it: later holders may live.
        """
        self._dependencies = dependencies
        self._is_predecessor_dead = is_predecessor_dead
        self._reported_epoch = 0  # highest epoch that a stage has reported
        # The requests that ran when the engine failed from inside, until an enter has reported them.
        self._blamed: Mapping[str, Claim] = {}

    def note_failure(self, errors: Iterable[EngineError], blamed: Mapping[str, Claim] | None) -> None:
        """Record what the next enter reports. Args: blamed: the requests in flight if the engine failed from inside."""
        self._reported_epoch = max(self._reported_epoch, *(error.reported_epoch for error in errors))
        if blamed is not None:
            self._blamed = blamed

    async def enter(self) -> Epoch:
        """Take the seat, however long its present holder lives. Raises: ProcessClosed."""
        dependencies = self._dependencies
        while True:
            call = next(dependencies.calls)
            try:
                answer: SeatEntered | SeatHeld = await dependencies.call_pool(
                    lambda pool, call=call: pool.enter(  # type: ignore[misc]
                        dependencies.caller,
                        call,
                        reported_epoch=self._reported_epoch,
                        is_holder_dead=self._is_predecessor_dead,
                        blamed=self._blamed,
                    )
                )
            except StaleCall:
                continue
            self._is_predecessor_dead = False
            if isinstance(answer, SeatEntered):
                self._publish_blame(answer)
                log.info("seat taken", extra={"epoch": answer.epoch.number, "group": dependencies.caller.group})
                return answer.epoch
            dependencies.observer.stood_by()
            log.info("another process holds the seat", extra={"lease_ms": answer.lease_ms})
            await asyncio.sleep(min(max(answer.lease_ms, 1) / 1e3, dependencies.timings.heartbeat_s))

    def _publish_blame(self, answer: SeatEntered) -> None:
        self._blamed = {}
        if answer.failed or answer.poisoned:
            log.warning("requests are blamed", extra={"failed": answer.failed, "poisoned": answer.poisoned})
            self._dependencies.observer.blamed(answer.failed, answer.poisoned)

    async def leave(self) -> None:
        """Close this process in the pool. If the pool does not answer, the seat's lease does the same later."""
        dependencies = self._dependencies
        try:
            async with asyncio.timeout(dependencies.timings.flush_s):
                await dependencies.call_pool(lambda pool: pool.leave(dependencies.caller))
            log.info("left", extra={"group": dependencies.caller.group})
        except TimeoutError:
            log.warning("the pool did not answer the leave call in time", extra={"group": dependencies.caller.group})
