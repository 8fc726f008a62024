"""Bounds on what a connection may take of a gateway before a route sees anything of it.

A body's bytes and time are bounded in receive.py.
"""

import asyncio
import collections
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.settings import GatewaySettings

IDLE_LEAST_SECONDS = 5.0
"""A connection that is kept has this time for its next request, however many others come."""

ASKED_MAX = 16
"""Idle connections that are asked to give way to one new one: each refusal costs the same, however many there are."""


class IdleConnection(Protocol):
    """A connection between two requests."""

    @property
    def address(self) -> str | None:
        """The client address under which the connection is counted."""

    def give_way(self) -> bool:
        """Close and `leave`, unless something is on its way. Returns: whether it did."""


@dataclass(slots=True)
class OpenConnections:
    """All connections of one listening port: their bounds, and how many there are."""

    settings: GatewaySettings
    on_refusal: Callable[[int], None] = lambda _: None  # called with the status of each answer that no route has given
    total: int = 0
    lingering: int = 0  # refused and still there
    by_address: collections.Counter[str] = field(default_factory=collections.Counter)
    idle: dict[IdleConnection, float] = field(default_factory=dict)  # since when, on the monotonic clock

    def enter(self, address: str) -> ApiError | None:
        """Count a connection that is to `leave`; or return the answer for one too many, which is not counted."""
        most, most_of_address = self.settings.connections_max, self.settings.connections_per_address_max
        is_address_full = most_of_address is not None and self.by_address[address] >= most_of_address
        if is_address_full and not self._make_room(address):
            message = f"more than {most_of_address} connections from one address"
            return ApiError(429, message, kind="overloaded_error", code="too_many_connections", retry_after_s=1)
        if self.total >= most and not self._make_room():
            message = f"more than {most} connections"
            return ApiError(503, message, kind=UNAVAILABLE, code="too_many_connections", retry_after_s=1)
        self.total += 1
        self.by_address[address] += 1
        return None

    def is_idle_for_long(self, connection: IdleConnection) -> bool:
        """Return whether another connection may take the place of this one."""
        return self.idle.get(connection, math.inf) <= time.monotonic() - IDLE_LEAST_SECONDS

    def _make_room(self, address: str | None = None) -> bool:
        """Close the connection that is idle for longest, of this address if one is given.

        Proxies keep more connections than they use. Returns: whether one was closed.
        """
        old = itertools.takewhile(self.is_idle_for_long, self.idle)
        of_address = (connection for connection in old if address in (None, connection.address))
        return any(connection.give_way() for connection in itertools.islice(of_address, ASKED_MAX))

    def leave(self, address: str) -> None:
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class HeadSize:
    """Counts what came besides bodies against the bounds: a request's line and headers, and what has no end."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._count = self._bytes = 0  # of the headers
        # Bytes that the parser took without a callback: a header, a trailer or a chunk's line that has no end.
        self._silent_bytes = 0
        self._has_called_back = False

    def begin(self) -> None:
        """Start counting a new request."""
        self._count = self._bytes = 0

    def check_url(self, url: bytes) -> None:
        """Raises: ApiError."""
        most = self._settings.url_bytes_max
        if len(url) > most:
            raise ApiError(414, f"the URL is longer than {most} bytes", code="url_too_long")

    def add(self, name: bytes, value: bytes) -> None:
        """Count a whole header. Raises: ApiError."""
        self._count += 1
        self._bytes += len(name) + len(value)
        if self._count > self._settings.header_count_max:
            message = f"the request has more than {self._settings.header_count_max} headers"
            raise ApiError(431, message, code="headers_too_large")
        if self._bytes > self._settings.header_bytes_max:
            raise self._too_large()

    def note_callback(self) -> None:
        """Remember that the parser has called back."""
        self._has_called_back = True

    def add_parsed(self, size: int) -> ApiError | None:
        """Count bytes that the parser took. Returns: the answer to a client that never comes to an end."""
        self._silent_bytes = 0 if self._has_called_back else self._silent_bytes + size
        self._has_called_back = False
        return self._too_large() if self._silent_bytes > self._settings.header_bytes_max else None

    def _too_large(self) -> ApiError:
        most = self._settings.header_bytes_max
        return ApiError(431, f"the headers are larger than {most} bytes", code="headers_too_large")


class HeaderTimer:
    """Bounds the time in which a request's line and headers arrive."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, on_timeout: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_timeout = on_timeout
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, unless the timer runs already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._end)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self) -> None:
        self._handle = None
        self._on_timeout()
