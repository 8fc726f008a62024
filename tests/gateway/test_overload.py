"""More calls than can be served: who is refused, how cheaply, and when they are told to come back."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from gateway_rig import Rig, error_of, recording, rig, until
from hypothesis import given
from hypothesis import strategies as st

from orca.core.errors import PoolUnavailable
from orca.core.request import Request
from orca.gateway.api_keys import ApiKey, Limits, digest, line
from orca.gateway.overload import EndRate, Overload, retry_after_seconds
from orca.gateway.settings import Settings
from orca.pool.api import PoolStats
from orca.pool.memory_pool import MemoryPool
from orca.pool.settings import PoolSettings

COMPLETIONS = "/v1/completions"
RATES = st.none() | st.floats(0.01, 1000)


def stats(*, queued: int = 0, ended_ever: int = 0, queued_max: int = 100, **fields: Any) -> PoolStats:
    rest = {"owned": 0, "ended": 0, "queued_prompt_tokens": 0, "oldest_wait_ms": 0, "bytes_reserved": 0, "bytes_max": 1}
    rest |= {"revision": None, "promised_slots": None, "groups": (), "schema": 1, "newer_records": 0}
    rest |= {"queued_prompt_tokens_max": 100}
    return PoolStats(**{**rest, **fields}, queued=queued, ended_ever=ended_ever, queued_max=queued_max)


class ToldPool(MemoryPool):
    """A pool whose counts are told by the test."""

    def __init__(self, told: PoolStats | Exception) -> None:
        super().__init__(self)
        self.told = told
        self.asked = 0

    def wall_ms(self) -> int:
        return 0

    async def stats(self) -> PoolStats:
        self.asked += 1
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def observed(*, seconds: float, queued: int, ends_per_second: float) -> Overload:
    """What a gateway knows that has looked at the pool for so long."""
    pool, clock = ToldPool(stats()), Clock()
    overload = Overload(pool, clock)
    while clock.now_s < seconds:
        clock.now_s += 0.5
        pool.told = stats(queued=queued, queued_max=10**6, ended_ever=round(clock.now_s * ends_per_second))
        await overload.check()
    return overload


@given(st.integers(0, 10**6), st.integers(0, 10**6), RATES, st.text())
def test_a_longer_queue_is_never_told_to_come_back_sooner(one: int, more: int, rate: float | None, word: str) -> None:
    sooner, later = retry_after_seconds(one, rate, word), retry_after_seconds(one + more, rate, word)
    assert 1 <= sooner <= later <= 60


def test_calls_that_are_refused_together_are_told_different_times() -> None:
    told = sorted(retry_after_seconds(400, 10, f"call-{i}") for i in range(1_000))
    assert (20 <= told[0] <= 21, 39 <= told[-1] <= 40) == (True, True)
    assert max(after - before for before, after in pairwise(told)) < 0.5
    assert retry_after_seconds(400, 10, "call-1") == retry_after_seconds(400, 10, "call-1")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(0, 5, 0), (1, 5, 10), (2, 5, 20), (4, 5, 40)], 10.0),
        ([(0, 5, 0), (1, 5, 20)], None),
        ([(0, 5, 0), (2, 5, 1), (4, 5, 2)], None),
        ([(0, 5, 0), (2, 0, 20), (4, 5, 40)], None),
        ([(0, 5, 0), (2, 5, 20), (5, 5, 50)], None),
        ([(second, 5, second if second <= 30 else 30 + 9 * (second - 30)) for second in range(61)], 9.0),
    ],
    ids=["known", "too short", "too few", "nobody waited", "unobserved", "the last half minute"],
)
def test_a_rate_is_what_ended_while_others_waited(samples: list[tuple[int, int, int]], expected: float | None) -> None:
    rate = EndRate()
    for second, queued, ended in samples:
        rate.note(second, stats(queued=queued, ended_ever=ended))
    assert rate.per_second == expected


@pytest.mark.parametrize(
    ("deadline_ms", "is_refused"), [(None, False), (1_000, True), (4_900, True), (5_100, False), (20_000, False)]
)
async def test_a_call_whose_deadline_comes_before_its_turn_is_refused(deadline_ms: int, is_refused: bool) -> None:
    overload = await observed(seconds=10, queued=100, ends_per_second=10)
    refusals = []
    try:
        overload.check_deadline(deadline_ms)
    except Exception as error:
        refusals.append((error.status, error.code, 5 <= error.retry_after_s <= 10))  # type: ignore[attr-defined]
    assert refusals == [(429, "deadline_unreachable", True)] * is_refused


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_a_deadline_that_cannot_be_met_is_refused_before_anything_is_encoded(path: str) -> None:
    async with rig(schedules=False) as one:
        one.app.state.gateway.overload = await observed(seconds=10, queued=100, ends_per_second=10)
        # Of the wrong kind: it would be refused when it came to be encoded.
        prompt = {"prompt": [[-1]], "messages": [{"role": "user"}]}
        status, error = await one.error(path, **prompt, deadline_ms=1_000)
        assert (status, error["code"], error["param"]) == (429, "deadline_unreachable", "deadline_ms")
        assert (await one.error(path, **prompt, deadline_ms=60_000))[0] == 400


async def test_without_a_measured_rate_no_deadline_is_refused() -> None:
    overload = await observed(seconds=2, queued=10_000, ends_per_second=1)
    overload.check_deadline(1)


async def test_the_pool_is_asked_four_times_a_second_however_many_call() -> None:
    pool, clock = ToldPool(stats()), Clock()
    overload = Overload(pool, clock)
    for _ in range(10):
        await asyncio.gather(*(overload.check() for _ in range(100)))
        clock.now_s += 0.1
    assert pool.asked == 4


@pytest.mark.parametrize("problem", [PoolUnavailable("away"), TimeoutError()])
async def test_a_pool_that_says_nothing_is_left_to_submit(problem: Exception) -> None:
    overload = Overload(ToldPool(problem), Clock())
    await overload.check()
    overload.check_deadline(1)


@pytest.mark.parametrize(
    ("told", "queue_percent", "is_refused"),
    [
        (stats(queued=99), None, False),
        (stats(queued=100), None, True),
        (stats(queued=50), 50, True),
        (stats(queued=49), 50, False),
        (stats(queued_prompt_tokens=100), None, True),
        (stats(queued_prompt_tokens=99), None, False),
    ],
)
async def test_a_full_queue_is_known_before_the_pool_is_asked(
    told: PoolStats, queue_percent: int | None, is_refused: bool
) -> None:
    overload = Overload(ToldPool(told), Clock())
    refused = False
    try:
        await overload.check(queue_percent)
    except Exception as error:
        refused = "wait already" in str(error)
    assert refused == is_refused


async def filled(one: Rig, calls: int) -> list[asyncio.Task[Any]]:
    """So many calls that wait in the pool."""
    tasks = [asyncio.create_task(one.post(COMPLETIONS, prompt="a", max_tokens=2)) for _ in range(calls)]
    await until(lambda: len(one.pool.parents) == calls)
    return tasks


async def test_refused_calls_cost_no_body_no_tokens_and_no_iteration() -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was asked for")
        yield b""

    ran: list[Request] = []
    async with rig(schedules=False, pool_settings=PoolSettings(max_queued=2)) as one:
        waiting = await filled(one, 2)
        await one.error(COMPLETIONS, prompt="a")
        for _ in range(20):
            refused = await one.client.post(COMPLETIONS, content=unread(), headers={"content-type": "application/json"})
            status, error = error_of(refused)
            assert (status, error["code"]) == (429, "queue_full")
            assert 1 <= int(refused.headers["retry-after-ms"]) / 1000 <= int(refused.headers["retry-after"]) <= 60
        one.scheduler.answer = recording(ran)
        scheduling = asyncio.create_task(one.scheduler.run())
        assert {(await task).status_code for task in waiting} == {200}
        assert len(ran) == len(waiting)
        scheduling.cancel()


async def test_a_refusal_by_the_pool_itself_is_remembered() -> None:
    async with rig(schedules=False, pool_settings=PoolSettings(max_queued=2)) as one:
        tasks = await filled(one, 2)
        for _ in range(3):
            status, error = await one.error(COMPLETIONS, prompt="a")
            assert (status, error["code"]) == (429, "queue_full")
        for task in tasks:
            task.cancel()


async def test_a_key_of_less_priority_is_refused_in_a_queue_that_others_may_fill(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    keys = [ApiKey("batch", digest("b"), Limits(queue_percent=50)), ApiKey("people", digest("p"))]
    file.write_text("\n".join(map(line, keys)))
    settings = Settings(model="tiny", api_keys_file=str(file))
    async with rig(schedules=False, settings=settings, pool=ToldPool(stats(queued=60))) as one:
        answers = [
            await one.client.post(COMPLETIONS, json={"prompt": 5}, headers={"authorization": f"Bearer {key}"})
            for key in ("b", "p")
        ]
        assert [error_of(answer)[0] for answer in answers] == [429, 400]
