"""Connections to Redis that calls use in turn, and the errors of Redis as ours."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    ConnectionError,  # noqa: A004 - a RedisError, as redis-py's own
    NoPermissionError,
    RedisError,
    ResponseError,
)

from orca.core.domain.errors import PoolUnavailable

Command = tuple[Any, ...]

# Terms in an error reply that mean "not now", as opposed to a bug in a script. Redis 6.2 wraps the reply of a command
# inside a script into a sentence of its own, so they may stand anywhere in it.
_NOT_NOW = ("MISCONF", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "ORCASCHEMA")
# Terms in an error reply that mean that the server follows another one.
_IS_REPLICA = ("READONLY", "MASTERDOWN", "WAIT cannot be used with replica")
# The reply to a script that may not run one of its commands; a command by itself is answered with NOPERM.
_NO_RIGHT = "The user executing the script can't"
_CLOSE_S = 1.0
"""Time that the server gets to close an encrypted connection from its side."""


class OutOfMemory(PoolUnavailable):
    """Redis refused the first write of a script: nothing happened."""


class ServerIsReplica(PoolUnavailable):
    """The server follows another one: it was demoted, and the address leads to its successor by now or soon."""


class FairConnections:
    """A fixed number of connections, and the calls that use them in the order in which they came.

    The connections are redis-py's. Its client and its connection pool are not used: they take most of a call's time.
    Its pool also hands a free connection to whoever asks next, so that some busy callers would be served thousands of
    times and others never.
    """

    def __init__(self, size: int, timeout_s: float, connection: Callable[[], AbstractConnection]) -> None:
        """
        Args:
            timeout_s: bound on the wait for a turn, and again on the call.
            connection: makes a connection, not connected.
        """
        self._size = size
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(size)
        self._connections = [connection() for _ in range(size)]
        self._idle = self._connections.copy()
        self._outdated = set[AbstractConnection]()
        self._is_closed = False

    async def call(self, *commands: Command) -> list[Any]:
        """Send the commands together on one connection and return their answers: one round trip, not atomic.

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
            with _as_our_errors():
                async with asyncio.timeout(self._timeout_s):
                    if connection in self._outdated:
                        self._outdated.remove(connection)
                        await connection.disconnect(nowait=True)
                    return await _exchange(connection, commands)
        finally:
            self._idle.append(connection)
            self._turns.release()

    def reconnect(self) -> None:
        """Connect each connection again before its next call."""
        self._outdated.update(self._connections)

    async def close(self) -> None:
        """Close the connections: calls in progress and later ones fail."""
        self._is_closed = True
        await asyncio.gather(*map(hang_up, self._connections))


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """Send the commands and read their answers, connecting first if needed.

    Raises: the errors of redis-py; of several error replies the first, after all answers have come.
    """
    # It may have been closed since its last call, or hold data that nobody asked for.
    if connection.is_connected and await connection.can_read():
        await connection.disconnect(nowait=True)
    if not connection.is_connected:
        # A refused connection may be known at once. A caller that retries in a loop still leaves the loop to others.
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
    """Send the commands. Raises: RedisError, OSError."""
    try:
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    except (RuntimeError, AttributeError) as error:
        # uvloop, and the loop of Python 3.12, raise these for a connection that was reset while nobody read from it.
        raise ConnectionError(str(error)) from error


async def hang_up(connection: AbstractConnection) -> None:
    """Close a connection and wait until it is closed: an encrypted one ends by a message from either side."""
    with suppress(RedisError, OSError):
        async with asyncio.timeout(_CLOSE_S):
            await connection.disconnect()


@contextmanager
def _as_our_errors() -> Iterator[None]:
    """Turn errors of the server and of the way to it into ours."""
    try:
        yield
    except NoPermissionError as error:
        raise _no_right(error) from error
    except ResponseError as error:
        # redis-py has removed the first term of the reply where it has a class for it.
        reply = f"{error.status_code or ''} {error}"
        if "used memory > 'maxmemory'" in reply:
            raise OutOfMemory(reply) from error
        if _NO_RIGHT in reply:
            raise _no_right(error) from error
        if any(term in reply for term in _IS_REPLICA):
            raise ServerIsReplica(reply) from error
        if any(term in reply for term in _NOT_NOW):
            raise PoolUnavailable(reply) from error
        raise  # a bug in a script, not a state of the server
    except TimeoutError as error:
        raise PoolUnavailable("Redis gave no answer in time") from error
    except (RedisError, OSError) as error:
        raise PoolUnavailable(f"{type(error).__name__}: {error}") from error


def _no_right(error: ResponseError) -> PoolUnavailable:
    return PoolUnavailable(f"the pool's Redis user lacks a right (`orca pool acl` prints the rights it needs): {error}")
