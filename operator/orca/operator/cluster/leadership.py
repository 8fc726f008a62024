"""Which of several operators acts: the one whose name stands in a Lease.

One replica and `Recreate` keep two operators apart only while the cluster hears of the first one's node. A node that
comes back, or an operator that somebody starts by hand, makes them two. A Lease is written in the version that was
read: of two who take it at the same time one is refused.

A holder that does not get it renewed in time ends its process. It may have slept or been cut off, so what it has read
and planned is void; a new start forgets that for certain, and waits for the Lease like anybody else. One API call may
be on its way even then. It was decided in time, and whoever acts next looks at what it left.

Two may still write at the same time where a hypervisor pauses a machine that is not told, as all of its clocks stand
still then, where a machine is suspended in the middle of a call, and where the API server applies a write that its
client has given up.

The client library's `kubernetes.leaderelection` is of no use here: it can be neither stopped nor made to release,
judges by the wall clock, bounds no call, and ends by a lost connection.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from orca.operator.cluster.api_server import ApiError, Cluster
from orca.operator.domain.resource import Json
from orca.operator.plan.lease import Terms, holder, may_take, released, taken

log = logging.getLogger(__name__)


def elapsed_s() -> float:
    """Seconds since a moment that stays the same, those in which the machine was suspended included, where the system
    counts them: on Linux the monotonic clock leaves them out."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Leadership:
    """Wait for the Lease, keep it, release it."""

    def __init__(self, cluster: Cluster, terms: Terms, clock: Callable[[], float] = elapsed_s) -> None:
        """Args: clock: seconds that pass while the process is stopped too, and the machine."""
        self._cluster = cluster
        self._terms = terms
        self._clock = clock
        # Not one of the loop's own threads: those may all wait for calls of looks.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lease")
        self._lease: Json | None = None
        self._seen_s = self._heard_s = clock()
        self._writing_ends_s: float | None = None  # None until it is held for the first time
        self._said = ""
        self.taken = asyncio.Event()

    @property
    def is_held(self) -> bool:
        return self._writing_ends_s is not None and self._clock() < self._writing_ends_s

    @property
    def is_lost(self) -> bool:
        """For good: it was held."""
        return self._writing_ends_s is not None and not self.is_held

    def write_s(self) -> float:
        """Seconds that a write which begins now may take; 0 when none may begin."""
        ends_s, now_s = self._writing_ends_s, self._clock()
        if ends_s is None or now_s >= ends_s:
            return 0.0
        return ends_s - now_s + self._terms.duration_s - self._terms.writing_s

    def heard_age_s(self) -> float:
        """Since the API server last showed it."""
        return self._clock() - self._heard_s

    async def hold(self) -> None:
        """Wait for it, set `taken`, and keep it. Returns when it is lost."""
        log.info("lease", extra={"lease": self._terms.name, "identity": self._terms.identity})
        loop = asyncio.get_running_loop()
        while not self.is_lost:
            try:
                await loop.run_in_executor(self._thread, self.renew)
            except ApiError as error:
                self._say(logging.WARNING, f"the Lease cannot be read or written: {error}")
            if self.is_held:
                self.taken.set()
            await asyncio.sleep(self._terms.retry_s)

    def renew(self) -> None:
        """One try to take or renew it. Raises: ApiError."""
        found = self._cluster.lease(self._terms.namespace, self._terms.name)
        self._heard_s = self._clock()
        self._see(found)
        if self._writing_ends_s is not None and holder(found) not in (None, self._terms.identity):
            self._writing_ends_s = -math.inf
        began_s = self._clock()
        # Looks that were begun before it was lost may still go on: they must not write because it is free again.
        if self.is_lost:
            return
        if not may_take(found, self._terms, unchanged_s=began_s - self._seen_s):
            self._say(logging.INFO, f"waits for the Lease, which {holder(found)} holds")
            return
        wanted = taken(found, self._terms, _now())
        self._see(self._cluster.create_lease(wanted) if found is None else self._cluster.replace_lease(wanted))
        self._writing_ends_s = began_s + self._terms.writing_s
        self._said = ""

    def release(self) -> None:
        """For the next one, when nothing is written any more. Harmless where it is not held."""
        # A renewal on its way changes the version.
        self._thread.shutdown()
        if not self.is_held:
            return
        self._writing_ends_s = -math.inf
        assert self._lease is not None
        try:
            self._cluster.replace_lease(released(self._lease))
        except ApiError as error:
            log.warning("the Lease is not released, the next operator waits: %s", error)

    def _see(self, lease: Json | None) -> None:
        """Note when it last changed, by the clock at the end of the call that told it."""
        if _version(lease) != _version(self._lease):
            self._seen_s = self._clock()
        self._lease = lease

    def _say(self, level: int, message: str) -> None:
        """Once, not with every try."""
        if message != self._said:
            log.log(level, message)
        self._said = message


def _version(lease: Json | None) -> str | None:
    return None if lease is None else lease["metadata"]["resourceVersion"]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
