"""A queue of resources to reconcile: each is in it once, however often it was added, and only one worker has it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class WorkQueue(Generic[K]):
    """Workers get keys in the order in which they were added. A key that is added while a worker has it comes again."""

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
        """Add a key after a delay. Only the last such call for a key counts."""
        if known := self._later.pop(key, None):
            known.cancel()
        loop = asyncio.get_running_loop()
        self._later[key] = loop.call_later(seconds, lambda: self._add_now(key))

    def forget(self, key: K) -> None:
        """Cancel the delayed add of a key that is gone."""
        if known := self._later.pop(key, None):
            known.cancel()

    async def work(self, handle: Callable[[K], Awaitable[None]]) -> None:
        """Handle one key after another until cancelled. Args: handle: must raise nothing but its cancellation."""
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

    def _add_now(self, key: K) -> None:
        self._later.pop(key, None)
        task = asyncio.create_task(self.add(key))
        # Held until it is done, since a loop keeps only weak references to its tasks.
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)
