"""uvicorn with what it lacks: a bound on the arrival of headers, and an end at once on a second signal."""

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orca.gateway.settings import Settings

log = logging.getLogger(__name__)


def make_server(app: FastAPI, settings: Settings) -> "Server":
    """A server that is not yet running; `await server.serve()` runs it until a signal."""

    class Protocol(BoundedProtocol):
        header_seconds_max = settings.header_seconds_max

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Nothing here depends on where a call comes from.
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    return Server(config)


class Server(uvicorn.Server):
    """The first signal stops accepting and lets open streams end; the second ends them.

    Either way the process ends in order, with its own exit status.
    """

    _loop: asyncio.AbstractEventLoop | None = None  # while it serves

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit and self._loop is not None:
            # From Python 3.12 on, closing a server waits for its connections, whatever uvicorn was told.
            self._loop.call_soon_threadsafe(self._drop_connections)

    def _drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            log.info("gateway listens", extra={"host": self.config.host, "port": self.port})

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection on which a request's line and headers do not arrive in time.

    uvicorn waits for ever for them; the time begins with the connection, and again with the first byte of each later
    request on it. Between requests uvicorn's own keep-alive bound holds.
    """

    header_seconds_max: float
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._start_header_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds_max, self._give_up)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        # A response may still be on its way out for an earlier, pipelined request: it is given up with the connection.
        self.transport.close()
