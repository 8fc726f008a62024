"""How the pool talks to Redis: connections, scripts by their hash, what their answers outlive, errors that are ours."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection
from redis.exceptions import (
    ConnectionError,  # noqa: A004 - a RedisError, as redis-py's own
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from orca.core.domain.errors import PoolUnavailable
from orca.pool import poison
from orca.pool.redis import submit_arguments
from orca.pool.redis.connecting import connection_options
from orca.pool.redis.durability import FileState, Settling
from orca.pool.redis.keys import Keys, lua_key_builders
from orca.pool.schemas import Schemas
from orca.pool.settings import PoolSettings

Command = tuple[Any, ...]

_SCRIPTS = Path(__file__).with_name("scripts")
# Words in an error reply that mean "not now", as opposed to a bug in a script. Redis 6.2 wraps the reply of a command
# inside a script into a sentence of its own, so they may stand anywhere in it.
_NOT_NOW = ("MISCONF", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "ORCASCHEMA")
# And that who says so follows another server.
_OF_REPLICA = ("READONLY", "MASTERDOWN", "WAIT cannot be used with replica")
# What a script is told that may not run one of its commands, where a command by itself is answered NOPERM.
_NO_RIGHT = "The user executing the script can't"
# Behind a transition's text: its answer, and what is to be known of what it did.
_ANSWER = "return { transition() or false, unsettled() }"
_FOR_ALL_CONNECTIONS = 4
_READING_CONNECTIONS = 2
_CLOSE_S = 1.0
"""A server that does not say its last word is not waited for longer."""


class Purpose(Enum):
    """What a call is made for. Each has connections of its own: a call waits only for others of its purpose."""

    CLIENT = auto()
    """One client asked for it: short, and many at once."""

    READING = auto()
    """A page of a log that one client asked for. Each may take milliseconds of Redis, so few come to it at once."""

    ALL = auto()
    """A process makes it for all its clients at once, from a task or two. A late one would stall every stream, let
    readers lapse, or cost a seat."""


class Fault(Enum):
    """What an answer may have to outlive: it is given when what it tells of would still be there."""

    NONE = auto()
    """Nobody but the caller learns of it: after a kill of Redis it may be as if the call had never been made."""

    KILL = auto()
    """Redis is killed and reads its append-only file back (durability.py)."""

    FAIL_OVER = auto()
    """That, and with replicas one of them takes over."""


class OutOfMemory(PoolUnavailable):
    """Redis refused the first write of a script: nothing happened."""


class ServerIsReplica(PoolUnavailable):
    """The server follows another one: it was demoted, and the address leads to its successor by now or soon."""


class _Script:
    """A transition's text; EVALSHA, and EVAL where the server does not know it yet."""

    def __init__(self, name: str, schemas: Schemas) -> None:
        prelude, transition = ((_SCRIPTS / f"{part}.lua").read_text() for part in ("prelude", name))
        texts = [lua_key_builders(), schemas.lua(), poison.lua(), submit_arguments.lua(), prelude]
        self.text = "".join([*texts, f"local function transition()\n{transition}\nend\n", _ANSWER])
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


@cache
def _transitions(schemas: Schemas) -> dict[str, _Script]:
    """All scripts of a release that writes these schema numbers, by name."""
    names = sorted(path.stem for path in _SCRIPTS.glob("*.lua"))
    return {name: _Script(name, schemas) for name in names if name != "prelude"}


class Lane:
    """Some connections, and the calls that take turns for them in the order of asking.

    The connections are redis-py's. Its client and its pool are left out: they take most of a call's time, and a
    connection that came free goes to whoever asks next, so that among busy callers some would be served thousands of
    times and others never.
    """

    def __init__(self, size: int, timeout_s: float, connection: Callable[[], AbstractConnection]) -> None:
        """Args: timeout_s: of the wait for a turn, and of what comes then. connection: makes one, not connected."""
        self._size = size
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(size)
        self._connections = [connection() for _ in range(size)]
        self._idle = self._connections.copy()
        self._outdated = set[AbstractConnection]()
        self._is_closed = False

    async def call(self, *commands: Command) -> list[Any]:
        """The answers to commands that go out together on one connection, in one round trip; not atomic.

        Raises: NoScriptError; OutOfMemory, ServerIsReplica; PoolUnavailable, also when no turn comes in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise PoolUnavailable(f"none of {self._size} connections to Redis came free in time") from error
        connection = self._idle.pop()
        try:
            if self._is_closed:
                raise PoolUnavailable("the connections to Redis were closed")
            with _as_ours():
                async with asyncio.timeout(self._timeout_s):
                    if connection in self._outdated:
                        self._outdated.remove(connection)
                        await connection.disconnect(nowait=True)
                    return await _exchange(connection, commands)
        finally:
            self._idle.append(connection)
            self._turns.release()

    def connect_anew(self) -> None:
        """Each connection, before its next call."""
        self._outdated.update(self._connections)

    async def close(self) -> None:
        """Calls that are under way fail, and those that come later."""
        self._is_closed = True
        await asyncio.gather(*map(hang_up, self._connections))


class RedisLink:
    """The connections of one process to the Redis of one deployment."""

    def __init__(self, url: str, keys: Keys, settings: PoolSettings, schemas: Schemas) -> None:
        self._transitions = _transitions(schemas)
        self._meta = keys.single("meta")
        self._replicas = settings.replicas
        self._confirm_ms = settings.call_timeout_ms // 2
        self._accepts_loss = settings.accepts_loss
        timeout_s = settings.call_timeout_ms / 1000
        options: dict[str, Any] = {
            "connection_class": Connection,
            **connection_options(url, settings),
            "socket_connect_timeout": timeout_s,
            # Each call and each who listens has a time of its own. Under redis-py's, `asyncio.wait_for` makes a task of
            # each send, and up to Python 3.11 a cancellation that comes as that ends is lost.
            "socket_timeout": None,
            "health_check_interval": 0,
            "protocol": 2,
            # Else each connect asks for a command that the pool's user may not call.
            "driver_info": None,
        }
        self.connection: Callable[[], AbstractConnection] = partial(options.pop("connection_class"), **options)
        """Makes one for who listens, not connected."""
        greeted = partial(self.connection, redis_connect_func=self._greet)
        self._lanes = {
            Purpose.CLIENT: Lane(settings.connections_max, timeout_s, greeted),
            Purpose.READING: Lane(_READING_CONNECTIONS, timeout_s, greeted),
            Purpose.ALL: Lane(_FOR_ALL_CONNECTIONS, timeout_s, greeted),
        }
        self._settling = Settling(self._file_state, timeout_s)
        self.connects = 0
        """How often a call has found a server anew, which may be another one each time."""

    async def _greet(self, connection: AbstractConnection) -> None:
        await connection.on_connect()
        self.connects += 1

    async def run(
        self, transition: str, *args: Any, purpose: Purpose = Purpose.CLIENT, survives: Fault = Fault.NONE
    ) -> Any:
        """A transition, in one round trip once Redis knows its text.

        Args: survives: what the answer is worth; one that is not to be had is PoolUnavailable, and the call happened.
        Raises: OutOfMemory, PoolUnavailable.
        """
        script, lane = self._transitions[transition], self._lanes[purpose]
        replicas = self._replicas if survives is Fault.FAIL_OVER else 0
        try:
            answer, unsettled = await self._once(lane, ("EVALSHA", script.sha, 1, self._meta, *args), replicas)
        except NoScriptError:
            answer, unsettled = await self._once(lane, ("EVAL", script.text, 1, self._meta, *args), replicas)
        if unsettled and survives is not Fault.NONE and not self._accepts_loss:
            await self._settling.settle(unsettled.decode())
        return answer

    async def pipeline(self, *commands: Command, purpose: Purpose = Purpose.CLIENT) -> list[Any]:
        """The commands on one connection in one round trip; not atomic."""
        return await self._call(self._lanes[purpose], *commands)

    def connect_anew(self) -> None:
        """What comes next goes to the server that the address leads to by then.

        Asked for where a server was found to be a replica. One that is demoted may keep its clients' connections: they
        would lead to it for ever, and what only reads would be answered with what it held once.
        """
        for lane in self._lanes.values():
            lane.connect_anew()

    async def _call(self, lane: Lane, *commands: Command) -> list[Any]:
        try:
            return await lane.call(*commands)
        except ServerIsReplica:
            self.connect_anew()
            raise

    async def _once(self, lane: Lane, command: Command, replicas: int) -> Any:
        """The answer to a command, with the proof that so many replicas hold all that it wrote or saw.

        WAIT asks for the replication offset at which its own connection last ran a command, a read included; on another
        connection it would ask for an older one and say yes at once. Hence the same connection, in the same pipeline.

        Raises: PoolUnavailable when too few replicas confirm in time; what was written may stay.
        """
        if not replicas:
            (answer,) = await self._call(lane, command)
            return answer
        answer, confirmed = await self._call(lane, command, ("WAIT", replicas, self._confirm_ms))
        if confirmed < replicas:
            raise PoolUnavailable(f"{confirmed} of {replicas} replicas confirmed in time")
        return answer

    async def _file_state(self) -> FileState:
        server, persistence = await self.pipeline(("INFO", "server"), ("INFO", "persistence"), purpose=Purpose.ALL)
        return FileState.of(read_info(server) | read_info(persistence))

    async def close(self) -> None:
        await self._settling.close()
        for lane in self._lanes.values():
            await lane.close()


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """Raises: what redis-py does; of errors that commands are answered with the first, once all answers are here."""
    # It may have been closed since, or hold what nobody has asked for.
    if connection.is_connected and await connection.can_read():
        await connection.disconnect(nowait=True)
    if not connection.is_connected:
        # That a server is away may be known at once: who asks again and again leaves the loop to others all the same.
        await asyncio.sleep(0)
        await connection.connect()  # type: ignore[no-untyped-call]
    await send(connection, *commands)
    answers = []
    for _ in commands:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise answer
    return answers


async def send(connection: AbstractConnection, *commands: Command) -> None:
    """Raises: RedisError, OSError."""
    try:
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    except (RuntimeError, AttributeError) as error:
        # What uvloop, and the loop of Python 3.12, make of a connection that was reset while nobody read from it.
        raise ConnectionError(str(error)) from error


async def hang_up(connection: AbstractConnection) -> None:
    """Close a connection, and wait until it is: an encrypted one ends by a word of either side."""
    with suppress(RedisError, OSError):
        async with asyncio.timeout(_CLOSE_S):
            await connection.disconnect()


@contextmanager
def _as_ours() -> Iterator[None]:
    """Turns errors of the server and of the way to it into ours."""
    try:
        yield
    except NoPermissionError as error:
        raise _no_right(error) from error
    except ResponseError as error:
        # redis-py has taken the first word off where it has a class for it.
        said = f"{error.status_code or ''} {error}"
        if "used memory > 'maxmemory'" in said:
            raise OutOfMemory(said) from error
        if _NO_RIGHT in said:
            raise _no_right(error) from error
        if any(word in said for word in _OF_REPLICA):
            raise ServerIsReplica(said) from error
        if any(word in said for word in _NOT_NOW):
            raise PoolUnavailable(said) from error
        raise  # a bug in a script, not a state of the server
    except TimeoutError as error:
        raise PoolUnavailable("Redis gave no answer in time") from error
    except (RedisError, OSError) as error:
        raise PoolUnavailable(f"{type(error).__name__}: {error}") from error


def _no_right(error: ResponseError) -> PoolUnavailable:
    return PoolUnavailable(f"the pool's user may not do this (access.py says what it must be allowed): {error}")


def read_info(answer: bytes) -> dict[str, str | int]:
    """What INFO says, by name; what consists of digits as a number."""
    fields = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: int(value) if value.isdecimal() else value for name, colon, value in fields if colon}
