"""One subscription per process that wakes all who wait for news of the pool.

Notifications are hints: the log is the truth. A message that is lost, or a connection that breaks, costs a waiter at
most the poll interval, since `wait` always returns by then and the caller reads the log again.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError, RedisError  # noqa: A004 - a RedisError, as ours are from here

from orca.pool.redis_link import heedful

log = logging.getLogger(__name__)

# A reader asks for its log and then waits; a message that falls between the two must not be missed. So the last known
# length of recently changed logs is remembered, more of them than one process can have readers.
_KNOWN_MAX = 20_000
_RECONNECT_S = 0.2
# A link that carries nothing any more, without a word, looks like a pool without news. So after this time without a
# message the server is asked to say something, and after as long again without an answer the link is given up.
_QUIET_S = 2.0


class Hints:
    """Waiters by name: a request id with the number of entries it has seen, or `+<revision>` for new work."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._known: OrderedDict[str, int] = OrderedDict()
        # Few, with many names each: a gateway waits once for all its streams, however often.
        self._waiters: dict[asyncio.Future[None], Mapping[str, int]] = {}

    async def wait(self, versions: Mapping[str, int], timeout_s: float) -> frozenset[str]:
        """Return when one of the names is known to be past its number, or after `timeout_s` or the poll interval.

        Returns: the names known to be past their numbers.
        """
        if past := self._past(versions):
            return past
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(min(timeout_s, self._poll_s), _wake, woken)
        self._waiters[woken] = versions
        try:
            await woken
        finally:
            timer.cancel()
            del self._waiters[woken]
        return self._past(versions)

    def _past(self, versions: Mapping[str, int]) -> frozenset[str]:
        return frozenset(name for name, seen in versions.items() if self._known.get(name, -1) > seen)

    def tell(self, name: str, entries: int) -> None:
        """A log has this many entries now; `+<revision>` has new work and no number worth remembering."""
        if not name.startswith("+"):
            self._known[name] = entries
            self._known.move_to_end(name)
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        for woken, versions in self._waiters.items():
            if name in versions:
                _wake(woken)

    def wake_all(self) -> None:
        """Messages may have been missed, and after a fail-over lengths may be less: everybody looks for themselves."""
        self._known.clear()
        for woken in self._waiters:
            _wake(woken)


class Subscription:
    """Keeps one connection subscribed to the channel and feeds `Hints`; it reconnects for as long as it lives."""

    def __init__(self, client: Redis, channel: str, hints: Hints, quiet_s: float = _QUIET_S) -> None:
        """Args: quiet_s: half of what a link that went silent may cost until it is noticed."""
        self._client = client
        self._quiet_s = quiet_s
        self._is_away = False
        self._channel = channel
        self._hints = hints
        self._heeds_logs = False
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
            pubsub = self._client.pubsub(ignore_subscribe_messages=False)
            try:
                await heedful(pubsub.subscribe(self._channel))
                await self._take_all(pubsub)
            except (RedisError, OSError) as error:
                if not self._is_away:
                    log.warning("notifications of the pool are interrupted, readers poll: %s", error)
                self._is_away = True
                await asyncio.sleep(_RECONNECT_S)
            finally:
                await _quietly(pubsub.aclose)

    async def _take_all(self, pubsub: PubSub) -> None:
        """Until the link breaks or is silent. Raises: RedisError, OSError."""
        is_asked = False
        while True:
            message = await heedful(pubsub.get_message(timeout=self._quiet_s))
            if message is None:
                if is_asked:
                    raise ConnectionError(f"no answer in {self._quiet_s:g} s")
                await heedful(pubsub.ping())
            elif message["type"] == "message":
                self._take(message["data"])
            elif message["type"] == "subscribe":
                self._begin()
            is_asked = message is None

    def _begin(self) -> None:
        """From here on messages come; there may have been some before."""
        self._hints.wake_all()
        if self._is_away:
            log.info("notifications of the pool are back")
        self._is_away = False

    def _take(self, data: bytes) -> None:
        for line in data.decode().splitlines():
            if self._heeds_logs or line.startswith("+"):
                name, _, entries = line.partition(" ")
                self._hints.tell(name, int(entries or 0))


def _wake(woken: "asyncio.Future[None]") -> None:
    if not woken.done():
        woken.set_result(None)


async def _quietly(close: Callable[[], Awaitable[None]]) -> None:
    # Closing a connection that is already broken has nothing to tell.
    with contextlib.suppress(RedisError, OSError):
        await close()
