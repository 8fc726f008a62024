"""One client's connection: uvicorn's protocol with the bounds, the words and the endings that it lacks.

Bounded are the connections themselves, the bytes and number of headers, the time in which a request's line and headers
arrive (a body's bytes and time: receive.py), and how long a closed one waits for its client to read the rest (an open
one: server.py). Whatever is refused here is answered in OpenAI's shape, as every error of a route is. A client that
only shuts its way out is answered, an HTTP/1.0 client never sees chunks.

One request at a time: reading goes on while an answer is written, since only that shows that the client has left, so a
second request that comes meanwhile is thrown away and the connection ends behind the answer. HTTP leaves both to the
server; clients that pipeline send again what got no answer.
"""

import asyncio
import enum
import fcntl
import functools
import socket
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from orca.gateway.errors import ApiError
from orca.gateway.http.bounds import Door, HeadSize

LINGER_SECONDS = 1.0
"""A client that still sends when it is refused reads the answer in this time, instead of a reset connection."""

TURNED_AWAY_MAX = 64
"""Connections beyond the bounds that linger at a time; open_files.py leaves room for them. The others close at once."""

TAKEN_LEAST_BYTES = 16 << 10
"""So many, or the rest, the client of a closed connection has to take in each `unread_seconds_max`."""

HALF_CLOSED_SECONDS = 0.25
"""Between two looks at whether a client that shut its way out has left altogether."""

SEND_BODY = "orca.send_body"
"""ASGI extension: `send` takes the parts of an answer's body, once its start has gone through all middleware, which has
to do with nothing else: an event of a stream would pass six layers of it."""


class _SecondRequest(Exception):
    """A request began before the one in front of it was answered."""


class _Phase(enum.Enum):
    """Of a connection. It only goes down this list."""

    OPEN = enum.auto()  # requests are taken, one after the other
    LAST = enum.auto()  # the request at hand is the last: what comes behind it is thrown away
    ENDING = enum.auto()  # the last answer was written


class Connection(HttpToolsProtocol):
    """A subclass names its `door` (see `connections`)."""

    door: Door
    address: str | None = None  # under which it is counted, if it is
    _was_let_in = False
    _header_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _is_in_head = False  # between a request's first byte and the end of its headers
    _phase = _Phase.OPEN

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._size = HeadSize(self.door.settings)
        address = self.client[0] if self.client else ""
        refusal = self.door.enter(address)
        if refusal is None:
            self.address, self._was_let_in = address, True
            self._start_header_timer()
        else:
            self.door.turned_away += 1
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._unset_keepalive_if_required()
        self._leave()
        if not self._was_let_in:
            self.door.turned_away -= 1
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self.address is not None:
            self.door.leave(self.address)
            self.address = None

    def data_received(self, data: bytes) -> None:
        if not self.is_listening:
            return
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete:
            # Time runs for whatever comes between two answers: an empty line, the rest of a body that nobody wanted.
            self._start_header_timer()
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade:
            # Nothing but HTTP/1.1 is spoken here. The request itself was read and is answered; the parser is stuck.
            self._end_behind_request()
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _SecondRequest):
                self._end_behind_request()
            else:
                self._refuse(_answer_to_parser(error))
            return
        if (refusal := self._size.fed(len(data))) is not None:
            self._refuse(refusal)

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Where an Upgrade header made it stop in front of a body, another one reads on: clients that
        offer HTTP/2 that way, as Java's does, send the body at once, and whoever does not know the offer ignores it.
        """
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as upgrade:
            framing, read = _body_framing(self.headers), upgrade.args[0]
            if not framing:
                raise
        # Outside of the handler: errors are told apart by what they were raised from.
        listener = _BehindHead(self)
        self.parser = httptools.HttpRequestParser(listener)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
        listener.is_behind = True
        self.parser.feed_data(data[read:])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the way to the client stays open: it does for the answer to a request that came whole."""
        cycle = self.cycle
        if self._phase is _Phase.ENDING or cycle is None or cycle.response_complete or cycle.more_body:
            self._close()
            return False
        cycle.keep_alive = False
        self._probe(cycle)
        self._watch_half_closed(cycle)
        return True

    @property
    def is_listening(self) -> bool:
        """Whether what comes in is looked at; else it is thrown away."""
        return self._phase is _Phase.OPEN

    # What the parser tells of.

    def on_message_begin(self) -> None:
        self._size.told()
        if self.cycle is not None and not self.cycle.response_complete:
            raise _SecondRequest
        # It may have begun to run in these very bytes, at the end of a body that came behind its answer.
        self._unset_keepalive_if_required()
        self._is_in_head = True
        self._size.begin()
        self._start_header_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._size.told()
        super().on_url(url)
        self._size.check_url(self.url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size.told()
        self._size.add(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()
        self._is_in_head = False
        cycle = self.cycle
        cycle.transport = _Outlet(self, cycle)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            cycle.send = functools.partial(_send_without_chunks, cycle, cycle.send)  # type: ignore[method-assign]
        self.scope["extensions"] = {**self.scope.get("extensions", {}), SEND_BODY: {"send": cycle.send}}

    def on_body(self, body: bytes) -> None:
        self._size.told()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and _body_framing(self.headers):
            return
        self._size.told()
        self._stop_header_timer()
        super().on_message_complete()
        if self.cycle.response_complete and self._phase is not _Phase.ENDING:
            # The answer came before the body's end: the time of an idle connection, which it began, begins anew.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self.door.idle[self] = time.monotonic()

    def on_response_complete(self) -> None:
        if self._phase is _Phase.ENDING:
            return
        super().on_response_complete()
        if self.cycle.more_body:
            self._start_header_timer()
        elif self.timeout_keep_alive_task is not None:
            self.door.idle[self] = time.monotonic()

    def _unset_keepalive_if_required(self) -> None:
        self.door.idle.pop(self, None)
        super()._unset_keepalive_if_required()

    # Endings.

    def give_way(self) -> bool:
        """As Kept. What was written is with the client's system, and no byte of another request with ours."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size() or self._has_unread():
            return False
        self._unset_keepalive_if_required()
        self._leave()
        self._close()
        return True

    def end_if_idle(self) -> None:
        """While a gateway drains: the client comes back on a new connection, by which it reaches another one."""
        if self.door.is_idle_for_long(self):
            self.give_way()

    def _has_unread(self) -> bool:
        """Whether bytes came that the loop has not turned to yet."""
        number = self.transport.get_extra_info("socket").fileno()
        return any(fcntl.ioctl(number, termios.FIONREAD, bytes(4)))

    def end_behind_answer(self, *, is_read: bool) -> None:
        """Close; not before the client had time to read the answer if it still sends.

        Args: is_read: whether the whole request was.
        """
        self._phase = _Phase.ENDING
        self._stop_header_timer()
        is_one_too_many = not self._was_let_in and self.door.turned_away > TURNED_AWAY_MAX
        if is_read or is_one_too_many or self.transport.is_closing() or not self.transport.can_write_eof():
            self._close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self._close)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close when the client has taken what was written. One that takes no more is cut off, for it never would."""
        self.transport.close()
        if self._unread_timer is None:
            self._cut_unless_read()

    def _cut_unless_read(self, before: int | None = None) -> None:
        """Args: before: bytes that waited for the client when this was last looked at."""
        unread = self.transport.get_write_buffer_size()
        if before is not None and unread > before - TAKEN_LEAST_BYTES:
            self.transport.abort()
        elif unread:
            seconds = self.door.settings.unread_seconds_max
            self._unread_timer = self.loop.call_later(seconds, self._cut_unless_read, unread)

    def _end_behind_request(self) -> None:
        """Take nothing that comes behind the request that was read."""
        self._phase = _Phase.LAST
        if self.cycle.response_complete:
            self._close()
        else:
            self.cycle.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Answer what no route can, and end the connection. An answer that is on its way is given up with it."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            is_answerable = not cycle.response_started
            # The route sees its client gone.
            cycle.disconnected = True
            cycle.message_event.set()
            if not is_answerable:
                self.transport.abort()
                return
        body = error.body()
        own = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        own["connection"] = "close"
        headers = [*self.server_state.default_headers, *((name.encode(), text.encode()) for name, text in own.items())]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.door.refused(error.status)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.end_behind_answer(is_read=False)

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.door.settings.header_seconds_max, self._give_up)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        """The line and the headers of a request did not arrive in time."""
        self._header_timer = None
        if self._is_in_head:
            message = f"the headers did not arrive within {self.door.settings.header_seconds_max:g} seconds"
            self._refuse(ApiError(408, message, kind="timeout_error", code="header_timeout"))
        else:
            self._close()

    def _probe(self, cycle: RequestResponseCycle) -> None:
        """Send what means nothing to a client, so that the system of one that has left answers with a reset.

        An end of input says only that the client will send no more. Before an answer begins that is an interim
        response; between two chunks it is a zero in front of the next chunk's size. An HTTP/1.0 client knows neither:
        the next bytes of its answer tell.
        """
        if cycle.scope["http_version"] == "1.0":
            return
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding:
            self.transport.write(b"0")

    def _watch_half_closed(self, cycle: RequestResponseCycle) -> None:
        """Nobody reads from the connection any more, so that a reset has to be looked for."""
        if self.transport.is_closing() or cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self.loop.call_later(HALF_CLOSED_SECONDS, self._watch_half_closed, cycle)


class _BehindHead:
    """Listens to a parser for a connection that knows the head already: the parser is fed one for the body's length."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_behind = False

    def __getattr__(self, callback: str) -> Callable[..., None]:
        tell = getattr(self._connection, callback)
        return lambda *told: tell(*told) if self.is_behind else None


def connections(door: Door) -> type[Connection]:
    """The protocol of the connections that pass this door."""
    return type("Connection", (Connection,), {"door": door})


class _Outlet:
    """The transport as one answer sees it: closing it lingers."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.end_behind_answer(is_read=not (self._cycle.more_body or not self._connection.is_listening))


async def _send_without_chunks(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    """To HTTP/1.0 an answer of unknown length ends with its connection, instead of in chunks."""
    if message["type"] == "http.response.start":
        names = {name.lower() for name, _ in message.get("headers", [])}
        if b"content-length" not in names:
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length and cycle.scope["method"] != "HEAD":
        # uvicorn counts down to the length that was announced.
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _answer_to_parser(error: httptools.HttpParserError) -> ApiError:
    """What a callback of ours raised, or the parser's own reason in a sentence."""
    cause = error.__context__
    if isinstance(cause, ApiError):
        return cause
    reason = "its URL cannot be read" if cause is not None else str(error).rstrip(".")
    return ApiError(400, f"the request is not valid HTTP/1.1: {reason}", code="invalid_http")


def _body_framing(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The header that says how long a request's body is; empty where it has none. `headers` have lower-case names."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
            return name + b": " + value
    return b""
