"""Leadership: of several operators, only the one that holds a Lease acts.

One replica and `Recreate` keep two operators apart only while the cluster hears from the node of the first. A node that
comes back, or an operator that somebody starts by hand, makes two. A Lease is written in the version that was read, so
if two operators take it at the same time, one is refused.

A holder that cannot renew the Lease in time ends its process. It may have slept or been cut off, so everything that it
has read and planned is void. A new process certainly knows nothing of that, and waits for the Lease like any other. One
API call may still be on its way then. It was decided in time, and the next operator observes what it changed.

Two may still write at the same time in three cases. A hypervisor pauses a machine without its knowledge, so that all of
its clocks stand still. A machine is suspended in the middle of a call. The API server applies a write that its client
has given up.

The client library's `kubernetes.leaderelection` does not fit: it cannot be stopped, does not release, judges by the
wall clock, bounds no call, and ends when it loses a connection.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Leases
from orca.operator.domain.resource import Json
from orca.operator.plan.lease import LeaseTerms, holder, may_take, released, taken

log = logging.getLogger(__name__)


def elapsed_s() -> float:
    """Return seconds since a fixed moment, including those in which the machine was suspended.

    On Linux the monotonic clock leaves those out. On a system without CLOCK_BOOTTIME they are not counted.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Leadership:
    """Wait for the Lease, keep it, release it."""

    def __init__(self, leases: Leases, terms: LeaseTerms, clock: Callable[[], float] = elapsed_s) -> None:
        """Args: clock: seconds, which also pass while the process or the machine is stopped."""
        self._leases = leases
        self._terms = terms
        self._clock = clock
        # Not one of the loop's own threads: those may all wait for calls of reconciles.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lease")
        self._lease: Json | None = None
        self._seen_s = self._heard_s = clock()
        self._writing_ends_s: float | None = None  # None until it is held for the first time
        self._last_message = ""
        self.taken = asyncio.Event()

    @property
    def is_held(self) -> bool:
        return self._writing_ends_s is not None and self._clock() < self._writing_ends_s

    @property
    def is_lost(self) -> bool:
        """True if it was held and is not held any more. That never changes again."""
        return self._writing_ends_s is not None and not self.is_held

    def write_s(self) -> float:
        """Return the seconds that a write which begins now may take; 0 if none may begin."""
        ends_s, now_s = self._writing_ends_s, self._clock()
        if ends_s is None or now_s >= ends_s:
            return 0.0
        return ends_s - now_s + self._terms.duration_s - self._terms.writing_s

    def heard_age_s(self) -> float:
        """Return the seconds since the API server last showed the Lease."""
        return self._clock() - self._heard_s

    async def hold(self) -> None:
        """Wait for the Lease, set `taken`, and keep it. Returns when it is lost."""
        log.info("lease", extra={"lease": self._terms.name, "identity": self._terms.identity})
        loop = asyncio.get_running_loop()
        while not self.is_lost:
            try:
                await loop.run_in_executor(self._thread, self.renew)
            except ApiServerError as error:
                self._log_once(logging.WARNING, f"the Lease cannot be read or written: {error}")
            if self.is_held:
                self.taken.set()
            await asyncio.sleep(self._terms.retry_s)

    def renew(self) -> None:
        """Try once to take or renew the Lease. Raises: ApiServerError."""
        found = self._leases.read(self._terms.namespace, self._terms.name)
        self._heard_s = self._clock()
        self._note(found)
        if self._writing_ends_s is not None and holder(found) not in (None, self._terms.identity):
            self._writing_ends_s = -math.inf
        began_s = self._clock()
        # Reconciles that began before it was lost may still go on. They must not write because it is free again.
        if self.is_lost:
            return
        if not may_take(found, self._terms, unchanged_s=began_s - self._seen_s):
            self._log_once(logging.INFO, f"waits for the Lease, which {holder(found)} holds")
            return
        wanted = taken(found, self._terms, _now())
        self._note(self._leases.create(wanted) if found is None else self._leases.replace(wanted))
        self._writing_ends_s = began_s + self._terms.writing_s
        self._last_message = ""

    def release(self) -> None:
        """Release the Lease for the next operator, after the last write. Does nothing if it is not held."""
        # Wait for a renewal on its way: it changes the version.
        self._thread.shutdown()
        if not self.is_held:
            return
        self._writing_ends_s = -math.inf
        assert self._lease is not None
        try:
            self._leases.replace(released(self._lease))
        except ApiServerError as error:
            log.warning("the Lease cannot be released, so the next operator has to wait: %s", error)

    def _note(self, lease: Json | None) -> None:
        """Note a Lease, and when it last changed, by the clock at the end of the call that returned it."""
        if _version(lease) != _version(self._lease):
            self._seen_s = self._clock()
        self._lease = lease

    def _log_once(self, level: int, message: str) -> None:
        """Log a message, unless it was the last one."""
        if message != self._last_message:
            log.log(level, message)
        self._last_message = message


def _version(lease: Json | None) -> str | None:
    return None if lease is None else lease["metadata"]["resourceVersion"]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
