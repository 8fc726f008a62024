"""Hints without a Redis: who waits, who is woken, and what is taken for known."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest
from redis.asyncio import Connection

from orca.core.domain.request import End, FinishReason, Token
from orca.pool.hints import Hints, LogNews
from orca.pool.records import LogSlice
from orca.pool.redis.subscription import Subscription
from support.pool.beds import (
    REVISION,
    SETTINGS,
)

LONG_S = 60.0


@contextlib.contextmanager
def begun(opened: contextlib.AbstractContextManager[LogNews]) -> Iterator[LogNews]:
    """News of a reader that has read all logs once."""
    with opened as news:
        news._is_missing = False
        yield news


async def test_a_lost_hint_costs_the_poll_interval_at_most() -> None:
    hints = Hints(poll_s=0.02)
    async with asyncio.timeout(10):
        with begun(hints.log_news({"a.0": 0})) as news:
            assert await news.wait(LONG_S) == frozenset()
        await hints.wait_for_work(REVISION, LONG_S)


async def test_a_new_reader_may_have_missed_any_hint() -> None:
    with Hints(poll_s=LONG_S).log_news({}) as news:
        assert await news.wait(LONG_S) is None


async def test_hints_are_dropped_after_messages_may_have_been_missed() -> None:
    hints = Hints(poll_s=0.02)
    with begun(hints.log_news({"a.0": 8})) as news:
        hints.publish_log("a.0", 9)
        hints.publish_log("b.0", 1)
        assert await news.wait(LONG_S) == {"a.0"}
        hints.wake_all()
        assert await news.wait(LONG_S) is None
        assert await news.wait(LONG_S) == frozenset()
        assert news.length_before("b.0") == 0


async def test_a_hint_just_before_its_reader_arrived_is_used() -> None:
    hints = Hints(poll_s=LONG_S)
    with begun(hints.log_news({})) as news:
        for number in range(20_100):
            hints.publish_log(f"{number}.0", 1)
        hints.publish_log("150.0", 2)
        assert [news.length_before(f"{number}.0") for number in (99, 150, 20_099)] == [0, 2, 1]


async def test_a_wait_that_is_ended_before_it_begins_returns_at_once_and_once() -> None:
    with begun(Hints(poll_s=0.05).log_news({})) as news:
        news.end_wait()
        assert await news.wait(LONG_S) == frozenset()
        start = time.monotonic()
        assert await news.wait(LONG_S) == frozenset()
        assert time.monotonic() - start > 0.04


async def test_a_cancelled_waiter_leaves_no_state() -> None:
    hints = Hints(poll_s=LONG_S)
    waiter = asyncio.create_task(hints.wait_for_work(REVISION, LONG_S))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert hints._for_work == {}
    with hints.log_news({}):
        pass
    assert hints._news == []
    assert SETTINGS.hint_poll_ms <= 1000


def test_entries_in_a_hint_are_used_only_if_they_follow_what_was_read() -> None:
    cursors = {"a.0": 2}
    hints = Hints(poll_s=LONG_S)
    with begun(hints.log_news(cursors)) as news:
        hints.publish_log("a.0", 4, "13,14")
        hints.publish_log("a.0", 6, "15,length")
        told = LogSlice(2, (Token(13), Token(14), Token(15)), End(FinishReason.LENGTH, 5))
        assert news.slice("a.0") == told
        cursors["a.0"] = 3
        assert news.slice("a.0") == told, "the reader drops what it has"


@pytest.mark.parametrize("told", [[(4, "14")], [(3, ""), (4, "14")], [(3, "13"), (5, "15")], [(3, "13"), (4, "")]])
def test_the_log_is_read_if_an_entry_had_no_hint(told: list[tuple[int, str]]) -> None:
    hints = Hints(poll_s=LONG_S)
    with begun(hints.log_news({"a.0": 2})) as news:
        for entries, content in told:
            hints.publish_log("a.0", entries, content)
        assert news.slice("a.0") is None


@pytest.mark.parametrize("uses_contents", [True, False])
async def test_entries_in_a_hint_are_used_only_if_they_are_as_durable_as_a_read(*, uses_contents: bool) -> None:
    hints = Hints(poll_s=LONG_S)
    subscription = Subscription(Connection, "news", hints, uses_contents=uses_contents)
    subscription._wants_logs = True
    with begun(hints.log_news({"a.0": 0, "b.0": 0})) as news:
        subscription._receive(b"+r1\na.0 2\n=5,6\nb.0 1")
        assert await news.wait(0.0) == {"a.0", "b.0"}
        assert news.slice("b.0") is None
        assert news.slice("a.0") == (LogSlice(0, (Token(5), Token(6)), None) if uses_contents else None)
