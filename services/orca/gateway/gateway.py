"""What all calls of a gateway process share."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from orca.gateway.drain import Drain
from orca.gateway.key_ring import KeyRing
from orca.gateway.metrics import Metrics
from orca.gateway.models import Models
from orca.gateway.overload import Overload
from orca.gateway.readers import Readers
from orca.gateway.receive import Intake
from orca.gateway.settings import Settings
from orca.gateway.tracing import Tracing
from orca.gateway.watcher import LogWatcher
from orca.pool.api import Pool


@dataclass(slots=True, kw_only=True)
class Gateway:
    """Its parts; nothing of a call outlives its connection but what is in `finishing`."""

    pool: Pool
    models: Models
    settings: Settings
    clock_ms: Callable[[], int]
    metrics: Metrics
    tracing: Tracing
    watcher: LogWatcher
    readers: Readers
    keys: KeyRing
    overload: Overload
    intake: Intake
    drain: Drain = field(default_factory=Drain)
    finishing: set[asyncio.Task[None]] = field(default_factory=set)

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what is left of a call behind its answer; an ending process waits for it a while."""
        task = asyncio.create_task(work)
        self.finishing.add(task)
        task.add_done_callback(self.finishing.discard)
