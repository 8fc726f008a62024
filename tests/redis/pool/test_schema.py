"""The schema number in force: who may change it, what is written under it, and what releases make of each other's."""

from collections.abc import AsyncIterator, Callable

import pytest

from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.pool.records import OnDisconnect, OwnershipState
from orca.pool.redis.pool import RedisPool
from orca.pool.schemas import SCHEMAS, Schemas
from support.pool.beds import REVISION, SETTINGS, Bed, RedisBed, Scheduler, submission

OLDER, NEWER = Schemas(2, 2), Schemas(2, 3)


@pytest.fixture
async def bed(make_bed: Callable[..., Bed]) -> Bed:
    """A pool of the newer release, in which the older number is in force."""
    bed = make_bed(schemas=NEWER)
    assert await bed.pool.set_schema(2) == 2
    return bed


def test_a_release_supports_its_schema_and_the_one_before() -> None:
    assert SCHEMAS.newest - SCHEMAS.oldest <= 1
    assert [number in NEWER for number in range(4)] == [False, False, True, True]


async def test_the_number_is_raised_when_every_living_part_writes_it(bed: Bed) -> None:
    await bed.pool.report("a")
    await bed.pool.report("b")
    assert await bed.pool.set_schema(3) == 3
    assert (await bed.pool.stats()).schema == 3


async def test_a_living_part_of_the_older_release_keeps_its_number_in_force(bed: Bed) -> None:
    await bed.report_as("old", OLDER)
    assert await bed.pool.set_schema(3) == 2
    assert await bed.pool.report("new") == 2


async def test_a_part_whose_lease_has_expired_is_no_longer_waited_for(bed: Bed) -> None:
    await bed.report_as("old", OLDER)
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    assert await bed.pool.set_schema(3) == 3


async def test_a_number_that_the_caller_does_not_write_is_not_set(bed: Bed) -> None:
    assert await bed.pool.set_schema(4) == 2
    assert await bed.pool.set_schema(1) == 2


async def test_a_rollback_sees_how_many_newer_records_are_left(bed: Bed) -> None:
    await bed.pool.set_schema(3)
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a", n=2))
    assert (await bed.pool.stats()).newer_records == 0
    assert await bed.pool.set_schema(2) == 2
    await bed.pool.submit(submission("b"))
    assert (await bed.pool.stats()).newer_records == 2
    await bed.pool.cancel("a")
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.sweep()
    assert (await bed.pool.stats()).newer_records == 0


async def test_the_newer_release_runs_records_of_both_numbers(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("old"))
    await bed.pool.set_schema(3)
    await bed.pool.submit(submission("new"))
    scheduler = Scheduler(bed)
    await scheduler.enter()
    assert list(await scheduler.take()) == ["old.0", "new.0"]


@pytest.fixture
async def releases(redis_bed: RedisBed) -> AsyncIterator[tuple[RedisPool, RedisPool]]:
    """Parts of the older and of the newer release in one deployment, the newer number in force."""
    older = RedisPool(redis_bed.url, redis_bed.deployment, SETTINGS, OLDER)
    newer = RedisPool(redis_bed.url, redis_bed.deployment, SETTINGS, NEWER)
    await newer.set_revision(REVISION, 1)
    assert await newer.set_schema(3) == 3
    yield older, newer
    await newer.set_schema(2)
    for pool in (older, newer):
        await pool.close()


async def test_a_part_that_finds_a_number_it_cannot_write_stops_serving(
    releases: tuple[RedisPool, RedisPool],
) -> None:
    older, _ = releases
    for call in (older.submit(submission("a")), older.sweep(), older.stats()):
        with pytest.raises(PoolUnavailable, match="3 is in force, this release writes 2 to 2"):
            await call
    with pytest.raises(SettingError, match="schema 3 is in force, this release writes 2 to 2"):
        await older.check_server()


async def test_a_sweeping_process_reports_itself(releases: tuple[RedisPool, RedisPool]) -> None:
    older, newer = releases
    await newer.set_schema(2)
    await older.sweep()
    assert await newer.set_schema(3) == 2


async def test_after_a_rollback_the_older_release_skips_newer_records_and_serves_its_own(
    releases: tuple[RedisPool, RedisPool], redis_bed: RedisBed
) -> None:
    older, newer = releases
    await newer.submit(submission("newer", on_disconnect=OnDisconnect.KEEP))
    await newer.set_schema(2)
    await older.submit(submission("ours", on_disconnect=OnDisconnect.KEEP))
    redis_bed.pool = older
    scheduler = Scheduler(redis_bed)
    await scheduler.enter()
    assert list(await scheduler.take()) == ["ours.0"]
    assert (await newer.status("newer.0")).state is OwnershipState.QUEUED


async def test_the_older_release_does_not_change_newer_records_of_its_group(
    releases: tuple[RedisPool, RedisPool], redis_bed: RedisBed
) -> None:
    older, newer = releases
    await newer.submit(submission("newer", on_disconnect=OnDisconnect.KEEP))
    redis_bed.pool = newer
    await Scheduler(redis_bed).enter()
    second = Scheduler(redis_bed, "p2")
    await second.enter(is_holder_dead=True)
    await second.take()
    await newer.set_schema(2)
    redis_bed.pool = older
    await Scheduler(redis_bed, "p3").enter(is_holder_dead=True)
    assert (await newer.status("newer.0")).owner == "p2"
    redis_bed.pool = newer
    await Scheduler(redis_bed, "p4").enter(is_holder_dead=True)
    assert (await newer.status("newer.0")).state is OwnershipState.QUEUED
