"""uvicorn between signals: which sockets it listens on, and in which order a gateway ends."""

import asyncio
import contextlib
import functools
import logging
import math
import resource
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from orca.core.domain.errors import SettingError
from orca.gateway.app import METRICS_PORT
from orca.gateway.gateway import Gateway
from orca.gateway.http.bounds import OpenConnections
from orca.gateway.http.connection import connection_class
from orca.gateway.settings import Settings

log = logging.getLogger(__name__)

LAST_BYTES_SECONDS = 1.0
"""For the last events of cut answers to leave."""

POLL_SECONDS = 0.02

OTHER_FILES = 128
"""Beside the clients': connections to the pool (its setting, 32), refused ones (64), listening sockets, libraries."""


def take_port(host: str, port: int) -> list[socket.socket]:
    """Sockets that hold the port for the server and do not listen yet: one for each address of the host.

    Raises: SettingError when it cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SettingError(f"setting host: {host!r} is not an address: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        sockets = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            taken = stack.enter_context(socket.socket(family, kind, protocol))
            # A connection of an earlier server in TIME_WAIT does not count.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                taken.bind(address)
            except OSError as error:
                raise SettingError(f"setting port: {port} of host {host} cannot be had: {error.strerror}") from error
            sockets.append(taken)
        stack.pop_all()
        return sockets


def allow_open_files(connections_max: int) -> None:
    """Raise the process's soft limit to its hard one if `connections_max` needs it, and say so; or that it is too low.

    The soft limit is 1,024 nearly everywhere, for programs that use select; nothing here does.
    """
    needed = connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _holds(soft, needed):
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.info("limit of open files raised for connections_max", extra={"before": soft, "after": hard})
    if not _holds(hard, needed):
        log.warning(
            "the process may open %d files, connections_max %d needs %d: raise the limit or lower it",
            hard,
            connections_max,
            needed,
        )


def _holds(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def make_server(app: FastAPI, settings: Settings) -> "Server":
    """A server that is not yet running; `await server.serve()` runs it until a signal."""
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
        timeout_keep_alive=settings.idle_seconds_max,  # type: ignore[arg-type]  # takes parts of a second, too
        # Nothing here depends on where a call comes from.
        proxy_headers=False,
        server_header=False,
    )
    return Server(config, gateway)


class Server(uvicorn.Server):
    """The first signal takes no new calls and lets open answers end (see drain.py); the second ends them at once.

    Either way the lifespan ends too and the process leaves with its own exit status: the pool and the traces look the
    same behind both.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._settings = gateway.settings
        self._drain = gateway.drain
        self._metrics = gateway.metrics
        self._metrics_server: asyncio.Server | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises: SettingError when the port for metrics cannot be had; the lifespan has ended then."""
        await super().startup(sockets)
        if self.started and self._settings.metrics_port is not None:
            try:
                await self._listen_for_metrics(self._settings.metrics_port)
            except OSError as error:
                await self.shutdown()
                raise SettingError(f"setting metrics_port: {error}") from error
        if self.started:
            for door in (each for server in self.servers for each in server.sockets):
                _bound_silence(door, self._settings.unread_seconds_max)
            log.info("gateway listens", extra={"host": self.config.host, "port": self.port})

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @property
    def metrics_port(self) -> int:
        """Where metrics are served if they have a port of their own."""
        assert self._metrics_server is not None
        return int(self._metrics_server.sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: whether to shut down."""
        if not await super().on_tick(counter):
            return False
        self._drain.begin(self._settings.drain_seconds)
        for connection in list(self.server_state.connections):
            connection.end_if_idle()  # type: ignore[union-attr]  # all are of connection.py
        return self.force_exit or self._drain.is_cut or not self.server_state.tasks

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Close the doors, let last bytes leave, drop what is left; then the lifespan, whose end needs all that.

        uvicorn's own skips the lifespan after a second signal, and from Python 3.12 on waits for connections then.
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
        """For so long at most, and only until a second signal."""
        for _ in range(round(seconds / POLL_SECONDS)):
            if not self.server_state.connections or self.force_exit:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _listen_for_metrics(self, port: int) -> None:
        """One more door to the same application; calls tell by which they came.

        It counts its own connections: a probe of /health is answered however many clients fill the other door.
        """
        factory = functools.partial(
            connection_class(OpenConnections(self._settings, self._metrics.count_refused_connection)),
            config=self.config,
            server_state=self.server_state,
            app_state={**self.lifespan.state, METRICS_PORT: True},
        )
        loop = asyncio.get_running_loop()
        self._metrics_server = await loop.create_server(factory, self.config.host, port)
        self.servers.append(self._metrics_server)


def _bound_silence(door: socket.socket, seconds: float) -> None:
    """End connections, which inherit this, whose client takes nothing for so long, though its system still answers that
    it has no room; and ask for the client of one that is quiet for so long.
    """
    door.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux has both; where a system has not, only what is closed is cut (connection.py).
    if hasattr(socket, "TCP_KEEPIDLE"):
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, math.ceil(seconds))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))
