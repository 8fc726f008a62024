"""One subscription per process to the notifications of the pool's scripts, for all that wait for them (hints.py)."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError  # noqa: A004 - a RedisError, as ours are from here

from orca.pool.hints import Hints
from orca.pool.redis.fair_connections import hang_up, send

log = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_POLL_S = 1.0
"""Every waiter polls once in this time while the subscription is broken."""
# A dead connection without an error looks like a pool without news. So after this time without a message the server
# gets a PING, and after as long again without an answer the connection is closed.
_QUIET_S = 2.0


class Subscription:
    """Keeps one connection subscribed to the channel and feeds `Hints`; it reconnects for as long as it lives."""

    def __init__(
        self,
        connection: Callable[[], AbstractConnection],
        channel: str,
        hints: Hints,
        connect_s: float = _QUIET_S,
        quiet_s: float = _QUIET_S,
        *,
        uses_contents: bool = True,
    ) -> None:
        """
        Args:
            connection: makes a connection, not connected.
            connect_s: bound on connecting.
            quiet_s: half of the time until a silent connection is noticed.
            uses_contents: entries in a message count as read from the log.
        """
        self._connection = connection
        self._connect_s, self._quiet_s = connect_s, quiet_s
        self._is_away = False
        self._polled_s = -math.inf
        self._channel = channel
        self._hints = hints
        self._wants_logs = False
        self._uses_contents = uses_contents
        self._task: asyncio.Task[None] | None = None

    def start(self, *, for_logs: bool) -> None:
        """Begin to listen, in the running loop; harmless if already begun.

        Args: for_logs: from now on pass on hints about logs too. Schedulers wait for work only, and each token of the
            deployment causes a message.
        """
        self._wants_logs = self._wants_logs or for_logs
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="pool-news")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _listen(self) -> None:
        while True:
            connection = self._connection()
            try:
                await self._subscribe(connection)
                await self._receive_all(connection)
            except (RedisError, OSError) as error:
                if not self._is_away:
                    log.warning("notifications of the pool are interrupted, readers poll: %s", error)
                self._is_away = True
                if (now := asyncio.get_running_loop().time()) >= self._polled_s + _POLL_S:
                    self._polled_s = now
                    self._hints.wake_all()
                await asyncio.sleep(_RECONNECT_S)
            finally:
                await hang_up(connection)

    async def _subscribe(self, connection: AbstractConnection) -> None:
        """Connect and subscribe. Raises: RedisError, OSError."""
        try:
            async with asyncio.timeout(self._connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
                await send(connection, ("SUBSCRIBE", self._channel))
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {self._connect_s:g} s") from error

    async def _receive_all(self, connection: AbstractConnection) -> None:
        """Receive messages until the connection breaks or is silent. Raises: RedisError, OSError."""
        is_pinged = False
        while True:
            message = await connection.read_response(timeout=self._quiet_s)
            if message is None:
                if is_pinged:
                    raise ConnectionError(f"no answer in {self._quiet_s:g} s")
                await send(connection, ("PING",))
            elif message[0] == b"message":
                self._receive(message[2])
            elif message[0] == b"subscribe":
                self._on_subscribed()
            is_pinged = message is None

    def _on_subscribed(self) -> None:
        """Wake every waiter: messages come from now on, and there may have been some before."""
        self._hints.wake_all()
        if self._is_away:
            log.info("notifications of the pool are back")
        self._is_away = False

    def _receive(self, data: bytes) -> None:
        if not self._wants_logs and b"+" not in data:
            # A commit of the deployment: a scheduler does not need its lines.
            return
        # A line of contents belongs to the line before it.
        for line in data.decode().replace("\n=", " =").splitlines():
            if line.startswith("+"):
                self._hints.publish_work(line[1:])
            elif self._wants_logs:
                name, _, rest = line.partition(" ")
                length, _, content = rest.partition(" =")
                self._hints.publish_log(name, int(length or 0), content if self._uses_contents else "")
