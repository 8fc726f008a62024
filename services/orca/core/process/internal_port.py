"""The internal port of a service: plain HTTP for probes and operators, answered by the service's own event loop.

`GET /health` says only that the loop runs, so that no outage of a neighbour restarts this service. Other pages, such as
a scheduler's `/ready`, show what the service does at the moment. The loop itself has to answer for its health: a thread
would answer for a loop that is blocked, and so would gRPC, whose own threads answer pings. Everyone who can reach the
port may read it, so it belongs on an internal network.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orca.core.process.listening import bind_all

REQUEST_S = 5.0
"""Longest time of one connection, from its first byte to its last."""
HEAD_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class Page:
    """The answer of one path."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200


HEALTH = Page(b'{"status":"ok"}')
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class InternalPort:
    """One port: `port = await InternalPort.open("127.0.0.1:0", {...})`, and `port.close()` at the end."""

    def __init__(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        """Args: pages: path -> function that makes the page for each call; /health is there without it."""
        self._pages = {"/health": lambda: HEALTH, **pages}
        self._servers: list[asyncio.Server] = []
        self.address = ""  # host:port, once open

    @classmethod
    async def open(cls, address: str, pages: Mapping[str, Callable[[], Page]] | None = None) -> "InternalPort":
        """Listen at host:port; port 0 takes a free one, and [::] all addresses of both families.

        Raises: OSError if the address is not available.
        """
        internal_port = cls(pages or {})
        host, _, port = address.rpartition(":")
        sockets = bind_all(host, int(port))
        internal_port.address = f"{host}:{sockets[0].getsockname()[1]}"
        for bound in sockets:
            server = await asyncio.start_server(internal_port._answer, sock=bound, limit=HEAD_BYTES_MAX)
            internal_port._servers.append(server)
        return internal_port

    def close(self) -> None:
        """Stop taking calls."""
        for server in self._servers:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request per connection: probes and scrapes are seconds apart."""
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head.partition(b"\r\n")[0].decode("latin-1")))
                await writer.drain()
        writer.close()

    def _response(self, request_line: str) -> bytes:
        method, _, rest = request_line.partition(" ")
        make_page = self._pages.get(rest.partition(" ")[0].partition("?")[0])
        if make_page is None:
            page = Page(b'{"status":"no such page"}', status=404)
        elif method != "GET":
            page = Page(b'{"status":"only GET"}', status=405)
        else:
            page = make_page()
        head = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + page.body
