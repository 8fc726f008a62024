"""The gateway's uvicorn server: its sockets, its limit of open files, and the order in which a gateway ends."""

import asyncio
import functools
import logging
import math
import resource
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from orca.core.domain.errors import SettingError
from orca.core.process.listening import bind_all
from orca.gateway.app import METRICS_PORT
from orca.gateway.gateway import Gateway
from orca.gateway.http.bounds import OpenConnections
from orca.gateway.http.connection import connection_class
from orca.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

LAST_BYTES_SECONDS = 1.0
"""Longest time for the last events of answers that are cut."""

POLL_SECONDS = 0.02

OTHER_FILES = 128
"""Files besides the clients' connections: pool (its setting, 32), refused ones (64), listening sockets, libraries."""


def take_port(host: str, port: int) -> list[socket.socket]:
    """Bind the port for the server, with one socket for each address of the host. The sockets do not listen yet.

    Raises: SettingError if the port is not available.
    """
    try:
        return bind_all(host, port)
    except socket.gaierror as error:
        raise SettingError(f"setting host: {host!r} is not an address: {error.strerror}") from error
    except OSError as error:
        raise SettingError(f"setting port: {port} of host {host} is not available: {error.strerror}") from error


def allow_open_files(connections_max: int) -> None:
    """Raise the soft limit of open files to the hard limit if `connections_max` needs it. Warn if that is too low.

    The soft limit is 1,024 nearly everywhere, for programs that use select. Nothing here does.
    """
    needed = connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _holds(soft, needed):
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.info("limit of open files raised for connections_max", extra={"before": soft, "after": hard})
    if not _holds(hard, needed):
        log.warning(
            "the process may open %d files, but connections_max %d needs %d: raise the limit or lower the setting",
            hard,
            connections_max,
            needed,
        )


def _holds(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def make_server(app: FastAPI, settings: GatewaySettings) -> "GatewayServer":
    """Return a server that is not yet running; `await server.serve()` runs it until a signal."""
    gateway: Gateway = app.state.gateway
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connection_class(OpenConnections(settings, gateway.metrics.count_refused_connection)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=settings.idle_seconds_max,  # type: ignore[arg-type]  # fractions of a second work too
        # Nothing here depends on the origin of a call.
        proxy_headers=False,
        server_header=False,
    )
    return GatewayServer(config, gateway)


class GatewayServer(uvicorn.Server):
    """uvicorn's server with a drain: the first signal lets open answers end (see drain.py), the second cuts them.

    Either way the lifespan ends too, and the process ends with its own exit status: pool and traces are the same after
    both.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._settings = gateway.settings
        self._drain = gateway.drain
        self._metrics = gateway.metrics
        self._metrics_servers: list[asyncio.Server] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises: SettingError if the port for metrics is not available; then the lifespan has ended."""
        await super().startup(sockets)
        if self.started and self._settings.metrics_port is not None:
            try:
                await self._listen_for_metrics(self._settings.metrics_port)
            except OSError as error:
                await self.shutdown()
                raise SettingError(f"setting metrics_port: {error}") from error
        if self.started:
            for listener in (listener for server in self.servers for listener in server.sockets):
                _end_silent_connections(listener, self._settings.unread_seconds_max)
            log.info("gateway listens", extra={"host": self.config.host, "port": self.port})

    @property
    def port(self) -> int:
        """The port of the API, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @property
    def metrics_port(self) -> int:
        """The separate port for metrics, if there is one."""
        return int(self._metrics_servers[0].sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down; uvicorn calls this ten times a second."""
        if not await super().on_tick(counter):
            return False
        self._drain.begin(self._settings.drain_seconds)
        for connection in list(self.server_state.connections):
            connection.end_if_idle()  # type: ignore[union-attr]  # all are of connection.py
        return self.force_exit or self._drain.is_cut or not self.server_state.tasks

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Stop listening, let last bytes be sent, drop the remaining connections, then end the lifespan.

        After a second signal uvicorn's own method skips the lifespan, and from Python 3.12 on waits for connections.
        """
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._until_nothing_is_open(LAST_BYTES_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_BYTES_SECONDS)
        await self.lifespan.shutdown()

    async def _until_nothing_is_open(self, seconds: float) -> None:
        """Wait until no connection is open, at most this long and only until a second signal."""
        for _ in range(round(seconds / POLL_SECONDS)):
            if not self.server_state.connections or self.force_exit:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _listen_for_metrics(self, port: int) -> None:
        """Listen on a second port for the same application. The state of a call has the port by which it came.

        The port counts its own connections: a probe of /health is answered however many clients fill the other port.
        """
        factory = functools.partial(
            connection_class(OpenConnections(self._settings, self._metrics.count_refused_connection)),
            config=self.config,
            server_state=self.server_state,
            app_state={**self.lifespan.state, METRICS_PORT: True},
        )
        loop = asyncio.get_running_loop()
        for bound in bind_all(self.config.host, port):
            server = await loop.create_server(factory, sock=bound)
            self._metrics_servers.append(server)
            self.servers.append(server)


def _end_silent_connections(listener: socket.socket, seconds: float) -> None:
    """End connections whose client takes nothing for this long, and probe clients that are quiet for this long.

    Connections inherit these options. They work even if the client's system still answers that it has no room.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux has both options. On other systems only closed connections are cut (closing.py).
    if hasattr(socket, "TCP_KEEPIDLE"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, math.ceil(seconds))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))
