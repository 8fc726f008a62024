"""Which resources have to be looked at: each once, however often it was named, and never by two at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class WorkQueue(Generic[K]):
    """Keys are worked on in the order in which they were added; one that is added while it is worked on comes again."""

    def __init__(self) -> None:
        self._waiting: dict[K, None] = {}
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._later: dict[K, asyncio.TimerHandle] = {}
        self._adding: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    async def add(self, key: K) -> None:
        async with self._arrived:
            if key in self._active:
                self._again.add(key)
                return
            self._waiting[key] = None
            self._arrived.notify()

    def add_later(self, key: K, seconds: float) -> None:
        """Add it after so long; only the latest such wish counts."""
        if known := self._later.pop(key, None):
            known.cancel()
        loop = asyncio.get_running_loop()
        self._later[key] = loop.call_later(seconds, lambda: self._due(key))

    def forget(self, key: K) -> None:
        """It is gone: nobody looks at it later."""
        if known := self._later.pop(key, None):
            known.cancel()

    async def work(self, handle: Callable[[K], Awaitable[None]]) -> None:
        """Handle one key after the other until cancelled. `handle` lets no exception out but its cancellation."""
        while True:
            async with self._arrived:
                await self._arrived.wait_for(lambda: bool(self._waiting))
                key = next(iter(self._waiting))
                del self._waiting[key]
                self._active.add(key)
            try:
                await handle(key)
            finally:
                self._active.discard(key)
            if key in self._again:
                self._again.discard(key)
                await self.add(key)

    def _due(self, key: K) -> None:
        self._later.pop(key, None)
        task = asyncio.create_task(self.add(key))
        # Held until it is done: a loop keeps only weak references to its tasks.
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)
