"""The pool's calls to Redis: scripts by their hash, and the faults that an answer must survive."""

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection
from redis.exceptions import NoScriptError

from orca.core.domain.errors import PoolUnavailable
from orca.pool.redis.connecting import connection_options
from orca.pool.redis.durability import AppendOnlyFileState, FsyncWatcher
from orca.pool.redis.fair_connections import Command, FairConnections, ServerIsReplica
from orca.pool.redis.keys import Keys
from orca.pool.redis.transitions import all_transitions
from orca.pool.schemas import Schemas
from orca.pool.settings import PoolSettings

_READING_CONNECTIONS = 2
_ALL_CLIENTS_CONNECTIONS = 4


class CallPurpose(Enum):
    """The purpose of a call. Each has connections of its own: a call waits only for others of its purpose."""

    ONE_CLIENT = auto()
    """A call for one client: short, and many at once."""

    READING = auto()
    """A page of a log for one client. Each may cost Redis milliseconds, so few of them run at once."""

    ALL_CLIENTS = auto()
    """A call for all clients of a process at once, from a task or two. A late one would stall every stream, let readers
    lapse, or cost a seat."""


class Durability(Enum):
    """Faults that the content of an answer survives. The answer is returned only when that is so."""

    NONE = auto()
    """Only the caller uses the answer: after a kill of Redis it may be as if the call had never been made."""

    SURVIVES_KILL = auto()
    """Redis is killed and reads its append-only file back (durability.py)."""

    SURVIVES_FAIL_OVER = auto()
    """A kill; and with replicas, one of them takes over."""


class RedisLink:
    """The connections of one process to the Redis of one deployment."""

    def __init__(self, url: str, keys: Keys, settings: PoolSettings, schemas: Schemas) -> None:
        self._transitions = all_transitions(schemas)
        self._meta = keys.single("meta")
        self._replicas = settings.replicas
        self._confirm_ms = settings.call_timeout_ms // 2
        self._accepts_loss = settings.accepts_loss
        timeout_s = settings.call_timeout_ms / 1000
        options: dict[str, Any] = {
            "connection_class": Connection,
            **connection_options(url, settings),
            "socket_connect_timeout": timeout_s,
            # Each call and each subscription has its own timeout. With redis-py's timeout, `asyncio.wait_for` makes a
            # task of each send, and up to Python 3.11 a cancellation that comes as the task ends is lost.
            "socket_timeout": None,
            "health_check_interval": 0,
            "protocol": 2,
            # Otherwise each connect sends a command that the pool's user may not call.
            "driver_info": None,
        }
        self.connection: Callable[[], AbstractConnection] = partial(options.pop("connection_class"), **options)
        """Makes a connection for a subscription, not connected."""
        counted = partial(self.connection, redis_connect_func=self._on_connect)
        self._connections = {
            CallPurpose.ONE_CLIENT: FairConnections(settings.connections_max, timeout_s, counted),
            CallPurpose.READING: FairConnections(_READING_CONNECTIONS, timeout_s, counted),
            CallPurpose.ALL_CLIENTS: FairConnections(_ALL_CLIENTS_CONNECTIONS, timeout_s, counted),
        }
        self._fsync = FsyncWatcher(self._file_state, timeout_s)
        self.connects = 0
        """Number of connects for calls. Each may have reached another server."""

    async def _on_connect(self, connection: AbstractConnection) -> None:
        await connection.on_connect()
        self.connects += 1

    async def run(
        self,
        transition: str,
        *args: Any,
        purpose: CallPurpose = CallPurpose.ONE_CLIENT,
        durability: Durability = Durability.NONE,
    ) -> Any:
        """Run a transition, in one round trip once Redis knows its text.

        Args: durability: faults that the answer must survive. If that is not so in time, the call raises
            PoolUnavailable although it happened.
        Raises: OutOfMemory, PoolUnavailable.
        """
        script, connections = self._transitions[transition], self._connections[purpose]
        replicas = self._replicas if durability is Durability.SURVIVES_FAIL_OVER else 0
        try:
            reply = await self._call_once(connections, ("EVALSHA", script.sha, 1, self._meta, *args), replicas)
        except NoScriptError:
            reply = await self._call_once(connections, ("EVAL", script.text, 1, self._meta, *args), replicas)
        answer, unwritten_run = reply
        if unwritten_run and durability is not Durability.NONE and not self._accepts_loss:
            await self._fsync.wait_until_written(unwritten_run.decode())
        return answer

    async def pipeline(self, *commands: Command, purpose: CallPurpose = CallPurpose.ONE_CLIENT) -> list[Any]:
        """Send the commands on one connection in one round trip; not atomic."""
        return await self._call(self._connections[purpose], *commands)

    def reconnect(self) -> None:
        """Send later calls to the server that the address leads to by then.

        Called when a server was found to be a replica. A demoted server may keep its clients' connections. They would
        lead to it for ever, and it would answer reads with old data.
        """
        for connections in self._connections.values():
            connections.reconnect()

    async def _call(self, connections: FairConnections, *commands: Command) -> list[Any]:
        try:
            return await connections.call(*commands)
        except ServerIsReplica:
            self.reconnect()
            raise

    async def _call_once(self, connections: FairConnections, command: Command, replicas: int) -> Any:
        """Return the answer to a command, after `replicas` replicas have confirmed all that it wrote or saw.

        WAIT asks for the replication offset at which its own connection last ran a command, a read included. On another
        connection it would ask for an older offset and confirm at once. So it goes out on the same connection, in the
        same pipeline.

        Raises: PoolUnavailable if too few replicas confirm in time; what was written may stay.
        """
        if not replicas:
            (answer,) = await self._call(connections, command)
            return answer
        answer, confirmed = await self._call(connections, command, ("WAIT", replicas, self._confirm_ms))
        if confirmed < replicas:
            raise PoolUnavailable(f"{confirmed} of {replicas} replicas confirmed in time")
        return answer

    async def _file_state(self) -> AppendOnlyFileState:
        server, persistence = await self.pipeline(
            ("INFO", "server"), ("INFO", "persistence"), purpose=CallPurpose.ALL_CLIENTS
        )
        return AppendOnlyFileState.of(read_info(server) | read_info(persistence))

    async def close(self) -> None:
        await self._fsync.close()
        for connections in self._connections.values():
            await connections.close()


def read_info(answer: bytes) -> dict[str, str | int]:
    """Return the fields of a reply to INFO by name; values of digits only are numbers."""
    fields = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: int(value) if value.isdecimal() else value for name, colon, value in fields if colon}
