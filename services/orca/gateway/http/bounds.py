"""What a connection may take of a gateway before a route sees anything of it (a body's bytes and time: receive.py)."""

import collections
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.settings import Settings

IDLE_LEAST_SECONDS = 5.0
"""A connection that is kept has this time for its next request, however many others come."""

ASKED_MAX = 16
"""Idle connections that are asked to give way to one new one: each refusal costs the same, however many there are."""


class Kept(Protocol):
    """A connection between two requests."""

    @property
    def address(self) -> str | None:
        """Under which it is counted."""

    def give_way(self) -> bool:
        """Close and `leave`, unless something is on its way. Returns: whether it did."""


@dataclass(slots=True)
class Door:
    """What all connections of a process share: their bounds, and how many there are."""

    settings: Settings
    refused: Callable[[int], None] = lambda _: None  # told the status of each answer that no route has given
    total: int = 0
    turned_away: int = 0  # refused and still there
    by_address: collections.Counter[str] = field(default_factory=collections.Counter)
    idle: dict[Kept, float] = field(default_factory=dict)  # by when they became so, on the monotonic clock

    def enter(self, address: str) -> ApiError | None:
        """Count a connection that is to `leave`; or the answer for one beyond the bounds, which is not counted."""
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

    def is_idle_for_long(self, kept: Kept) -> bool:
        """Whether its place may be another's."""
        return self.idle.get(kept, math.inf) <= time.monotonic() - IDLE_LEAST_SECONDS

    def _make_room(self, address: str | None = None) -> bool:
        """The connection that is idle for longest, of this address if one is named, gives way: proxies keep more than
        they use. Returns: whether one did.
        """
        old = itertools.takewhile(self.is_idle_for_long, self.idle)
        of_address = (kept for kept in old if address in (None, kept.address))
        return any(kept.give_way() for kept in itertools.islice(of_address, ASKED_MAX))

    def leave(self, address: str) -> None:
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class HeadSize:
    """How much came that is no body, against the bounds: the line and the headers of a request, and what has no end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._count = self._bytes = 0  # of the headers
        # Taken by the parser without telling of anything: a header, a trailer or a chunk's line that has no end.
        self._untold_bytes = 0
        self._has_told = False

    def begin(self) -> None:
        """A request begins."""
        self._count = self._bytes = 0

    def check_url(self, url: bytes) -> None:
        """Raises: ApiError."""
        most = self._settings.url_bytes_max
        if len(url) > most:
            raise ApiError(414, f"the URL is longer than {most} bytes", code="url_too_long")

    def add(self, name: bytes, value: bytes) -> None:
        """A header came whole. Raises: ApiError."""
        self._count += 1
        self._bytes += len(name) + len(value)
        if self._count > self._settings.header_count_max:
            message = f"the request has more than {self._settings.header_count_max} headers"
            raise ApiError(431, message, code="headers_too_large")
        if self._bytes > self._settings.header_bytes_max:
            raise self._too_large()

    def told(self) -> None:
        """The parser told of something."""
        self._has_told = True

    def fed(self, size: int) -> ApiError | None:
        """The parser took so many bytes. Returns: the answer to one who never comes to an end."""
        self._untold_bytes = 0 if self._has_told else self._untold_bytes + size
        self._has_told = False
        return self._too_large() if self._untold_bytes > self._settings.header_bytes_max else None

    def _too_large(self) -> ApiError:
        most = self._settings.header_bytes_max
        return ApiError(431, f"the headers are larger than {most} bytes", code="headers_too_large")
