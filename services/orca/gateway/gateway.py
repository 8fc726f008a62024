"""What all calls of a gateway process share."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from orca.gateway.answer.log_watcher import LogWatcher
from orca.gateway.answer.readers import Readers
from orca.gateway.answer.tracing import Tracing
from orca.gateway.http.receive import Intake
from orca.gateway.limits.drain import Drain
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.limits.overload import Overload
from orca.gateway.metrics import Metrics
from orca.gateway.models.models import Models
from orca.gateway.settings import Settings
from orca.pool.api import RequestPool


@dataclass(slots=True, kw_only=True)
class Gateway:
    """Its parts; nothing of a call outlives its connection but what is in `finishing`."""

    pool: RequestPool
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
