"""Waiting for news: woken by what happened, soon after what was lost, on one connection for all."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from orca.core.domain.request import FinishReason
from orca.pool.hints import Hints, LogNews
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.subscription import Subscription
from orca.pool.redis.transitions import Transition
from orca.pool.schemas import SCHEMAS
from support.pool.beds import (
    REVISION,
    SETTINGS,
    Bed,
    MemoryBed,
    RedisBed,
    Scheduler,
    connections,
    entry,
    started,
    submission,
    with_settings,
)
from support.pool.kinds import KINDS, redis_binary
from support.waiting import until

LONG_S = 60.0


@pytest.fixture(params=["memory", "redis-6.2", "redis-7"])
async def bed(request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedRedis]) -> AsyncIterator[Bed]:
    # No polling: what wakes here is the hint itself.
    settings = with_settings(hint_poll_ms=1_000_000)
    made = MemoryBed(settings) if request.param == "memory" else RedisBed(servers(request.param).url, settings)
    yield made
    await made.close()


async def listening(bed: Bed) -> None:
    """Wait until the process is subscribed, so that what follows cannot be missed."""
    if isinstance(bed, RedisBed) and not bed.is_listening:
        bed.is_listening = True
        async with asyncio.timeout(10):
            with begun(bed.pool.log_news({})) as news:
                await news.wait(LONG_S)  # the subscription's confirmation wakes everybody


@contextlib.contextmanager
def begun(opened: contextlib.AbstractContextManager[LogNews]) -> Iterator[LogNews]:
    """News of a reader that has read all logs once."""
    with opened as news:
        news._is_missing = False
        yield news


async def woken_by(bed: Bed, request_id: str, seen: int, event: Callable[[], object]) -> frozenset[str] | None:
    await listening(bed)
    with begun(bed.pool.log_news({request_id: seen})) as news:
        waiter = asyncio.create_task(news.wait(LONG_S))
        await asyncio.sleep(0)
        await event()  # type: ignore[misc]
        async with asyncio.timeout(10):
            return await waiter


async def test_a_commit_wakes_the_waiters_of_its_log(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    names = await woken_by(bed, "a.0", 0, lambda: bed.pool.commit([entry(owned["a.0"], 0, 5)]))
    assert names == {"a.0"}


async def test_every_kind_of_end_wakes_the_waiters(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b", "c", deadline_ms=60_000)
    await bed.pass_deadlines(60_000)
    await woken_by(bed, "a.0", 0, lambda: bed.pool.cancel("a"))
    step = [entry(owned["b.0"], 0, 5, end=FinishReason.STOP)]
    await woken_by(bed, "b.0", 1, lambda: bed.pool.commit(step))
    await woken_by(bed, "c.0", 0, lambda: bed.pool.sweep())


async def test_a_wait_for_earlier_news_returns_at_once(bed: Bed) -> None:
    """And for as long as they were not read."""
    _, owned = await started(bed, "a")
    await listening(bed)
    cursors = {"a.0": 0}
    with begun(bed.pool.log_news(cursors)) as news:
        await bed.pool.commit([entry(owned["a.0"], 0, 5)])
        async with asyncio.timeout(10):
            assert [await news.wait(LONG_S) for _ in range(2)] == [{"a.0"}, {"a.0"}]
            cursors["a.0"] = 1
            assert await news.wait(0.0) == frozenset()


async def test_a_wait_without_news_ends_at_its_timeout(bed: Bed) -> None:
    await started(bed, "a")
    await listening(bed)
    async with asyncio.timeout(10):
        with begun(bed.pool.log_news({"a.0": 0})) as news:
            assert await news.wait(0.02) == frozenset()
        await bed.pool.wait_for_work(REVISION, 0.02)


async def test_a_woken_scheduler_finds_the_new_request(bed: Bed) -> None:
    await started(bed)
    scheduler = Scheduler(bed, "p2", "g2")
    await scheduler.enter()
    await listening(bed)
    waiter = asyncio.create_task(bed.pool.wait_for_work(REVISION, LONG_S))
    await asyncio.sleep(0)
    await bed.pool.submit(submission("a"))
    async with asyncio.timeout(10):
        await waiter
    assert list(await scheduler.take()) == ["a.0"]


async def test_a_waiter_for_work_alone_keeps_no_hints_of_logs(redis_bed: RedisBed) -> None:
    """Each token of the deployment is told of, and a scheduler reads none of them."""
    _, owned = await started(redis_bed, "a")
    with begun(redis_bed.pool._hints.log_news({"a.0": 0})) as news:
        await redis_bed.pool.wait_for_work(REVISION, LONG_S)  # the subscription's confirmation wakes everybody
        await news.wait(LONG_S)
        await redis_bed.pool.commit([entry(owned["a.0"], 0, 5)])
        waiter = asyncio.create_task(redis_bed.pool.wait_for_work(REVISION, LONG_S))
        await asyncio.sleep(0)
        await redis_bed.pool.submit(submission("b"))
        async with asyncio.timeout(10):
            await waiter
        assert await news.wait(0.0) == frozenset()


async def test_a_returned_request_wakes_an_idle_scheduler(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    await listening(bed)
    waiter = asyncio.create_task(bed.pool.wait_for_work(REVISION, LONG_S))
    await asyncio.sleep(0)
    await bed.pool.leave(scheduler.caller)
    async with asyncio.timeout(10):
        await waiter


async def test_hundreds_of_waiters_share_one_connection(redis_bed: RedisBed) -> None:
    _, owned = await started(redis_bed, "a")
    before = len(await redis_bed.redis.client_list())
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(begun(redis_bed.pool.log_news({"a.0": 0}))) for _ in range(300)]
        waiters = [asyncio.create_task(news.wait(LONG_S)) for news in readers]
        await asyncio.sleep(0)
        await redis_bed.pool.commit([entry(owned["a.0"], 0, 5)])
        async with asyncio.timeout(10):
            await asyncio.gather(*waiters)
    assert len(await redis_bed.redis.client_list()) <= before + 1


async def test_a_broken_subscription_is_restored_and_wakes_all_waiters(redis_bed: RedisBed) -> None:
    await started(redis_bed, "a")
    await listening(redis_bed)
    with begun(redis_bed.pool.log_news({"a.0": 0})) as news:
        waiter = asyncio.create_task(news.wait(LONG_S))
        await asyncio.sleep(0)
        await redis_bed.redis.client_kill_filter(_type="pubsub")
        async with asyncio.timeout(10):
            assert await waiter is None
    async with asyncio.timeout(10):
        await woken_by(redis_bed, "a.0", 0, lambda: redis_bed.pool.cancel("a"))


async def test_a_silent_subscription_is_reopened_and_logged_once(
    own_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "orca.pool.redis.subscription")
    hints = Hints(poll_s=LONG_S)
    async with (
        silenced_proxy(own_redis.url) as (url, silence),
        Redis.from_url(own_redis.url) as direct,
        asyncio.timeout(40),
    ):
        subscription = Subscription(connections(url), "news", hints, connect_s=30, quiet_s=1.0)
        with begun(hints.log_news({"a.0": 0})) as news:
            subscription.start(for_logs=True)
            assert await news.wait(LONG_S) is None
            silence()
            while "notifications of the pool are back" not in caplog.messages:
                assert await news.wait(LONG_S) is None  # woken by the break and by the new subscription
            await direct.publish("news", "a.0 1")
            assert await news.wait(LONG_S) == {"a.0"}
        await subscription.stop()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "notifications of the pool are interrupted, readers poll",
        "notifications of the pool are back",
    ]


async def test_a_quiet_link_that_answers_is_kept(own_redis: EmbeddedRedis) -> None:
    hints = Hints(poll_s=LONG_S)
    async with Redis.from_url(own_redis.url) as direct, asyncio.timeout(40):
        subscription = Subscription(connections(own_redis.url), "news", hints, quiet_s=1.0)
        with begun(hints.log_news({})) as news:
            subscription.start(for_logs=True)
            await news.wait(LONG_S)
        [before] = await direct.client_list("pubsub")
        await direct.config_resetstat()
        await until(lambda: has_pinged_twice(direct), limit_s=30)
        [after] = await direct.client_list("pubsub")
        assert before["id"] == after["id"]
        await subscription.stop()


async def has_pinged_twice(redis: Redis) -> bool:
    return bool((await redis.info("commandstats")).get("cmdstat_ping", {"calls": 0})["calls"] >= 2)


@contextlib.asynccontextmanager
async def silenced_proxy(unix_url: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A way to a Redis on loopback, and a call by which its links so far carry nothing any more, without a word."""
    silent, links = set[asyncio.Task[None]](), set[asyncio.Task[None]]()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        links.add(task)
        while data := await source.read(65_536):
            if task not in silent:
                target.write(data)
        target.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = unix_url.removeprefix("unix://").partition("?")[0]
        from_redis, to_redis = await asyncio.open_unix_connection(path)
        await asyncio.gather(*map(asyncio.create_task, (pump(reader, to_redis), pump(from_redis, writer))))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"redis://127.0.0.1:{port}/0", lambda: silent.update(links)
    finally:
        server.close()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_a_hint_of_a_commit_has_the_entries_that_a_read_returns(kind: str, tmp_path: Path) -> None:
    """This Redis never has an fsync in flight when it answers; during one it would publish nothing."""
    with EmbeddedRedis(tmp_path, binary=redis_binary(kind), fsync="always") as server:
        bed = RedisBed(server.url, SETTINGS)
        _, owned = await started(bed, "a", "b")
        await listening(bed)
        cursors = {"a.0": 0, "b.0": 0}
        with begun(bed.pool.log_news(cursors)) as news:
            async with asyncio.timeout(10):
                await bed.pool.commit([entry(owned["a.0"], 0, 5, 6), entry(owned["b.0"], 0, 7)])
                await bed.pool.commit([entry(owned["a.0"], 2, 8, end=FinishReason.LENGTH)])
                while await news.wait(LONG_S) != {"a.0", "b.0"} or news.slice("a.0").end is None:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
            assert {each: news.slice(each) for each in cursors} == await bed.pool.read_many(cursors)
        await bed.close()


async def test_entries_that_are_not_yet_durable_are_not_published(redis_bed: RedisBed) -> None:
    """A kill could take it back; a read waits until it is written."""
    _, owned = await started(redis_bed, "a")
    await listening(redis_bed)
    script = redis_bed.pool._link._transitions["commit"]
    text = script.text.replace("'aof_pending_bio_fsync:[1-9]'", "'aof_pending_bio_fsync:%d'")
    assert text != script.text
    syncing = Transition("commit", SCHEMAS)
    syncing.text, syncing.sha = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    redis_bed.pool._link._transitions = {**redis_bed.pool._link._transitions, "commit": syncing}
    with begun(redis_bed.pool.log_news({"a.0": 0})) as news:
        async with asyncio.timeout(10):
            await redis_bed.pool.commit([entry(owned["a.0"], 0, 5)])
            assert await news.wait(LONG_S) == {"a.0"}
        assert news.slice("a.0") is None
