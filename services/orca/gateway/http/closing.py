"""Ends a client's connection: the client gets time to read the last answer, and is cut off if it takes nothing.

An open connection whose client takes nothing is cut off by the system (server.py).
"""

import asyncio
import socket

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LINGER_SECONDS = 1.0
"""A client that still sends when it is refused has this time to read the answer, instead of a reset connection."""

TAKEN_LEAST_BYTES = 16 << 10
"""The client of a closed connection has to take this much, or the rest, in each `unread_seconds_max`."""

HALF_CLOSED_SECONDS = 0.25
"""Interval of the checks whether a client that shut its sending side has left altogether."""


class Closing:
    """The end of one connection's transport."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, unread_seconds_max: float
    ) -> None:
        """Args: unread_seconds_max: a closed connection whose client takes nothing for this long is cut off."""
        self._transport = transport
        self._loop = loop
        self._unread_seconds_max = unread_seconds_max
        self._unread_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close when the client has taken what was written. One that takes no more is cut off: it never would."""
        self._transport.close()
        if self._unread_timer is None:
            self._cut_unless_read()

    def linger(self) -> None:
        """End the way to the client now, and close when it had time to read the answer."""
        self._transport.write_eof()
        self._loop.call_later(LINGER_SECONDS, self.close)

    def watch_half_closed(self, cycle: RequestResponseCycle) -> None:
        """Look for the reset of a client that shut its sending side and has left: nobody reads its connection now."""
        _probe(self._transport, cycle)
        self._cut_if_reset(cycle)

    def stop(self) -> None:
        """Stop the timer: the connection is lost."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def _cut_unless_read(self, before: int | None = None) -> None:
        """Args: before: bytes that waited for the client at the last check."""
        unread = self._transport.get_write_buffer_size()
        if before is not None and unread > before - TAKEN_LEAST_BYTES:
            self._transport.abort()
        elif unread:
            self._unread_timer = self._loop.call_later(self._unread_seconds_max, self._cut_unless_read, unread)

    def _cut_if_reset(self, cycle: RequestResponseCycle) -> None:
        if self._transport.is_closing() or cycle.response_complete:
            return
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        self._loop.call_later(HALF_CLOSED_SECONDS, self._cut_if_reset, cycle)


def _probe(transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
    """Send what means nothing to a client, so that the system of one that has left answers with a reset.

    The end of its input says only that the client will send no more. Before an answer begins the probe is an interim
    response; between two chunks it is a zero in front of the next chunk's size. An HTTP/1.0 client knows neither: the
    next bytes of its answer are its probe.
    """
    if cycle.scope["http_version"] == "1.0":
        return
    if not cycle.response_started:
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    elif cycle.chunked_encoding:
        transport.write(b"0")
