"""Who waits for news of the pool, and what woke them.

Notifications are hints: the log is the truth. A connection that breaks is told of (`wake_all`), and everybody looks.
For a message that is lost without that, every wait returns by the poll interval, and the caller looks as it sees fit.

What a message costs does not depend on how many logs are read. One may bring the entries themselves: then they need not
be read, as they are what the log has.
"""

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orca.core.domain.request import End, FinishReason, Token
from orca.pool.records import LogSlice

_OTHERS_MAX = 20_000
"""Logs of others that are remembered: who begins to read one must not miss what was told of it just before."""


@dataclass(slots=True)
class _Told:
    """The last entries of a log, as commit.lua tells them. None where only its length is known."""

    start: int
    words: list[str]

    @property
    def entries(self) -> int:
        """Of the whole log."""
        return self.start + len(self.words)


class LogNews:
    """What is told of the logs that one task reads, kept until it has read them.

    Args:
        cursors: request id to the entries (tokens and end) that were read of its log; looked at anew each time.
    """

    def __init__(self, cursors: Mapping[str, int], poll_s: float) -> None:
        self._cursors = cursors
        self._poll_s = poll_s
        self._told: dict[str, _Told] = {}  # of the logs that are longer than what was read of them
        self._others: OrderedDict[str, int] = OrderedDict()  # entries of logs that nobody reads here, the latest last
        self._is_missing = True  # messages may have been missed
        self._is_wait_over = False
        self._woken: asyncio.Future[None] | None = None

    async def wait(self, timeout_s: float) -> frozenset[str] | None:
        """Return when a log is known to be longer than its cursor, when `end_wait` says so, or in time.

        Returns: the logs known to be longer; None when messages may have been missed and each log may be longer. A
            hint, not truth: it may return early and leave some out. Asking again is always right.
        """
        if not (self._is_missing or self._is_wait_over or self._longer()):
            with _alarm(min(timeout_s, self._poll_s)) as self._woken:
                await self._woken
        self._is_wait_over = False
        if self._is_missing:
            self._is_missing = False
            return None
        return self._longer()

    def end_wait(self) -> None:
        """Let the wait return that is under way, or the next one."""
        self._is_wait_over = True
        _wake(self._woken)

    def slice(self, request_id: str) -> LogSlice | None:
        """All that a log which `wait` returned has behind its cursor, and perhaps before it; None: it is to be read."""
        told = self._told[request_id]
        if self._cursors[request_id] < told.start:
            return None
        *tokens, last = told.words
        if last.isdecimal():
            return LogSlice(told.start, tuple(Token(int(word)) for word in told.words), None)
        end = End(FinishReason(last), told.start + len(tokens))
        return LogSlice(told.start, tuple(Token(int(word)) for word in tokens), end)

    def tell(self, request_id: str, entries: int, content: str = "") -> None:
        """A log has this many entries now, and these are the last ones, if any are told."""
        cursor = self._cursors.get(request_id)
        if cursor is None:
            self._others[request_id] = entries
            self._others.move_to_end(request_id)
            if len(self._others) > _OTHERS_MAX:
                self._others.popitem(last=False)
        elif cursor < entries:
            words = content.split(",") if content else []
            told, start = self._told.get(request_id), entries - len(words)
            if told is not None and told.entries == start:
                told.words += words
            else:
                self._told[request_id] = _Told(start, words)
            _wake(self._woken)

    def told_before(self, request_id: str) -> int:
        """The entries that a log has that is read from now on, as far as is known."""
        return self._others.pop(request_id, 0)

    def miss(self) -> None:
        """Messages may have been missed, and after a fail-over lengths may be less."""
        self._told.clear()
        self._others.clear()
        self._is_missing = True
        _wake(self._woken)

    def _longer(self) -> frozenset[str]:
        longer = frozenset(
            each for each, told in self._told.items() if self._cursors.get(each, math.inf) < told.entries
        )
        if len(longer) < len(self._told):
            self._told = {each: self._told[each] for each in longer}
        return longer


class Hints:
    """Takes what is told, for all who wait in this process.

    Args: poll_s: what a lost message may cost.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._news: list[LogNews] = []  # few, with many logs each: a gateway waits once for all its streams
        self._for_work: dict[str, list[asyncio.Future[None]]] = {}  # by revision

    @contextlib.contextmanager
    def log_news(self, cursors: Mapping[str, int]) -> Iterator[LogNews]:
        """As Pool.log_news."""
        news = LogNews(cursors, self._poll_s)
        self._news.append(news)
        try:
            yield news
        finally:
            self._news.remove(news)

    async def work(self, revision: str, timeout_s: float) -> None:
        """Return when `tell_work` says that there is some, in time, or after the poll interval."""
        waiters = self._for_work.setdefault(revision, [])
        with _alarm(min(timeout_s, self._poll_s)) as woken:
            waiters.append(woken)
            try:
                await woken
            finally:
                waiters.remove(woken)
                if not waiters:
                    del self._for_work[revision]

    def tell_log(self, request_id: str, entries: int, content: str = "") -> None:
        """A log has this many entries (tokens and end) now, and these are the last ones, if any are told."""
        for news in self._news:
            news.tell(request_id, entries, content)

    def tell_work(self, revision: str) -> None:
        """A request of this revision was queued or given back."""
        for woken in self._for_work.get(revision, ()):
            _wake(woken)

    def wake_all(self) -> None:
        """Messages may have been missed: everybody looks for themselves."""
        for news in self._news:
            news.miss()
        for waiters in self._for_work.values():
            for woken in waiters:
                _wake(woken)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator["asyncio.Future[None]"]:
    """A wait for `_wake`, which comes by itself after some seconds."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, _wake, woken)
    try:
        yield woken
    finally:
        timer.cancel()


def _wake(woken: "asyncio.Future[None] | None") -> None:
    if woken is not None and not woken.done():
        woken.set_result(None)
