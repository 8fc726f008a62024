"""One client's connection: uvicorn's HTTP protocol, plus size and time limits, OpenAI-shaped errors and clean shutdown.

This file limits the number of connections, the bytes and number of headers, and the time in which a request's line and
headers arrive. It also limits how long a closed connection waits for its client to read the rest. The limits of a body
are in receive.py, that of an open connection in server.py. A refusal here has OpenAI's shape, as every error of a route
does. A client that only shuts its sending side is answered. An HTTP/1.0 client never sees chunks.

One request at a time: reading goes on while an answer is written, since only that shows that the client has left. So a
second request that comes meanwhile is thrown away, and the connection ends after the answer. HTTP leaves both to the
server; clients that pipeline send again what got no answer.
"""

import asyncio
import enum
import fcntl
import functools
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from orca.gateway.errors import ApiError
from orca.gateway.http.bounds import HeaderTimer, HeadSize, OpenConnections
from orca.gateway.http.closing import Closing

LINGERING_MAX = 64
"""Refused connections that linger at a time (server.OTHER_FILES leaves room for them). The others close at once."""

SEND_BODY = "orca.send_body"
"""ASGI extension: `send` takes the parts of an answer's body, once its start has gone through all middleware.

Middleware has to do with nothing else: an event of a stream would pass six layers of it."""


class _PipelinedRequest(Exception):
    """A request began before the one in front of it was answered."""


class _Phase(enum.Enum):
    """The phase of a connection. It only goes down this list."""

    OPEN = enum.auto()  # requests are taken, one after the other
    LAST = enum.auto()  # the request at hand is the last: what comes after it is thrown away
    ENDING = enum.auto()  # the last answer was written


class Connection(HttpToolsProtocol):
    """One connection of a client. A subclass names its `open_connections` (see `connection_class`).

    The class is large but one idea: the callbacks of one connection. uvicorn, its parser and asyncio name most of them.
    The rules that the callbacks apply are in bounds.py and closing.py.
    """

    open_connections: OpenConnections
    address: str | None = None  # the address under which it is counted, if it is counted
    _was_let_in = False
    _is_in_head = False  # between a request's first byte and the end of its headers
    _phase = _Phase.OPEN

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        settings = self.open_connections.settings
        self._size = HeadSize(settings)
        self._header_timer = HeaderTimer(self.loop, settings.header_seconds_max, self._end_without_headers)
        self._closing = Closing(transport, self.loop, unread_seconds_max=settings.unread_seconds_max)
        address = self.client[0] if self.client else ""
        refusal = self.open_connections.enter(address)
        if refusal is None:
            self.address, self._was_let_in = address, True
            self._header_timer.start()
        else:
            self.open_connections.lingering += 1
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.stop()
        self._closing.stop()
        self._unset_keepalive_if_required()
        self._leave()
        if not self._was_let_in:
            self.open_connections.lingering -= 1
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self.address is not None:
            self.open_connections.leave(self.address)
            self.address = None

    def data_received(self, data: bytes) -> None:
        if not self.is_listening:
            return
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete:
            # Time runs for whatever comes between two answers: an empty line, the rest of a body that nobody wanted.
            self._header_timer.start()
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade:
            # Only HTTP/1.1 is spoken here. The request itself was read and is answered; the parser is stuck.
            self._end_after_request()
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _PipelinedRequest):
                self._end_after_request()
            else:
                self._refuse(_answer_to_parser(error))
            return
        if (refusal := self._size.add_parsed(len(data))) is not None:
            self._refuse(refusal)

    def _parse(self, data: bytes) -> None:
        """Feed the parser. If an Upgrade header made it stop in front of a body, let another parser read on.

        Clients that offer HTTP/2 by that header, as Java's does, send the body at once, and a server that does not know
        the offer ignores it.
        """
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as upgrade:
            framing, read = _body_framing(self.headers), upgrade.args[0]
            if not framing:
                raise
        # Outside of the handler: errors are told apart by what they were raised from.
        listener = _AfterHead(self)
        self.parser = httptools.HttpRequestParser(listener)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
        listener.is_after_head = True
        self.parser.feed_data(data[read:])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the way to the client stays open: it does for the answer to a request that came whole."""
        cycle = self.cycle
        if self._phase is _Phase.ENDING or cycle is None or cycle.response_complete or cycle.more_body:
            self._closing.close()
            return False
        cycle.keep_alive = False
        self._closing.watch_half_closed(cycle)
        return True

    @property
    def is_listening(self) -> bool:
        """True while incoming bytes are parsed; otherwise they are thrown away."""
        return self._phase is _Phase.OPEN

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._size.note_callback()
        if self.cycle is not None and not self.cycle.response_complete:
            raise _PipelinedRequest
        # It may have begun to run in these very bytes, at the end of a body that came after its answer.
        self._unset_keepalive_if_required()
        self._is_in_head = True
        self._size.begin()
        self._header_timer.start()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._size.note_callback()
        super().on_url(url)
        self._size.check_url(self.url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size.note_callback()
        self._size.add(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._header_timer.stop()
        super().on_headers_complete()
        self._is_in_head = False
        cycle = self.cycle
        cycle.transport = _AnswerTransport(self, cycle)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            cycle.send = functools.partial(_send_without_chunks, cycle, cycle.send)  # type: ignore[method-assign]
        self.scope["extensions"] = {**self.scope.get("extensions", {}), SEND_BODY: {"send": cycle.send}}

    def on_body(self, body: bytes) -> None:
        self._size.note_callback()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and _body_framing(self.headers):
            return
        self._size.note_callback()
        self._header_timer.stop()
        super().on_message_complete()
        if self.cycle.response_complete and self._phase is not _Phase.ENDING:
            # The answer came before the body's end: the time of an idle connection, which it began, begins again.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self.open_connections.idle[self] = time.monotonic()

    def on_response_complete(self) -> None:
        if self._phase is _Phase.ENDING:
            return
        super().on_response_complete()
        if self.cycle.more_body:
            self._header_timer.start()
        elif self.timeout_keep_alive_task is not None:
            self.open_connections.idle[self] = time.monotonic()

    def _unset_keepalive_if_required(self) -> None:
        self.open_connections.idle.pop(self, None)
        super()._unset_keepalive_if_required()

    # Endings.

    def give_way(self) -> bool:
        """Close as IdleConnection describes: only if all was sent and no byte of another request has come."""
        transport = self.transport
        if transport.is_closing() or transport.get_write_buffer_size() or _has_unread_bytes(transport):
            return False
        self._unset_keepalive_if_required()
        self._leave()
        self._closing.close()
        return True

    def end_if_idle(self) -> None:
        """Close while the gateway drains: the client comes back on a new connection and reaches another gateway."""
        if self.open_connections.is_idle_for_long(self):
            self.give_way()

    def end_after_answer(self, *, is_read: bool) -> None:
        """Close. If the client still sends, it gets time to read the answer first.

        Args: is_read: the whole request was read.
        """
        self._phase = _Phase.ENDING
        self._header_timer.stop()
        is_one_too_many = not self._was_let_in and self.open_connections.lingering > LINGERING_MAX
        if is_read or is_one_too_many or self.transport.is_closing() or not self.transport.can_write_eof():
            self._closing.close()
            return
        self._closing.linger()
        self.flow.resume_reading()

    def timeout_keep_alive_handler(self) -> None:
        self._closing.close()

    def _end_after_request(self) -> None:
        """Take nothing that comes after the request that was read."""
        self._phase = _Phase.LAST
        if self.cycle.response_complete:
            self._closing.close()
        else:
            self.cycle.keep_alive = False

    def _end_without_headers(self) -> None:
        """End a connection on which a request's line and headers did not arrive in time."""
        if self._is_in_head:
            seconds = self.open_connections.settings.header_seconds_max
            message = f"the headers did not arrive within {seconds:g} seconds"
            self._refuse(ApiError(408, message, kind="timeout_error", code="header_timeout"))
        else:
            self._closing.close()

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
        self.open_connections.on_refusal(error.status)
        self.transport.write(_refusal_bytes(error, self.server_state))
        self.end_after_answer(is_read=False)


class _AfterHead:
    """Parser callbacks for a connection that has the head already: the parser is fed one for the body's length."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_after_head = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        callback = getattr(self._connection, name)
        return lambda *arguments: callback(*arguments) if self.is_after_head else None


def connection_class(open_connections: OpenConnections) -> type[Connection]:
    """Return the protocol of the connections that are counted in `open_connections`."""
    return type("Connection", (Connection,), {"open_connections": open_connections})


class _AnswerTransport:
    """The transport as one answer sees it: closing it lingers."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.end_after_answer(is_read=not (self._cycle.more_body or not self._connection.is_listening))


async def _send_without_chunks(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    """End an answer of unknown length with its connection instead of in chunks, as HTTP/1.0 has it."""
    if message["type"] == "http.response.start":
        names = {name.lower() for name, _ in message.get("headers", [])}
        if b"content-length" not in names:
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length and cycle.scope["method"] != "HEAD":
        # uvicorn counts down to the length that was announced.
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _refusal_bytes(error: ApiError, server_state: ServerState) -> bytes:
    """Return a whole HTTP response."""
    body = error.body()
    own = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    own["connection"] = "close"
    headers = [*server_state.default_headers, *((name.encode(), text.encode()) for name, text in own.items())]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return STATUS_LINE[error.status] + lines + b"\r\n" + body


def _answer_to_parser(error: httptools.HttpParserError) -> ApiError:
    """Return what a callback of ours raised, or the parser's own reason in a sentence."""
    cause = error.__context__
    if isinstance(cause, ApiError):
        return cause
    reason = "its URL cannot be read" if cause is not None else str(error).rstrip(".")
    return ApiError(400, f"the request is not valid HTTP/1.1: {reason}", code="invalid_http")


def _body_framing(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the header that says how long a request's body is; empty without a body. Names are in lower case."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
            return name + b": " + value
    return b""


def _has_unread_bytes(transport: asyncio.Transport) -> bool:
    """Return whether bytes have come that the loop has not read yet."""
    number = transport.get_extra_info("socket").fileno()
    return any(fcntl.ioctl(number, termios.FIONREAD, bytes(4)))
