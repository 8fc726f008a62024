"""One watcher per process reads the logs of all open connections: one pool call a step, however many streams run, and
none where the news brought the entries themselves.

The pool's notifications are hints, so the watcher keeps a cursor per log and asks again. A connection that does not
take its tokens is not read for until it does: the log is its buffer, and slow readers only hurt themselves.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping

from orca.core.domain.errors import OrcaError, PoolUnavailable, UnknownRequest
from orca.core.process.batches import batches
from orca.pool.api import RequestPool
from orca.pool.hints import LogNews
from orca.pool.records import LogSlice

log = logging.getLogger(__name__)

WAIT_SECONDS = 1.0  # between two reads that no hint asked for
TURNS_SECONDS = 8  # in which all logs are read whatever was told of them: what a lost hint may cost
OUTAGE_SECONDS = 0.2  # between two attempts while the pool is away
UNSEEN_SECONDS = 0.01  # before tokens that were told of and could not be read are looked for again
READ_MAX = 256  # logs that one call reads: Redis and this process turn to others in between
UNTAKEN_MAX = 1024  # tokens read for a connection and not taken by it


class Follower:
    """What one connection sees of the logs of its parent. Leave it by `close`."""

    def __init__(self, watcher: "LogWatcher", request_ids: Iterable[str]) -> None:
        self._watcher = watcher
        self.request_ids = tuple(request_ids)
        self._untaken: list[tuple[str, LogSlice]] = []
        self._has_news = asyncio.Event()
        self._error: OrcaError | None = None
        self._is_closed = False
        self.untaken_tokens = 0

    async def next(self) -> list[tuple[str, LogSlice]] | None:
        """All that came since the last call, at least one slice; None once closed.

        Raises: UnknownRequest when the pool has lost the record (a fail-over, a Redis without its file).
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
        """Stop following; wakes `next`."""
        self._is_closed = True
        self._has_news.set()
        self._watcher.forget(self)

    def give(self, request_id: str, part: LogSlice) -> None:
        self._untaken.append((request_id, part))
        self.untaken_tokens += len(part.tokens)
        self._has_news.set()

    def fail(self, error: OrcaError) -> None:
        self._error = error
        self._has_news.set()


class LogWatcher:
    """Reads the logs of all followers. `run` is one task of the process."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        # Per log, who reads it and the entries that each was given; several connections may read one log.
        self._reading: dict[str, dict[Follower, int]] = {}
        # The least of these: from where each log is to be read. What news are told of by.
        self._cursors: dict[str, int] = {}
        self._paused: dict[Follower, dict[str, int]] = {}
        # Logs of these to be read at once: such as may have had something when they came, and such of which there is
        # more than was read. Nobody tells of that again.
        self._unread: set[str] = set()
        self._in_turn: list[str] = []  # all logs as they were, those not read since
        self._turn_s = -math.inf  # when it was last their turn, on the loop's clock
        self._is_all_due = False
        self._news: LogNews | None = None  # while `run` waits there
        self._has_cursors = asyncio.Event()

    def follow(self, request_ids: Iterable[str], *, are_new: bool = False) -> Follower:
        """Read these logs from their start.

        Args: are_new: they were empty a moment ago, and what comes is told of: nothing is read before.
        """
        follower = Follower(self, request_ids)
        for request_id in follower.request_ids:
            self._read_on(follower, request_id, 0)
            if not are_new or (self._news is not None and self._news.length_before(request_id)):
                self._unread.add(request_id)
        self._look_again()
        return follower

    def forget(self, follower: Follower) -> None:
        self._paused.pop(follower, None)
        for request_id in follower.request_ids:
            self._stop_reading(follower, request_id)

    def resume(self, follower: Follower) -> None:
        """The follower has taken what there was: read on for it if it was paused."""
        for request_id, cursor in self._paused.pop(follower, {}).items():
            self._read_on(follower, request_id, cursor)
            self._unread.add(request_id)
        self._look_again()

    async def run(self) -> None:
        """Until cancelled. Outages of the pool are waited out."""
        was_away = False
        with self._pool.log_news(self._cursors) as self._news:
            while True:
                await self._has_cursors.wait()
                if not self._cursors:
                    self._has_cursors.clear()
                    continue
                try:
                    await self._look(self._news)
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

    def _look_again(self) -> None:
        """Let a wait end that knew nothing of what is to be read now."""
        if self._cursors:
            self._has_cursors.set()
        if self._unread and self._news is not None:
            self._news.end_wait()

    async def _look(self, news: LogNews) -> None:
        """Wait for news and read what is new; in turn also logs of which nobody told.

        A hint may have been lost, and so may a record: a Redis that restarts fast is away from nobody's calls, but
        breaks the link by which it tells. So some logs are read once a second, and each within TURNS_SECONDS.
        """
        longer = await news.wait(0.0 if self._unread else WAIT_SECONDS)
        self._is_all_due = self._is_all_due or longer is None
        told = {request_id: part for request_id in longer or () if (part := news.slice(request_id)) is not None}
        self._deliver(told)
        # What is new before what is long: a call may have no room for both.
        untold = (longer or frozenset()) - told.keys()
        due = [*untold, *self._unread, *self._turn()]
        starts = {request_id: self._cursors[request_id] for request_id in due}
        if not starts:
            return
        self._unread.difference_update(starts)
        is_seen = await self._read(starts)
        self._is_all_due = False
        if untold and not is_seen:
            # Told of, but not to be seen yet: replicas have not confirmed it.
            await asyncio.sleep(UNSEEN_SECONDS)

    def _turn(self) -> list[str]:
        """Logs whose turn it is to be read without any news."""
        now = asyncio.get_running_loop().time()
        if self._is_all_due:
            self._turn_s = now
            self._in_turn.clear()
            return list(self._cursors)
        if now <= self._turn_s + WAIT_SECONDS:
            return []
        self._turn_s = now
        self._in_turn = self._in_turn or list(self._cursors)
        many = max(READ_MAX, math.ceil(len(self._cursors) * WAIT_SECONDS / TURNS_SECONDS))
        taken = self._in_turn[-many:]
        del self._in_turn[-many:]
        return [request_id for request_id in taken if request_id in self._cursors]

    async def _read(self, starts: Mapping[str, int]) -> bool:
        """Read these logs and deliver what is new; whether anything was."""
        is_seen = False
        for logs in batches(list(starts.items()), READ_MAX):
            parts = await self._pool.read_many(dict(logs), for_all=True)
            self._deliver(parts)
            is_seen = is_seen or bool(parts)
        return is_seen

    def _deliver(self, parts: Mapping[str, LogSlice | None]) -> None:
        for request_id, part in parts.items():
            if part is not None and part.is_cut and request_id in self._cursors:
                self._unread.add(request_id)
            for follower, cursor in list(self._reading.get(request_id, {}).items()):
                if part is None:
                    follower.fail(UnknownRequest(request_id))
                    self.forget(follower)
                # Whoever is behind what was read, or before it, gets its part by another read.
                elif 0 <= cursor - part.start <= len(part.tokens):
                    self._give(follower, request_id, _from(cursor, part))

    def _give(self, follower: Follower, request_id: str, part: LogSlice) -> None:
        if not part.tokens and part.end is None:
            return
        follower.give(request_id, part)
        cursor = part.start + len(part.tokens)
        if part.end is not None:
            self._stop_reading(follower, request_id)
        elif follower.untaken_tokens >= UNTAKEN_MAX:
            self._stop_reading(follower, request_id)
            self._paused.setdefault(follower, {})[request_id] = cursor
        else:
            self._read_on(follower, request_id, cursor)

    def _read_on(self, follower: Follower, request_id: str, cursor: int) -> None:
        reading = self._reading.setdefault(request_id, {})
        reading[follower] = cursor
        self._cursors[request_id] = min(reading.values())

    def _stop_reading(self, follower: Follower, request_id: str) -> None:
        reading = self._reading.get(request_id, {})
        reading.pop(follower, None)
        if reading:
            self._cursors[request_id] = min(reading.values())
        else:
            self._reading.pop(request_id, None)
            self._cursors.pop(request_id, None)
            self._unread.discard(request_id)


def _from(cursor: int, part: LogSlice) -> LogSlice:
    """What of a part begins at `cursor`."""
    if cursor == part.start:
        return part
    return LogSlice(cursor, part.tokens[cursor - part.start :], part.end)
