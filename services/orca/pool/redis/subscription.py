"""One subscription per process to what the pool's scripts tell, for all who wait there (hints.py)."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError  # noqa: A004 - a RedisError, as ours are from here

from orca.pool.hints import Hints
from orca.pool.redis.link import hang_up, send

log = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_POLL_S = 1.0
"""While nothing can be told, everybody looks once in so long."""
# A link that carries nothing any more, without a word, looks like a pool without news. So after this time without a
# message the server is asked to say something, and after as long again without an answer the link is given up.
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
        heeds_contents: bool = True,
    ) -> None:
        """
        Args:
            connection: makes one, not connected.
            connect_s: what connecting may take.
            quiet_s: half of what a link that went silent may cost until it is noticed.
            heeds_contents: what is told of a log's entries is as good as to have read them.
        """
        self._connection = connection
        self._connect_s, self._quiet_s = connect_s, quiet_s
        self._is_away = False
        self._polled_s = -math.inf
        self._channel = channel
        self._hints = hints
        self._heeds_logs = False
        self._heeds_contents = heeds_contents
        self._task: asyncio.Task[None] | None = None

    def start(self, *, for_logs: bool) -> None:
        """Begin to listen, in the running loop; harmless when already begun.

        Args: for_logs: heed what is told of logs too, from now on. Schedulers wait for work alone, and each token of
            the deployment is told of.
        """
        self._heeds_logs = self._heeds_logs or for_logs
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
                await self._take_all(connection)
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
        """Raises: RedisError, OSError."""
        try:
            async with asyncio.timeout(self._connect_s):
                await connection.connect()  # type: ignore[no-untyped-call]
                await send(connection, ("SUBSCRIBE", self._channel))
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {self._connect_s:g} s") from error

    async def _take_all(self, connection: AbstractConnection) -> None:
        """Until the link breaks or is silent. Raises: RedisError, OSError."""
        is_asked = False
        while True:
            said = await connection.read_response(timeout=self._quiet_s)
            if said is None:
                if is_asked:
                    raise ConnectionError(f"no answer in {self._quiet_s:g} s")
                await send(connection, ("PING",))
            elif said[0] == b"message":
                self._take(said[2])
            elif said[0] == b"subscribe":
                self._begin()
            is_asked = said is None

    def _begin(self) -> None:
        """From here on messages come; there may have been some before."""
        self._hints.wake_all()
        if self._is_away:
            log.info("notifications of the pool are back")
        self._is_away = False

    def _take(self, data: bytes) -> None:
        if not self._heeds_logs and b"+" not in data:
            # Every commit of the deployment: a scheduler has no need of its lines.
            return
        # A line of contents belongs to the one before it.
        for line in data.decode().replace("\n=", " =").splitlines():
            if line.startswith("+"):
                self._hints.tell_work(line[1:])
            elif self._heeds_logs:
                name, _, told = line.partition(" ")
                entries, _, content = told.partition(" =")
                self._hints.tell_log(name, int(entries or 0), content if self._heeds_contents else "")
