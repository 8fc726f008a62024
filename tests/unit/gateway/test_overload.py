"""More calls than can be served: who is refused, how cheaply, and when they are told to come back."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.errors import PoolUnavailable, QueueFull
from orca.gateway.limits.backlog import EndRate
from orca.gateway.limits.overload import Overload, retry_after_seconds
from orca.pool.records import PoolStats
from support.gateway.gateway_rig import rig, until
from support.gateway.overloads import Clock, observed, overload_of
from support.gateway.scripted_pool import ScriptedPool, stats

COMPLETIONS = "/v1/completions"

RATES = st.none() | st.floats(0.01, 1000)


async def is_refused(overload: Overload) -> bool:
    try:
        await overload.check()
    except QueueFull:
        return True
    return False


async def after_a_full_queue() -> tuple[ScriptedPool, Clock, Overload]:
    """A gateway that has just refused a call, by what the pool told."""
    pool, clock = ScriptedPool(stats(queued=100)), Clock()
    overload = overload_of(pool, clock)
    assert await is_refused(overload)
    return pool, clock, overload


@given(st.integers(0, 10**6), st.integers(0, 10**6), RATES, st.text())
def test_a_longer_queue_never_gets_a_shorter_retry_after(one: int, more: int, rate: float | None, word: str) -> None:
    sooner, later = retry_after_seconds(one, rate, word), retry_after_seconds(one + more, rate, word)
    assert 1 <= sooner <= later <= 60


def test_calls_that_are_refused_together_get_different_retry_times() -> None:
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
def test_the_rate_counts_requests_that_ended_while_others_waited(
    samples: list[tuple[int, int, int]], expected: float | None
) -> None:
    rate = EndRate()
    for second, queued, ended in samples:
        rate.add(second, stats(queued=queued, ended_ever=ended))
    assert rate.per_second == expected


def test_the_rate_of_served_requests_leaves_out_those_that_were_late_in_the_queue() -> None:
    rate = EndRate()
    for second in range(5):
        rate.add(second, stats(queued=5, ended_ever=30 * second, unserved_ever=20 * second))
    assert (rate.per_second, rate.served_per_second) == (30.0, 10.0)


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


async def test_the_pool_is_polled_four_times_a_second_for_any_number_of_calls() -> None:
    pool, clock = ScriptedPool(stats()), Clock()
    overload = overload_of(pool, clock)
    for _ in range(10):
        await asyncio.gather(*(overload.check() for _ in range(100)))
        clock.now_s += 0.1
    assert pool.asked == 4


@pytest.mark.parametrize("problem", [PoolUnavailable("away"), TimeoutError()])
async def test_without_an_answer_of_the_pool_submit_decides(problem: Exception) -> None:
    overload = overload_of(ScriptedPool(problem))
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
async def test_a_full_queue_is_known_without_another_poll(
    told: PoolStats, queue_percent: int | None, is_refused: bool
) -> None:
    overload = overload_of(ScriptedPool(told))
    refused = False
    try:
        await overload.check(queue_percent)
    except QueueFull as error:
        refused = "wait already" in str(error)
    assert refused == is_refused


async def test_no_refusal_waits_for_the_pool() -> None:
    pool, clock, overload = await after_a_full_queue()
    pool.may_answer.clear()
    clock.now_s = 0.4
    async with asyncio.timeout(10):
        assert [await is_refused(overload) for _ in range(100)] == [True] * 100
    await until(lambda: pool.asked == 2)
    pool.may_answer.set()


async def test_a_free_place_is_seen_after_the_next_answer_of_the_pool() -> None:
    pool, clock, overload = await after_a_full_queue()
    pool.told = stats(queued=99)
    clock.now_s = 0.3
    assert await is_refused(overload)
    async with asyncio.timeout(10):
        while await is_refused(overload):
            await asyncio.sleep(0)


async def test_a_call_half_a_second_after_a_full_queue_is_not_refused_by_old_counts() -> None:
    pool, clock, overload = await after_a_full_queue()
    pool.told = stats(queued=99)
    clock.now_s = 0.6
    assert not await is_refused(overload)


@pytest.mark.parametrize(
    ("queued", "is_refused_since", "age_s", "waits"),
    [(0, False, 9.0, False), (1, False, 9.0, True), (0, True, 9.0, True), (0, False, 11.0, True)],
)
async def test_a_call_waits_for_new_counts_unless_the_queue_was_just_empty(
    queued: int, is_refused_since: bool, age_s: float, waits: bool
) -> None:
    pool, clock = ScriptedPool(stats(queued=queued)), Clock()
    overload = overload_of(pool, clock)
    await overload.check()
    if is_refused_since:
        overload.backlog.note_full()
    clock.now_s = age_s
    pool.may_answer.clear()
    call = asyncio.create_task(overload.check())
    await until(lambda: pool.asked == 2)
    assert call.done() is not waits
    pool.may_answer.set()
    await call


async def test_concurrent_callers_share_one_answer_of_the_pool_for_a_while() -> None:
    pool, clock = ScriptedPool(stats(queued=3)), Clock()
    overload = overload_of(pool, clock)
    assert await asyncio.gather(*(overload.backlog.counts(10) for _ in range(50))) == [pool.told] * 50
    clock.now_s = 0.2
    assert (await overload.backlog.counts(10), pool.asked) == (pool.told, 1)
    clock.now_s = 0.3
    pool.told = stats(queued=4)
    assert (await overload.backlog.counts(10), pool.asked) == (pool.told, 2)


async def test_counts_that_do_not_arrive_in_time_are_none() -> None:
    pool, clock = ScriptedPool(stats(queued=3)), Clock()
    overload = overload_of(pool, clock)
    await overload.backlog.counts(10)
    pool.may_answer.clear()
    clock.now_s = 0.3
    assert await overload.backlog.counts(0.01) is None
    pool.told = PoolUnavailable("away")
    pool.may_answer.set()
    assert await overload.backlog.counts(10) is None


async def test_outdated_counts_of_a_silent_pool_refuse_no_call() -> None:
    pool, clock, overload = await after_a_full_queue()
    pool.may_answer.clear()
    clock.now_s = 0.6
    assert not await is_refused(overload)


async def test_a_refusal_by_the_pool_holds_until_its_next_answer() -> None:
    pool, clock = ScriptedPool(stats(queued_prompt_tokens=99)), Clock()
    overload = overload_of(pool, clock)
    assert not await is_refused(overload)
    overload.backlog.note_full()
    assert await is_refused(overload)
    clock.now_s = 0.6
    assert not await is_refused(overload)
