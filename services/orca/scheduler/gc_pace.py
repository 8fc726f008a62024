"""Collects garbage in small pieces at a steady pace: a scheduler keeps many objects, and its steps must not pause.

Python collects young objects when many more were created than freed. A scheduler with a full prefix cache frees a block
for each new one, so collections are rare, and each looks at all that was created since the last one. With 100,000
blocks and 64 requests in a batch, steps of 0.5 ms now and then paused for 140 ms. With a collection every 20 steps the
longest of 12,000 steps took 3 ms, and the mean was shorter.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable

from orca.core.domain.step import Epoch
from orca.scheduler.observer import Observer

PACE_S = 0.1
"""Seconds between collections of young objects."""

FULL_EVERY = 36_000
"""Collections of young objects until one of all objects: an hour. That one takes 0.1 s with 100,000 cached blocks."""


class GcPace(Observer):
    """Collects garbage of the whole process. As an observer it learns that what the last epoch left can go."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Args: sleep: waits for some seconds."""
        self._sleep = sleep
        self._until_full = FULL_EVERY

    def formed(self, epoch: Epoch, slots: int, description: str) -> None:  # noqa: ARG002 - an event's shape
        self._until_full = 0

    async def run(self) -> None:
        """Collect until cancelled. Meanwhile Python itself collects nothing."""
        gc.disable()
        try:
            while True:
                await self._sleep(PACE_S)
                self._until_full -= 1
                if self._until_full > 0:
                    gc.collect(1)
                else:
                    gc.collect()
                    self._until_full = FULL_EVERY
        finally:
            gc.enable()
