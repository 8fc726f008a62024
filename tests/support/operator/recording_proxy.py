"""Stands between an operator and the API server: keeps what was asked, and strikes at one of the operator's writes.

Plain HTTP on loopback towards the operator, TLS towards the API server. Every connection has a thread of its own and
one connection behind it, so calls of one client stay in order and a watch lasts as long as its client.
"""

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from urllib.parse import urlsplit

from orca.operator.cluster.api_server import KINDS
from support.operator.api_server import ApiServer

_PATH = re.compile(r"/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/[^/]+(?=/))?/(?P<what>[^?]+)")
_REVISION = re.compile(r"-([0-9a-f]{8})(?=-\d)")
_LAST_OF_A_LOOK = list(KINDS.values())[-1].plural
"""The kind that the operator lists last in a reconcile."""
_NOT_RELAYED = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


class Moment(Enum):
    """The moment of a write at which an action happens."""

    BEFORE = "before"  # the API server hears of the write
    AFTER = "after"  # it was carried out, and before the operator hears of that


At = int | str
"""A write, by its number, counted from 1, or by what it is; then the first such write is meant."""

Strike = Callable[[], bool]
"""An action at a write. Returns: whether the operator survives and gets its answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the operator to the API server."""

    method: str
    path: str

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    def __str__(self) -> str:
        return self.what

    @property
    def what(self) -> str:
        """Method and object: `PATCH statefulsets/shop-pool`."""
        found = _PATH.match(self.path)
        return f"{self.method} {found['what'] if found else self.path}"


@dataclass(slots=True)
class Record:
    """The calls of one operator since the record began."""

    calls: list[Call] = field(default_factory=list)
    looks_at_rest: int = 0  # that were begun since the last write
    struck: Call | None = None  # the write at which it happened

    @property
    def lists_at_rest(self) -> int:
        """Return how often the operator has listed all resources since its last write."""
        later = takewhile(lambda call: not call.is_write, reversed(self.calls))
        return sum(call.path.endswith("/orcadeployments") for call in later)

    @property
    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.is_write]


class RecordingProxy:
    """A context; `url` is where the operator finds its API server."""

    def __init__(self, server: ApiServer) -> None:
        self._address = urlsplit(server.url)
        self._trust = ssl.create_default_context(cafile=str(server.certificate))
        self._lock = threading.Lock()
        self._upstreams: set[HTTPSConnection] = set()
        self._strike: tuple[At, Moment, Strike] | None = None
        self._revisions: dict[str, int] = {}
        self.record = Record()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "RecordingProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._server.shutdown()
        self._server.server_close()

    def begin(self, strike: tuple[At, Moment, Strike] | None = None) -> None:
        """Record from here on. Args: strike: at which write from now on, and what happens."""
        with self._lock:
            self.record = Record()
            self._strike = strike

    def hang_up(self) -> None:
        """End all connections of an operator that is gone: its watches would last for minutes."""
        with self._lock:
            for each in self._upstreams:
                with contextlib.suppress(OSError):
                    # Its thread may be reading from it: this wakes it up, and it closes what is its own.
                    each.sock.shutdown(socket.SHUT_RDWR)

    def connect(self) -> HTTPSConnection:
        upstream = HTTPSConnection(str(self._address.hostname), self._address.port, context=self._trust)
        upstream.connect()
        with self._lock:
            self._upstreams.add(upstream)
        return upstream

    def disconnect(self, upstream: HTTPSConnection) -> None:
        with self._lock:
            self._upstreams.discard(upstream)
            upstream.close()

    def note(self, call: Call) -> tuple[Moment, Strike] | None:
        """Returns: what happens at this call; None for nothing."""
        with self._lock:
            call = self._ranked(call)
            self.record.calls.append(call)
            if not call.is_write:
                self.record.looks_at_rest += _LAST_OF_A_LOOK in call.path
                return None
            self.record.looks_at_rest = 0
            if self._strike is None or self.record.struck is not None:
                return None
            at, moment, strike = self._strike
            if at not in (len(self.record.writes), call.what):
                return None
            self.record.struck = call
            return moment, strike

    def _ranked(self, call: Call) -> Call:
        """Return the call with revisions as numbers in order of appearance; they are hashes over the namespace too."""

        def rank(found: re.Match[str]) -> str:
            return f"-revision{self._revisions.setdefault(found[1], len(self._revisions))}"

        return replace(call, path=_REVISION.sub(rank, call.path))


class _Server(ThreadingHTTPServer):
    # Closing it waits for the threads of all connections.
    daemon_threads = False
    proxy: RecordingProxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body does not wait 40 ms for the acknowledgement of its head
    server: _Server
    _upstream: HTTPSConnection | None = None

    def handle(self) -> None:
        # When one of the two sides is gone, so is this connection.
        with contextlib.suppress(OSError, HTTPException):
            super().handle()

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        moment, strike = self.server.proxy.note(Call(self.command, self.path)) or (None, None)
        if moment is Moment.BEFORE and strike is not None and not strike():
            self.close_connection = True
            return
        response = self._forward(body)
        if "watch=true" in self.path:
            self._stream(response)
            return
        content = response.read()
        if moment is Moment.AFTER and strike is not None and not strike():
            self.close_connection = True
            return
        self._answer(response, content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _forward(self, body: bytes) -> HTTPResponse:
        if self._upstream is None:
            self._upstream = self.server.proxy.connect()
        headers = {key: value for key, value in self.headers.items() if key.lower() not in _NOT_RELAYED}
        self._upstream.request(self.command, self.path, body, headers)
        return self._upstream.getresponse()

    def _answer(self, response: HTTPResponse, content: bytes) -> None:
        self._begin_answer(response)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, response: HTTPResponse) -> None:
        """Each piece as it comes."""
        self._begin_answer(response)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := response.read1():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _begin_answer(self, response: HTTPResponse) -> None:
        self.send_response_only(response.status, response.reason)
        for key, value in response.getheaders():
            if key.lower() not in _NOT_RELAYED:
                self.send_header(key, value)

    def finish(self) -> None:
        super().finish()
        if self._upstream is not None:
            self.server.proxy.disconnect(self._upstream)

    def log_message(self, *_: object) -> None:
        """Nothing: the record tells more."""
