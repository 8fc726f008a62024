"""The parts of a gateway process that all calls share."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from orca.gateway.answer.log_watcher import LogWatcher
from orca.gateway.answer.readers import Readers
from orca.gateway.answer.tracing import Tracing
from orca.gateway.http.receive import BodyBudget
from orca.gateway.limits.drain import Drain
from orca.gateway.limits.key_ring import KeyRing
from orca.gateway.limits.overload import Overload
from orca.gateway.metrics import GatewayMetrics
from orca.gateway.models.models import Models
from orca.gateway.settings import GatewaySettings
from orca.pool.api import RequestPool


@dataclass(slots=True, kw_only=True)
class Gateway:
    """The parts of a gateway process. Only tasks in `finishing` outlive the connection of their call."""

    pool: RequestPool
    models: Models
    settings: GatewaySettings
    clock_ms: Callable[[], int]
    metrics: GatewayMetrics
    tracing: Tracing
    watcher: LogWatcher
    readers: Readers
    keys: KeyRing
    overload: Overload
    body_budget: BodyBudget
    drain: Drain = field(default_factory=Drain)
    finishing: set[asyncio.Task[None]] = field(default_factory=set)

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the rest of a call's work after its answer. A process that ends waits for it a while."""
        task = asyncio.create_task(work)
        self.finishing.add(task)
        task.add_done_callback(self.finishing.discard)
