"""An engine that takes only as many steps as a test allows, so that the test decides what meets in a step."""

import asyncio
from typing import Any

from orca.core.domain.engine import Engine
from orca.core.domain.step import Step


class PacedEngine:
    """Passes all calls on to another engine. A step waits until it is allowed, or until the engine is set free."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._allowed = asyncio.Semaphore(0)
        self._is_free = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def set_free(self) -> None:
        self._is_free = True
        self.allow(1)  # for the step that waits

    async def submit(self, step: Step) -> None:
        if not self._is_free:
            await self._allowed.acquire()
        await self._engine.submit(step)
