"""A Redis that changes under a serving pool: reconfigured, replaced, or on a disk that hangs."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from orca.core.domain.errors import PoolNotDurable, PoolUnavailable
from orca.pool.api import CommitAnswer
from orca.pool.redis.embedded import EmbeddedRedis
from support.pool.beds import REVISION, RedisBed, add_user, entry, started, submission, with_settings


@pytest.fixture
async def own_bed(own_redis: EmbeddedRedis) -> AsyncIterator[RedisBed]:
    bed = RedisBed(own_redis.url, with_settings(call_timeout_ms=2000))
    yield bed
    await bed.close()


async def test_a_reconfigured_server_finishes_its_requests_and_takes_no_more(own_bed: RedisBed) -> None:
    _, owned = await started(own_bed, "a")
    await own_bed.redis.config_set("appendonly", "no")
    await own_bed.pool.sweep()
    with pytest.raises(PoolNotDurable, match="no append-only file"):
        await own_bed.pool.submit(submission("b"))
    assert await own_bed.pool.commit([entry(owned["a.0"], 0, 5)]) == [CommitAnswer.APPLIED]
    await own_bed.redis.config_set("appendonly", "yes")
    await own_bed.pool.sweep()
    await own_bed.pool.submit(submission("b"))


async def test_a_replaced_server_is_noticed_before_new_work_is_accepted(
    own_redis: EmbeddedRedis, own_bed: RedisBed
) -> None:
    await own_bed.pool.set_revision(REVISION, 1)
    await own_bed.pool.submit(submission("a"))
    own_redis.kill()
    own_redis.restart()
    add_user(own_bed.url, own_bed.deployment)
    await own_bed.redis.config_set("maxmemory-policy", "allkeys-lru")
    # The first call may only find that its connection broke.
    with contextlib.suppress(PoolUnavailable):
        await own_bed.pool.submit(submission("b"))
    with pytest.raises(PoolNotDurable, match="allkeys-lru"):
        await own_bed.pool.submit(submission("b"))
