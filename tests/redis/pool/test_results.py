"""Results of Jobs: the pool keeps the last one of each key for an hour."""

import pytest

from orca.pool.contract import RESULT_BYTES_MAX, RESULT_FOR_MS
from support.pool.beds import SETTINGS, Bed, MemoryBed, RedisBed


async def test_a_result_is_read_by_its_key_as_often_as_asked(bed: Bed) -> None:
    assert await bed.pool.result("plan-1") is None
    await bed.pool.keep_result("plan-1", b"\x00first \xff")
    await bed.pool.keep_result("plan-2", b"another")
    for _ in range(2):
        assert await bed.pool.result("plan-1") == b"\x00first \xff"


async def test_a_later_result_takes_the_place_of_an_earlier_one(bed: Bed) -> None:
    await bed.pool.keep_result("plan-1", b"first")
    await bed.pool.keep_result("plan-1", b"")
    assert await bed.pool.result("plan-1") == b""


async def test_a_result_that_no_config_map_could_hold_is_a_fault_of_its_writer(bed: Bed) -> None:
    await bed.pool.keep_result("plan-1", bytes(RESULT_BYTES_MAX))
    with pytest.raises(AssertionError, match="900001 bytes"):
        await bed.pool.keep_result("plan-1", bytes(RESULT_BYTES_MAX + 1))


async def test_a_result_goes_after_its_time_in_redis(redis_bed: RedisBed) -> None:
    await redis_bed.pool.keep_result("plan-1", b"first")
    key = redis_bed.keys.named("results", "plan-1")
    assert 0 < await redis_bed.redis.pttl(key) <= RESULT_FOR_MS
    await redis_bed.redis.pexpire(key, 0)
    assert await redis_bed.pool.result("plan-1") is None


async def test_a_result_goes_after_its_time_in_memory() -> None:
    bed = MemoryBed(SETTINGS)
    await bed.pool.keep_result("plan-1", b"first")
    bed.clock.wall += RESULT_FOR_MS - 1
    assert await bed.pool.result("plan-1") == b"first"
    bed.clock.wall += 1
    assert await bed.pool.result("plan-1") is None
