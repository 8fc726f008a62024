"""An answer of Redis is released when its append-only file is known to be written."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.pool.redis.durability import AppendOnlyFileState, FsyncWatcher

SYNCING = AppendOnlyFileState(run="a", is_syncing=True, can_write=True, bytes_written=100, base_bytes=10)
LIMIT_S = 20.0


class Server:
    """Stands for a Redis that is asked: it gives these answers, the last one again and again."""

    def __init__(self, *states: AppendOnlyFileState | Exception, timeout_s: float = LIMIT_S) -> None:
        self.states = list(states)
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.settling = FsyncWatcher(self.ask, timeout_s)

    async def ask(self) -> AppendOnlyFileState:
        self.asked += 1
        state = self.states[min(self.asked, len(self.states)) - 1]
        await self.may_answer.wait()
        if isinstance(state, Exception):
            raise state
        return state

    async def settle_many(self, count: int) -> Sequence[BaseException | None]:
        return await asyncio.gather(
            *(self.settling.wait_until_written("a") for _ in range(count)), return_exceptions=True
        )


def test_the_durability_state_is_read_from_redis_info() -> None:
    said = {"run_id": "a", "aof_last_write_status": "ok", "aof_current_size": 100, "aof_base_size": 10}
    assert AppendOnlyFileState.of(said | {"aof_pending_bio_fsync": 1}) == SYNCING


def test_without_an_append_only_file_no_answer_is_held_back() -> None:
    state = AppendOnlyFileState.of({"run_id": "a", "aof_last_write_status": "ok"})
    assert state.has_all_before(state)


@pytest.mark.parametrize(
    ("now", "questions"),
    [
        pytest.param(replace(SYNCING, is_syncing=False), 3, id="the fsync has ended"),
        pytest.param(replace(SYNCING, bytes_written=101), 3, id="the file has grown"),
    ],
)
async def test_an_answer_is_durable_once_redis_has_written(now: AppendOnlyFileState, questions: int) -> None:
    server = Server(SYNCING, SYNCING, now)
    await server.settling.wait_until_written("a")
    assert server.asked == questions


async def test_one_poll_is_enough_when_the_fsync_ended_before_it() -> None:
    server = Server(replace(SYNCING, is_syncing=False))
    await server.settling.wait_until_written("a")
    assert server.asked == 1


async def test_another_file_size_after_a_rewrite_proves_nothing() -> None:
    rewritten = replace(SYNCING, bytes_written=200, base_bytes=200)
    server = Server(SYNCING, rewritten, rewritten, replace(rewritten, bytes_written=201))
    await server.settling.wait_until_written("a")
    assert server.asked == 4


@pytest.mark.parametrize("change", [{"is_syncing": False}, {"bytes_written": 101}], ids=["no fsync", "grown"])
async def test_a_redis_that_cannot_write_makes_nothing_durable(change: dict[str, int]) -> None:
    well = replace(SYNCING, is_syncing=False)
    server = Server(SYNCING, replace(SYNCING, can_write=False, **change), well)
    await server.settling.wait_until_written("a")
    assert server.asked == 3


async def test_the_state_of_another_redis_run_is_no_proof() -> None:
    server = Server(SYNCING, replace(SYNCING, run="b", is_syncing=False))
    with pytest.raises(PoolUnavailable, match="restarted"):
        await server.settling.wait_until_written("a")


async def test_a_write_that_is_not_durable_in_time_is_an_outage() -> None:
    with pytest.raises(PoolUnavailable, match="in time"):
        await Server(SYNCING, timeout_s=0.05).settling.wait_until_written("a")


async def test_all_waiters_share_a_poll() -> None:
    server = Server(SYNCING, replace(SYNCING, is_syncing=False))
    assert await server.settle_many(100) == [None] * 100
    assert server.asked == 2


async def test_a_poll_that_was_sent_earlier_proves_nothing() -> None:
    server = Server(replace(SYNCING, is_syncing=False))
    server.may_answer.clear()
    early = asyncio.create_task(server.settling.wait_until_written("a"))
    async with asyncio.timeout(LIMIT_S):
        while not server.asked:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(server.settling.wait_until_written("a"))
        await asyncio.sleep(0)
        server.may_answer.set()
        await asyncio.gather(early, late)
    assert server.asked == 2


async def test_a_failed_poll_fails_all_present_waiters_and_no_later_ones() -> None:
    server = Server(PoolUnavailable("away"), replace(SYNCING, is_syncing=False))
    assert [str(error) for error in await server.settle_many(3)] == ["away"] * 3
    await server.settling.wait_until_written("a")


async def test_a_cancelled_waiter_does_not_affect_the_others() -> None:
    server = Server(replace(SYNCING, is_syncing=False))
    one, other = (asyncio.create_task(server.settling.wait_until_written("a")) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait_for(other, LIMIT_S)
    assert one.cancelled()


async def test_nothing_is_polled_after_close() -> None:
    server = Server(SYNCING)
    waiting = asyncio.create_task(server.settling.wait_until_written("a"))
    await asyncio.sleep(0)
    await server.settling.close()
    waiting.cancel()
    assert server.asked == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "pool-fsync"]
