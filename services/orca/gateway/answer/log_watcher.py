"""Reads the logs of all open connections of the process: one pool call per step, however many streams run.

If the pool's news brought the entries themselves, no call is made at all. News are hints that may be lost, so the
watcher keeps a cursor for each log and reads again. While a connection does not take its tokens, its logs are not read:
the log is the buffer, and a slow reader slows only itself.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping

from orca.core.domain.errors import OrcaError, PoolUnavailable, UnknownRequest
from orca.core.process.batched import batched
from orca.pool.api import RequestPool
from orca.pool.hints import LogNews
from orca.pool.records import LogSlice

log = logging.getLogger(__name__)

WAIT_SECONDS = 1.0  # between two reads without news
ROUND_SECONDS = 8  # all logs are read once in this time, whatever the news said: the cost of a lost hint
OUTAGE_SECONDS = 0.2  # between two attempts while the pool is away
UNSEEN_SECONDS = 0.01  # before the next attempt to read tokens that the news announced and that could not be read
READ_MAX = 256  # logs that one call reads: Redis and this process turn to others in between
UNTAKEN_MAX = 1024  # tokens that were read for a connection and that it has not taken


class LogSubscription:
    """The part of the logs that one connection reads. `close` ends it."""

    def __init__(self, watcher: "LogWatcher", request_ids: Iterable[str]) -> None:
        self._watcher = watcher
        self.request_ids = tuple(request_ids)
        self._untaken: list[tuple[str, LogSlice]] = []
        self._has_news = asyncio.Event()
        self._error: OrcaError | None = None
        self._is_closed = False
        self.untaken_tokens = 0

    async def next(self) -> list[tuple[str, LogSlice]] | None:
        """Wait for log slices and return all that came since the last call; None once closed.

        Raises: UnknownRequest if the pool has lost the record (a fail-over, a Redis without its file).
        """
        await self._has_news.wait()
        if self._is_closed:
            return None
        if self._error is not None:
            raise self._error
        taken, self._untaken = self._untaken, []
        self.untaken_tokens = 0
        self._has_news.clear()
        self._watcher.resume(self)
        return taken

    def close(self) -> None:
        """End the subscription and wake `next`."""
        self._is_closed = True
        self._has_news.set()
        self._watcher.forget(self)

    def add(self, request_id: str, part: LogSlice) -> None:
        self._untaken.append((request_id, part))
        self.untaken_tokens += len(part.tokens)
        self._has_news.set()

    def fail(self, error: OrcaError) -> None:
        self._error = error
        self._has_news.set()


class LogWatcher:
    """Reads the logs of all subscriptions. `run` is one task of the process."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        # For each log its readers, and the number of entries that each has. Several connections may read one log.
        self._reading: dict[str, dict[LogSubscription, int]] = {}
        # The smallest of these numbers: from here each log is read. The news use it too.
        self._cursors: dict[str, int] = {}
        self._paused: dict[LogSubscription, dict[str, int]] = {}
        # Logs to be read at once: those that may have had entries at their subscription, and those that have more
        # entries than one read brought. No news will announce these entries again.
        self._unread: set[str] = set()
        self._round: list[str] = []  # the rest of the present round: logs that are still to be read without news
        self._round_s = -math.inf  # when the round last went on, on the loop's clock
        self._is_all_due = False
        self._news: LogNews | None = None  # while `run` waits there
        self._has_cursors = asyncio.Event()

    def subscribe(self, request_ids: Iterable[str], *, are_new: bool = False) -> LogSubscription:
        """Read these logs from their start.

        Args: are_new: the logs were empty a moment ago, so nothing is read before news come.
        """
        subscription = LogSubscription(self, request_ids)
        for request_id in subscription.request_ids:
            self._read_on(subscription, request_id, 0)
            if not are_new or (self._news is not None and self._news.length_before(request_id)):
                self._unread.add(request_id)
        self._end_wait()
        return subscription

    def forget(self, subscription: LogSubscription) -> None:
        self._paused.pop(subscription, None)
        for request_id in subscription.request_ids:
            self._stop_reading(subscription, request_id)

    def resume(self, subscription: LogSubscription) -> None:
        """Read on for a subscription that has taken its slices, if it was paused."""
        for request_id, cursor in self._paused.pop(subscription, {}).items():
            self._read_on(subscription, request_id, cursor)
            self._unread.add(request_id)
        self._end_wait()

    async def run(self) -> None:
        """Read until cancelled, through outages of the pool."""
        was_away = False
        with self._pool.log_news(self._cursors) as self._news:
            while True:
                await self._has_cursors.wait()
                if not self._cursors:
                    self._has_cursors.clear()
                    continue
                try:
                    await self._read_new(self._news)
                    if was_away:
                        was_away = False
                        log.info("pool back")
                except PoolUnavailable as error:
                    if not was_away:
                        log.warning("pool away, streams wait: %s", error)
                    was_away = self._is_all_due = True
                    await asyncio.sleep(OUTAGE_SECONDS)
                except Exception:
                    log.exception("reading logs failed")
                    self._is_all_due = True
                    await asyncio.sleep(OUTAGE_SECONDS)

    def _end_wait(self) -> None:
        """End a wait that began before the logs that are to be read now were known."""
        if self._cursors:
            self._has_cursors.set()
        if self._unread and self._news is not None:
            self._news.end_wait()

    async def _read_new(self, news: LogNews) -> None:
        """Wait for news and read the new entries; in rounds, read logs without news as well.

        A hint may be lost, and so may a record: a Redis that restarts fast may fail no call, but breaks the link that
        brings the news. So some logs are read once a second, and each within ROUND_SECONDS.
        """
        longer = await news.wait(0.0 if self._unread else WAIT_SECONDS)
        self._is_all_due = self._is_all_due or longer is None
        brought = {request_id: part for request_id in longer or () if (part := news.slice(request_id)) is not None}
        self._deliver(brought)
        # New entries before the rest of long logs: a call may have no room for both.
        announced = (longer or frozenset()) - brought.keys()
        due = [*announced, *self._unread, *self._next_of_round()]
        starts = {request_id: self._cursors[request_id] for request_id in due}
        if not starts:
            return
        self._unread.difference_update(starts)
        is_seen = await self._read(starts)
        self._is_all_due = False
        if announced and not is_seen:
            # The tokens were announced but cannot be read yet: replicas have not confirmed them.
            await asyncio.sleep(UNSEEN_SECONDS)

    def _next_of_round(self) -> list[str]:
        """Return the logs that are now to be read without news."""
        now = asyncio.get_running_loop().time()
        if self._is_all_due:
            self._round_s = now
            self._round.clear()
            return list(self._cursors)
        if now <= self._round_s + WAIT_SECONDS:
            return []
        self._round_s = now
        self._round = self._round or list(self._cursors)
        count = max(READ_MAX, math.ceil(len(self._cursors) * WAIT_SECONDS / ROUND_SECONDS))
        taken = self._round[-count:]
        del self._round[-count:]
        return [request_id for request_id in taken if request_id in self._cursors]

    async def _read(self, starts: Mapping[str, int]) -> bool:
        """Read these logs and deliver new entries. Returns: whether there were any."""
        is_seen = False
        for logs in batched(list(starts.items()), READ_MAX):
            parts = await self._pool.read_many(dict(logs), for_all=True)
            self._deliver(parts)
            is_seen = is_seen or bool(parts)
        return is_seen

    def _deliver(self, parts: Mapping[str, LogSlice | None]) -> None:
        for request_id, part in parts.items():
            if part is not None and part.is_cut and request_id in self._cursors:
                self._unread.add(request_id)
            for subscription, cursor in list(self._reading.get(request_id, {}).items()):
                if part is None:
                    subscription.fail(UnknownRequest(request_id))
                    self.forget(subscription)
                # A reader whose cursor is outside of the slice gets its part by another read.
                elif 0 <= cursor - part.start <= len(part.tokens):
                    self._deliver_part(subscription, request_id, _slice_from(cursor, part))

    def _deliver_part(self, subscription: LogSubscription, request_id: str, part: LogSlice) -> None:
        if not part.tokens and part.end is None:
            return
        subscription.add(request_id, part)
        cursor = part.start + len(part.tokens)
        if part.end is not None:
            self._stop_reading(subscription, request_id)
        elif subscription.untaken_tokens >= UNTAKEN_MAX:
            self._stop_reading(subscription, request_id)
            self._paused.setdefault(subscription, {})[request_id] = cursor
        else:
            self._read_on(subscription, request_id, cursor)

    def _read_on(self, subscription: LogSubscription, request_id: str, cursor: int) -> None:
        reading = self._reading.setdefault(request_id, {})
        reading[subscription] = cursor
        self._cursors[request_id] = min(reading.values())

    def _stop_reading(self, subscription: LogSubscription, request_id: str) -> None:
        reading = self._reading.get(request_id, {})
        reading.pop(subscription, None)
        if reading:
            self._cursors[request_id] = min(reading.values())
        else:
            self._reading.pop(request_id, None)
            self._cursors.pop(request_id, None)
            self._unread.discard(request_id)


def _slice_from(cursor: int, part: LogSlice) -> LogSlice:
    """Return the rest of a slice from `cursor` on."""
    if cursor == part.start:
        return part
    return LogSlice(cursor, part.tokens[cursor - part.start :], part.end)
