"""The one reader of all logs: few pool calls, no lost or repeated token, no unbounded buffer."""

import asyncio
import contextlib
from collections import UserDict
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.errors import PoolUnavailable, UnknownRequest
from orca.core.domain.request import End, FinishReason, Token
from orca.gateway.answer.log_watcher import (
    READ_MAX,
    ROUND_SECONDS,
    UNTAKEN_MAX,
    WAIT_SECONDS,
    LogSubscription,
    LogWatcher,
)
from orca.gateway.settings import GatewaySettings
from orca.pool.contract import FORGOTTEN_FOR_MS
from orca.pool.hints import Hints, LogNews
from orca.pool.records import LogSlice
from support.gateway.gateway_rig import ids, until

LIMIT_S = 60.0


class FakeLogs:
    """The two calls that a watcher makes, over plain lists."""

    def __init__(self) -> None:
        self.logs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.lost: set[str] = set()  # records that the pool has forgotten
        self.is_away = False
        self.limit = 1024
        self.untold: set[str] = set()  # logs whose hints are lost
        self.read: list[set[str]] = []
        self.hints = Hints(poll_s=LIMIT_S)

    def add(self, request_id: str, *tokens: int, ends: bool = False) -> None:
        self.logs.setdefault(request_id, []).extend(tokens)
        if ends:
            self.ended.add(request_id)
        if request_id not in self.untold:
            self.hints.publish_log(request_id, len(self.logs[request_id]) + ends)

    def log_news(self, cursors: Mapping[str, int]) -> contextlib.AbstractContextManager[LogNews]:
        return self.hints.log_news(cursors)

    async def read_many(self, starts: Mapping[str, int], *, for_all: bool) -> dict[str, LogSlice | None]:
        assert for_all, "a watcher's read waits for no client"
        self.read.append(set(starts))
        if self.is_away:
            raise PoolUnavailable("away")
        return {**self._parts(starts), **dict.fromkeys(self.lost & set(starts))}

    def _parts(self, starts: Mapping[str, int]) -> dict[str, LogSlice]:
        parts = {}
        for request_id, start in starts.items():
            log = self.logs.get(request_id, [])
            tokens = tuple(map(Token, log[start : start + self.limit]))
            has_all = start + len(tokens) == len(log)
            is_end = request_id in self.ended and has_all
            if tokens or is_end:
                end = End(FinishReason.LENGTH, len(log)) if is_end else None
                parts[request_id] = LogSlice(start, tokens, end, is_cut=not has_all)
        return parts


@contextlib.asynccontextmanager
async def watching(logs: FakeLogs) -> AsyncIterator[LogWatcher]:
    watcher = LogWatcher(logs)  # type: ignore[arg-type]
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def read_all(subscription: LogSubscription, count: int) -> dict[str, list[int]]:
    """Everything until `count` logs have ended."""
    found: dict[str, list[int]] = {}
    ends = 0
    while ends < count:
        parts = await asyncio.wait_for(subscription.next(), LIMIT_S)
        assert parts
        for request_id, part in parts:
            log = found.setdefault(request_id, [])
            assert part.start == len(log)
            log.extend(token.id for token in part.tokens)
            ends += part.end is not None
    return found


async def test_one_step_of_many_streams_costs_one_read() -> None:
    logs = FakeLogs()
    async with watching(logs) as watcher:
        subscriptions = [watcher.subscribe([f"r{i}"]) for i in range(200)]
        await until(lambda: logs.read)
        for step in range(3):
            logs.read.clear()
            for i in range(200):
                logs.add(f"r{i}", step)
            for subscription in subscriptions:
                await asyncio.wait_for(subscription.next(), LIMIT_S)
            assert len(logs.read) == 1


async def test_only_logs_with_new_entries_are_read_for_any_number_of_waiting_logs() -> None:
    logs = FakeLogs()
    async with watching(logs) as watcher:
        running = watcher.subscribe(["running"])
        for i in range(200):
            watcher.subscribe([f"waiting{i}"])
        logs.add("running", 0)
        await asyncio.wait_for(running.next(), LIMIT_S)
        logs.read.clear()
        logs.add("running", 1)
        await asyncio.wait_for(running.next(), LIMIT_S)
        assert logs.read[0] == {"running"}


async def test_new_logs_are_not_read_before_a_hint() -> None:
    logs = FakeLogs()
    async with watching(logs) as watcher:
        watcher.subscribe(["first"])
        await until(lambda: logs.read)
        logs.read.clear()
        logs.add("told", 1)  # before its reader is known
        told, quiet = watcher.subscribe(["told"], are_new=True), watcher.subscribe(["quiet"], are_new=True)
        assert await asyncio.wait_for(told.next(), LIMIT_S)
        assert logs.read == [{"told"}]
        logs.add("quiet", 2)
        assert await asyncio.wait_for(quiet.next(), LIMIT_S)


async def test_a_hint_for_one_log_costs_the_same_for_any_number_of_waiting_logs() -> None:
    class Cursors(UserDict[str, int]):
        """A log that counts its reads of any kind."""

        looked = 0

        def __getitem__(self, key: str) -> int:
            self.looked += 1
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            self.looked += 1
            return super().__contains__(key)

        def __iter__(self) -> Iterator[str]:
            self.looked += len(self)
            return super().__iter__()

    logs = FakeLogs()
    watcher = LogWatcher(logs)  # type: ignore[arg-type]
    watcher._cursors = cursors = Cursors()  # type: ignore[assignment]
    task = asyncio.create_task(watcher.run())
    try:
        running, _ = watcher.subscribe(["running"]), watcher.subscribe(f"waiting{i}" for i in range(20_000))
        await until(lambda: len(logs.read) > 20_000 // READ_MAX)
        cursors.looked = 0
        for token in range(100):
            logs.add("running", token)
            await asyncio.wait_for(running.next(), LIMIT_S)
        assert cursors.looked < 100 * 20 + 2 * 20_000, "at most one turn was prepared meanwhile"
    finally:
        task.cancel()


async def test_no_call_reads_more_logs_than_the_bound() -> None:
    logs = FakeLogs()
    names = {f"r{i}" for i in range(2 * READ_MAX + 1)}
    async with watching(logs) as watcher:
        watcher.subscribe(names)
        await until(lambda: set().union(*logs.read) == names)
        assert max(map(len, logs.read)) == READ_MAX


async def test_a_log_whose_hints_are_lost_is_read_beside_logs_that_are_always_busy() -> None:
    logs = FakeLogs()
    logs.untold.add("untold")
    logs.add("untold", 1)
    async with watching(logs) as watcher:
        busy, untold = watcher.subscribe(["busy"]), watcher.subscribe(["untold"])
        reading = asyncio.create_task(untold.next())
        while not reading.done():
            logs.add("busy", 0)
            await asyncio.wait_for(busy.next(), LIMIT_S)
            await asyncio.sleep(0.01)
        assert reading.result()


async def test_connections_arriving_in_every_loop_iteration_do_not_starve_the_others() -> None:
    logs = FakeLogs()
    logs.add("r", 1)
    async with watching(logs) as watcher:
        reading = asyncio.create_task(watcher.subscribe(["r"]).next())
        async with asyncio.timeout(10):
            while not reading.done():
                watcher.subscribe(["passing"]).close()
                await asyncio.sleep(0)
        assert reading.result()


@given(data=st.data())
async def test_each_follower_gets_each_token_once_and_in_order(data: st.DataObject) -> None:
    logs = FakeLogs()
    logs.limit = data.draw(st.integers(1, 5))
    wanted = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4))
    async with watching(logs) as watcher:
        subscription = watcher.subscribe(f"r{i}" for i in range(len(wanted)))
        reading = asyncio.create_task(read_all(subscription, len(wanted)))
        for i, tokens in enumerate(wanted):
            for token in tokens:
                logs.add(f"r{i}", token)
                await asyncio.sleep(0)
            logs.add(f"r{i}", ends=True)
        assert await reading == {f"r{i}": tokens for i, tokens in enumerate(wanted)}


async def test_a_follower_that_joins_while_others_wait_is_read_for_at_once() -> None:
    logs = FakeLogs()
    logs.add("late", 1, ends=True)
    async with watching(logs) as watcher:
        watcher.subscribe(["early"])
        await until(lambda: logs.read == [{"early"}])
        async with asyncio.timeout(0.5):
            assert await read_all(watcher.subscribe(["late"]), 1) == {"late": [1]}


async def test_a_follower_that_stops_is_read_for_up_to_a_bound_and_later_continued() -> None:
    logs = FakeLogs()
    logs.limit = 100
    logs.add("r", *range(5000), ends=True)
    logs.add("other", 1)
    async with watching(logs) as watcher:
        slow = watcher.subscribe(["r"])
        await until(lambda: slow.untaken_tokens >= UNTAKEN_MAX)
        other = watcher.subscribe(["other"])
        assert await asyncio.wait_for(other.next(), LIMIT_S)
        assert slow.untaken_tokens < UNTAKEN_MAX + logs.limit
        assert (await read_all(slow, 1))["r"] == list(range(5000))


async def test_followers_of_one_log_each_get_all_of_it_whenever_they_join() -> None:
    logs = FakeLogs()
    logs.limit = 3
    async with watching(logs) as watcher:
        early = watcher.subscribe(["r"])
        logs.add("r", 0, 1, 2, 3)
        first = await asyncio.wait_for(early.next(), LIMIT_S)
        late, leaving = watcher.subscribe(["r"]), watcher.subscribe(["r"])
        leaving.close()
        logs.add("r", 4, ends=True)
        assert (await read_all(late, 1))["r"] == [0, 1, 2, 3, 4]
        assert first
        seen = [token.id for _, part in first for token in part.tokens]
        while len(seen) < 5:
            seen += [token.id for _, part in await early.next() or () for token in part.tokens]
        assert seen == [0, 1, 2, 3, 4]


async def test_a_waiting_follower_does_not_delay_another_of_its_log() -> None:
    logs = FakeLogs()
    logs.limit = 100
    logs.add("r", *range(3000), ends=True)
    async with watching(logs) as watcher:
        slow, fast = watcher.subscribe(["r"]), watcher.subscribe(["r"])
        assert (await read_all(fast, 1))["r"] == list(range(3000))
        assert slow.untaken_tokens < UNTAKEN_MAX + logs.limit
        assert (await read_all(slow, 1))["r"] == list(range(3000))


async def test_a_closed_follower_wakes_without_entries_and_is_no_longer_read_for() -> None:
    logs = FakeLogs()
    async with watching(logs) as watcher:
        subscription = watcher.subscribe(["r"])
        waiting = asyncio.create_task(subscription.next())
        await until(lambda: logs.read)
        subscription.close()
        assert await waiting is None
        logs.add("r", 1)
        watcher.subscribe(["s"])
        logs.add("s", 1)
        await until(lambda: {"s"} in logs.read)
        assert subscription.untaken_tokens == 0


async def test_an_outage_is_waited_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    logs = FakeLogs()
    async with watching(logs) as watcher:
        subscription = watcher.subscribe(["r"])
        logs.add("r", 1)
        assert await asyncio.wait_for(subscription.next(), LIMIT_S)
        logs.is_away = True
        logs.add("r", 2)
        before = len(logs.read)
        await until(lambda: len(logs.read) > before + 2)
        logs.is_away = False
        logs.add("r", 3, ends=True)
        parts = await asyncio.wait_for(subscription.next(), LIMIT_S)
        assert parts
        assert [token.id for _, part in parts for token in part.tokens] == [2, 3]
    assert [record.message for record in caplog.records] == ["pool away, streams wait: away", "pool back"]


async def test_a_long_log_without_hints_is_read_on_without_waiting() -> None:
    logs = FakeLogs()
    logs.limit = 100
    logs.untold = {"long"}
    logs.add("long", *range(3000), ends=True)
    async with watching(logs) as watcher:
        async with asyncio.timeout(20):  # the 30 parts would come a second apart
            assert await read_all(watcher.subscribe(["long"]), 1) == {"long": list(range(3000))}
        assert watcher._unread == set()


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_the_followers_of_a_lost_record_fail_whether_an_outage_was_noticed_or_not(is_noticed: bool) -> None:
    logs = FakeLogs()
    async with watching(logs) as watcher:
        lost, kept = watcher.subscribe(["lost"]), watcher.subscribe(["kept"])
        logs.is_away = is_noticed
        await until(lambda: len(logs.read) > 1)
        logs.lost.add("lost")
        logs.is_away = False
        with pytest.raises(UnknownRequest):
            await asyncio.wait_for(lost.next(), LIMIT_S)
        logs.add("kept", 1)
        assert await asyncio.wait_for(kept.next(), LIMIT_S)


async def test_a_paused_follower_of_a_lost_record_fails_after_its_delivered_entries() -> None:
    logs = FakeLogs()
    logs.add("r", *range(3000))
    async with watching(logs) as watcher:
        slow = watcher.subscribe(["r"])
        await until(lambda: slow.untaken_tokens >= UNTAKEN_MAX)
        logs.lost.add("r")
        assert await slow.next()
        with pytest.raises(UnknownRequest):
            await asyncio.wait_for(slow.next(), LIMIT_S)


async def test_a_bug_in_the_pool_does_not_end_the_watcher(caplog: pytest.LogCaptureFixture) -> None:
    logs = FakeLogs()
    broken = iter([ZeroDivisionError()])
    read_many = logs.read_many

    async def once_broken(starts: Mapping[str, int], *, for_all: bool) -> dict[str, LogSlice | None]:
        for error in broken:
            raise error
        return await read_many(starts, for_all=for_all)

    logs.read_many = once_broken  # type: ignore[method-assign]
    logs.add("r", *ids("a"), ends=True)
    async with watching(logs) as watcher:
        assert await read_all(watcher.subscribe(["r"]), 1) == {"r": list(ids("a"))}
    assert "reading logs failed" in caplog.text


async def test_entries_in_a_hint_are_delivered_without_a_read() -> None:
    logs = FakeLogs()
    async with watching(logs) as watcher:
        first, second = watcher.subscribe(["a"]), watcher.subscribe(["a"])
        await until(lambda: logs.read)
        logs.logs["a"] = [3, 4]
        logs.ended.add("a")
        logs.read.clear()
        logs.hints.publish_log("a", 2, "3,4")
        logs.hints.publish_log("a", 3, "length")
        assert [await read_all(each, 1) for each in (first, second)] == [{"a": [3, 4]}] * 2
        assert not logs.read


def test_each_reader_has_noticed_that_a_log_is_gone_before_its_name_is_free_again() -> None:
    # A log that came just after a round began is read at the end of the next one.
    assert FORGOTTEN_FOR_MS > 2_000 * (ROUND_SECONDS + WAIT_SECONDS)
    assert GatewaySettings(model="tiny").unread_seconds_max * 1_000 <= FORGOTTEN_FOR_MS
