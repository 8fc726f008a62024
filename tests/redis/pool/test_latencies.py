"""Latencies: the pool counts those of each answer that ends by itself, from its first claim ever."""

import random
from dataclasses import replace

import pytest

from orca.core.domain.request import FinishReason
from orca.pool.latency_bins import LATENCIES, LATENCY_MAX_US, AnswerLatency, bin_of, lua
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import PERIOD_MS, PERIODS_KEPT
from orca.pool.records import Claimed, CommitAnswer, OnDisconnect
from support.pool.beds import REVISION, SETTINGS, UNREAD_MS, Bed, RedisBed, Scheduler, entry, started, submission

NEAR = 0.05
"""Resolution of a bin, and what really passes beside the times that tests set: 5 s at 100 s."""


async def measured(bed: Bed) -> dict[str, float | None]:
    """Return the median of each latency, in seconds."""
    counts = await bed.pool.latencies(REVISION)
    return {latency.value: counts.percentile_s(latency, 50) for latency in LATENCIES}


async def commit(
    bed: Bed,
    claimed: Claimed,
    *tokens: int,
    index: int = 0,
    end: FinishReason | None = None,
    waited_ms: int | None = None,
) -> None:
    written = replace(entry(claimed, index, *tokens, end=end), waited_ms=waited_ms)
    assert await bed.pool.commit([written]) == [bed.applied]


async def test_an_answer_has_all_latencies_between_its_times(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    scheduler = Scheduler(bed)
    await scheduler.enter()
    await bed.pool.submit(submission("a"))
    await bed.age_requests(50_000)
    claimed = (await scheduler.take())["a.0"]
    await bed.age_requests(100_000)
    await commit(bed, claimed, 5)
    await bed.age_requests(400_000)
    await commit(bed, claimed, 6, 7, 8, 9, index=1, end=FinishReason.STOP)
    assert await measured(bed) == pytest.approx(
        {"sequence": 500, "request": 550, "first_token": 100, "request_first_token": 150, "token": 100}, rel=NEAR
    )


async def test_the_time_from_the_claim_to_the_first_step_is_no_part_of_a_sequence(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.age_requests(100_000)
    await commit(bed, owned["a.0"], 5, waited_ms=60_000)
    await bed.age_requests(200_000)
    await commit(bed, owned["a.0"], 6, 7, index=1, end=FinishReason.STOP)
    assert await measured(bed) == pytest.approx(
        {"sequence": 240, "request": 300, "first_token": 40, "request_first_token": 100, "token": 100}, rel=NEAR
    )


async def test_whole_answers_in_one_commit_have_a_first_step(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.age_requests(100_000)
    await commit(bed, owned["a.0"], 5, 6, end=FinishReason.STOP, waited_ms=60_000)
    found = await measured(bed)
    assert (found["sequence"], found["request"]) == (pytest.approx(40, rel=NEAR), pytest.approx(100, rel=NEAR))


async def test_under_a_later_claim_the_first_claim_counts_as_the_first_step(bed: Bed) -> None:
    """Its first owner may have run steps before it died."""
    await started(bed, "a")
    await bed.age_requests(100_000)
    second = Scheduler(bed, process="p2")
    await second.enter(is_holder_dead=True)
    claimed = (await second.take())["a.0"]
    await bed.age_requests(100_000)
    await commit(bed, claimed, 5, 6, end=FinishReason.STOP, waited_ms=90_000)
    assert (await measured(bed))["sequence"] == pytest.approx(200, rel=NEAR)


async def test_a_recovered_request_counts_from_its_first_claim_ever(bed: Bed) -> None:
    """Its first owner dies with no token in the log, its second one with some."""
    _, owned = await started(bed, "a")
    await bed.age_requests(100_000)
    second = Scheduler(bed, process="p2")
    await second.enter(is_holder_dead=True)
    owned = await second.take()
    await bed.age_requests(100_000)
    await commit(bed, owned["a.0"], 5, 6)
    await bed.age_requests(100_000)
    third = Scheduler(bed, process="p3")
    await third.enter(is_holder_dead=True)
    claimed = (await third.take())["a.0"]
    await bed.age_requests(100_000)
    await commit(bed, claimed, 7, index=2, end=FinishReason.LENGTH)
    assert await measured(bed) == pytest.approx(
        {"sequence": 400, "request": 400, "first_token": 200, "request_first_token": 200, "token": 100}, rel=NEAR
    )


async def test_the_answers_are_those_whose_lengths_are_counted(bed: Bed) -> None:
    scheduler, owned = await started(bed, "stopped", "cut", "cancelled", "failed", "moved", deadline_ms=600_000)
    await bed.pool.cancel("cancelled")
    await commit(bed, owned["failed.0"], 5, end=FinishReason.ERROR)
    await commit(bed, owned["stopped.0"], 5, end=FinishReason.STOP)
    await commit(bed, owned["cut.0"], 5, 6, end=FinishReason.LENGTH)
    repeated = [entry(owned["cut.0"], 0, 5, 6, end=FinishReason.LENGTH)]
    assert await bed.pool.commit(repeated) == [CommitAnswer.ALREADY_THERE]
    await bed.pool.give_back({"moved.0": owned["moved.0"].claim})
    late = [entry(owned["moved.0"], 0, 8, end=FinishReason.STOP)]
    assert await bed.pool.commit(late) == [CommitAnswer.NOT_YOURS]
    assert await scheduler.heartbeat() == {}
    counts = await bed.pool.latencies(REVISION)
    assert counts.answers == (await bed.pool.lengths(REVISION)).answers == 2
    assert sum(counts.periods[0].bins[AnswerLatency.TOKEN].values()) == 1, "one answer has a token after its first"
    assert (await bed.pool.latencies("another")).periods == ()


async def test_an_answer_without_a_token_has_no_first_one(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await commit(bed, owned["a.0"], end=FinishReason.STOP)
    counts = await bed.pool.latencies(REVISION)
    assert set(counts.periods[0].bins) == {AnswerLatency.SEQUENCE, AnswerLatency.REQUEST}


async def test_a_clock_that_was_set_back_counts_as_no_time(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.age_requests(-100_000)
    await commit(bed, owned["a.0"], 5, 6, end=FinishReason.STOP)
    counts = await bed.pool.latencies(REVISION)
    assert counts.periods[0].bins[AnswerLatency.SEQUENCE] == {0: 1}


async def test_counts_have_periods_and_outlive_their_requests(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await commit(bed, owned["a.0"], 5, end=FinishReason.STOP)
    await bed.pool.forget("a")
    await bed.pass_awake(3 * PERIOD_MS)
    await bed.pool.submit(submission("b"))
    await scheduler.heartbeat()
    await commit(bed, (await scheduler.take())["b.0"], 5, end=FinishReason.STOP)
    found: LatencyCounts = await bed.pool.latencies(REVISION)
    new, old = found.periods
    assert (new.answers, old.answers, new.period - old.period) == (1, 1, 3)
    assert old.begins_ms <= old.first_ms < new.begins_ms <= new.first_ms <= found.awake_ms
    await bed.pass_awake(SETTINGS.retention_ms + UNREAD_MS)
    await bed.pool.sweep()
    assert (await bed.pool.latencies(REVISION)).answers == 2
    await bed.pass_awake(PERIODS_KEPT * PERIOD_MS)
    await bed.pool.sweep()
    assert (await bed.pool.latencies(REVISION)).periods == ()


async def test_reading_writes_nothing(redis_bed: RedisBed) -> None:
    _, owned = await started(redis_bed, "a")
    await commit(redis_bed, owned["a.0"], 5, end=FinishReason.STOP)
    before = await redis_bed.redis.hgetall(redis_bed.keys.single("meta"))
    assert (await redis_bed.pool.latencies(REVISION)).answers == 1
    assert await redis_bed.redis.hgetall(redis_bed.keys.single("meta")) == before


async def test_the_scripts_have_the_same_bins(redis_bed: RedisBed) -> None:
    powers = [2**bits + change for bits in range(38) for change in (-1, 0, 1)]
    drawn = random.Random(7)
    latencies = [-3, *range(500), *powers, LATENCY_MAX_US, *(drawn.uniform(0, 2**37) for _ in range(2000)), 2.5, 64.9]
    script = (
        f"{lua()} local bins = {{}} for i, us in ipairs(ARGV) do bins[i] = latency_bin_of(tonumber(us)) end return bins"
    )
    assert await redis_bed.redis.eval(script, 0, *map(repr, latencies)) == [bin_of(each) for each in latencies]
