"""The pool reports replaced revisions: their unfinished requests, and their records that may still be read."""

from orca.core.domain.request import FinishReason
from orca.pool.records import OnDisconnect, PoolStats
from support.pool.beds import REVISION, SETTINGS, Bed, RedisBed, Scheduler, entry, started, submission


async def replace(bed: Bed, revision: str = "r2", generation: int = 2) -> None:
    """Make another revision the current one, as its first formed group does."""
    await bed.pool.promise_slots(revision, 100)
    assert await bed.pool.set_revision(revision, generation) == revision


async def swept(bed: Bed) -> PoolStats:
    await bed.pool.sweep()
    stats: PoolStats = await bed.pool.stats()
    return stats


async def test_a_pool_without_a_revision_has_no_generation_either(bed: Bed) -> None:
    stats = await bed.pool.stats()
    assert (stats.revision, stats.generation, stats.replaced_revisions) == (None, None, ())


async def test_without_a_replaced_revision_all_requests_are_of_the_current_one(bed: Bed) -> None:
    await started(bed, "run")
    await bed.pool.submit(submission("wait"))
    stats = await swept(bed)
    assert (stats.generation, stats.replaced_revisions, stats.replaced_unfinished) == (1, (), 0)


async def test_waiting_and_running_requests_of_a_replaced_revision_are_counted_before_any_sweep(bed: Bed) -> None:
    await started(bed, "run")
    await bed.pool.submit(submission("wait", n=2))
    await replace(bed)
    await bed.pool.submit(submission("new", revision="r2"))
    stats = await bed.pool.stats()
    assert (stats.generation, stats.replaced_revisions, stats.replaced_unfinished) == (2, (REVISION,), 3)
    assert (await swept(bed)).replaced_unfinished == 3


async def test_a_request_that_has_ended_is_not_unfinished_but_has_a_record(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await replace(bed)
    await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    stats = await swept(bed)
    assert (stats.replaced_revisions, stats.replaced_unfinished) == ((REVISION,), 0)


async def test_a_replaced_revision_is_listed_until_its_last_record_is_forgotten(bed: Bed) -> None:
    _, owned = await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await replace(bed)
    await bed.pass_awake(SETTINGS.retention_ms // 2)
    await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    await bed.pool.sweep()
    await bed.pass_awake(SETTINGS.retention_ms - 2000)
    assert (await swept(bed)).replaced_revisions == (REVISION,)
    await bed.pass_awake(2000)
    stats = await swept(bed)
    assert (stats.ended, stats.replaced_revisions) == (0, ())


async def test_a_record_that_is_still_read_keeps_its_revision_listed(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.cancel("a")
    await replace(bed)
    await bed.pool.sweep()
    await bed.pass_awake(SETTINGS.retention_ms - 1000)
    await bed.pool.attach("a", "late")
    await bed.pass_awake(1000)
    assert (await swept(bed)).replaced_revisions == (REVISION,)
    await bed.pass_awake(SETTINGS.retention_ms - 2000)
    stats = await swept(bed)
    assert (stats.ended, stats.replaced_revisions) == (1, (REVISION,))
    await bed.pass_awake(2000)
    assert (await swept(bed)).replaced_revisions == ()


async def test_a_revision_that_comes_back_is_not_a_replaced_one_and_the_other_is(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.promise_slots(REVISION, 100)
    await replace(bed)
    await bed.pool.submit(submission("b", revision="r2"))
    await bed.pool.sweep()
    await replace(bed, REVISION, 3)
    stats = await swept(bed)
    assert (stats.generation, stats.replaced_revisions, stats.replaced_unfinished) == (3, ("r2",), 1)


async def test_two_replaced_revisions_are_both_listed(bed: Bed) -> None:
    await started(bed, "a")
    await replace(bed)
    await bed.pool.submit(submission("b", revision="r2"))
    await replace(bed, "r3", 3)
    stats = await swept(bed)
    assert (stats.replaced_revisions, stats.replaced_unfinished) == ((REVISION, "r2"), 2)


async def test_requests_of_a_dead_group_stay_counted_after_they_are_taken_back(bed: Bed) -> None:
    await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await replace(bed)
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    assert (await swept(bed)).replaced_unfinished == 1
    await Scheduler(bed, "p2", "g2", REVISION).enter()
    assert (await swept(bed)).replaced_unfinished == 1


async def test_a_retired_revision_without_records_is_not_listed_again(redis_bed: RedisBed) -> None:
    """Its own time is twice the retention here."""
    bed = redis_bed
    await started(bed, "a")
    await bed.pool.cancel("a")
    await replace(bed)
    retired = bed.keys.single("retired")
    await bed.redis.zadd(retired, {REVISION: 10 * SETTINGS.retention_ms})
    await bed.pool.sweep()
    await bed.pass_awake(SETTINGS.retention_ms)
    assert (await swept(bed)).replaced_revisions == ()
    assert (await swept(bed)).replaced_revisions == ()
    assert await bed.redis.zscore(retired, REVISION) is not None


async def test_revisions_that_the_previous_release_retired_are_listed(redis_bed: RedisBed) -> None:
    bed = redis_bed
    await started(bed, "a")
    await replace(bed)
    await bed.redis.delete(bed.keys.single("replaced"))
    stats = await bed.pool.stats()
    assert (stats.replaced_revisions, stats.replaced_unfinished) == ((REVISION,), 1)
