"""Hints: notifications of the pool, and the tasks of this process that wait for them.

Hints are not the truth: the log is. When a connection breaks, `wake_all` makes every waiter poll. A message that is
lost without a broken connection costs at most the poll interval: every wait returns by then, and its caller polls as it
sees fit.

The cost of a message does not depend on the number of logs that are read. A message may contain the entries themselves:
then nobody needs to read them, because they equal those of the log.
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
"""Logs without a reader here whose lengths are kept: a new reader must not miss what was published just before."""


@dataclass(slots=True)
class _LogTail:
    """The last entries of a log as commit.lua publishes them: token ids, then perhaps the reason of the end."""

    start: int
    entries: list[str]  # empty if only the length is known

    @property
    def length(self) -> int:
        """The number of entries of the whole log."""
        return self.start + len(self.entries)


class LogNews:
    """Hints about the logs that one task reads, kept until the task has read them.

    Args:
        cursors: request id to the number of entries (tokens and end) already read from its log; consulted at each wait.
    """

    def __init__(self, cursors: Mapping[str, int], poll_s: float) -> None:
        self._cursors = cursors
        self._poll_s = poll_s
        self._tails: dict[str, _LogTail] = {}  # of the logs that are longer than their cursor
        self._others: OrderedDict[str, int] = OrderedDict()  # lengths of logs without a cursor, the latest last
        self._is_missing = True  # messages may have been missed
        self._is_wait_over = False
        self._woken: asyncio.Future[None] | None = None

    async def wait(self, timeout_s: float) -> frozenset[str] | None:
        """Return when a log is known to be longer than its cursor, when `end_wait` was called, or after `timeout_s`.

        Returns: the logs known to be longer; None if messages may have been missed, so that any log may be longer. It
            is a hint and not the truth: it may come early and leave some out. Polling again is always right.
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
        """End the wait in progress, or the next one."""
        self._is_wait_over = True
        _wake(self._woken)

    def slice(self, request_id: str) -> LogSlice | None:
        """Return the known entries of a log that `wait` returned, at least all after its cursor.

        Returns: None if the entries after the cursor are not known: read the log.
        """
        tail = self._tails[request_id]
        if self._cursors[request_id] < tail.start:
            return None
        *tokens, last = tail.entries
        if last[:1].isdecimal():
            return LogSlice(tail.start, tuple(map(_token, tail.entries)), None)
        end = End(FinishReason(last), tail.start + len(tokens))
        return LogSlice(tail.start, tuple(map(_token, tokens)), end)

    def publish(self, request_id: str, length: int, content: str = "") -> None:
        """Record that a log has `length` entries now. Args: content: the last of them, if the message has any."""
        cursor = self._cursors.get(request_id)
        if cursor is None:
            self._others[request_id] = length
            self._others.move_to_end(request_id)
            if len(self._others) > _OTHERS_MAX:
                self._others.popitem(last=False)
        elif cursor < length:
            entries = content.split(",") if content else []
            tail, start = self._tails.get(request_id), length - len(entries)
            if tail is not None and tail.length == start:
                tail.entries += entries
            else:
                self._tails[request_id] = _LogTail(start, entries)
            _wake(self._woken)

    def length_before(self, request_id: str) -> int:
        """Return the length of a log that gets a cursor now, as far as it is known, and forget it."""
        return self._others.pop(request_id, 0)

    def mark_missing(self) -> None:
        """Note that messages may have been missed, and that logs may be shorter, as they may be after a fail-over."""
        self._tails.clear()
        self._others.clear()
        self._is_missing = True
        _wake(self._woken)

    def _longer(self) -> frozenset[str]:
        """Return the logs that are longer than their cursor, and forget the tails of the others."""
        longer = frozenset(
            name for name, tail in self._tails.items() if self._cursors.get(name, math.inf) < tail.length
        )
        if len(longer) < len(self._tails):
            self._tails = {name: self._tails[name] for name in longer}
        return longer


def _token(entry: str) -> Token:
    """Return the token of an entry as commit.lua publishes it: "<id>" or "<id>@<cached prompt tokens>"."""
    if entry.isdecimal():
        return Token(int(entry))
    token_id, _, cached = entry.partition("@")
    return Token(int(token_id), cached_prompt_tokens=int(cached))


class Hints:
    """Passes each notification on to the tasks of this process that wait for it.

    Args: poll_s: bound on every wait, and so on the cost of a lost message.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._news: list[LogNews] = []  # few, with many logs each: a gateway waits once for all its streams
        self._for_work: dict[str, list[asyncio.Future[None]]] = {}  # by revision

    @contextlib.contextmanager
    def log_news(self, cursors: Mapping[str, int]) -> Iterator[LogNews]:
        """See RequestPool.log_news."""
        news = LogNews(cursors, self._poll_s)
        self._news.append(news)
        try:
            yield news
        finally:
            self._news.remove(news)

    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        """Return when `publish_work` was called for the revision, after `timeout_s`, or after the poll interval."""
        waiters = self._for_work.setdefault(revision, [])
        with _alarm(min(timeout_s, self._poll_s)) as woken:
            waiters.append(woken)
            try:
                await woken
            finally:
                waiters.remove(woken)
                if not waiters:
                    del self._for_work[revision]

    def publish_log(self, request_id: str, length: int, content: str = "") -> None:
        """Publish that a log has `length` entries now. Args: content: the last of them, if the message has any."""
        for news in self._news:
            news.publish(request_id, length, content)

    def publish_work(self, revision: str) -> None:
        """Publish that a request of this revision was queued or given back."""
        for woken in self._for_work.get(revision, ()):
            _wake(woken)

    def wake_all(self) -> None:
        """Wake every waiter to poll: messages may have been missed."""
        for news in self._news:
            news.mark_missing()
        for waiters in self._for_work.values():
            for woken in waiters:
                _wake(woken)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator["asyncio.Future[None]"]:
    """Make a future that `_wake` completes, or a timer after some seconds."""
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
