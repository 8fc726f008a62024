"""A kill of Redis may roll back writes that no reader has seen: the scheduler notices, and nothing is skipped."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orca.core.domain.request import FinishReason
from orca.pool.api import SeatLost
from orca.pool.records import CommitAnswer, OwnershipState
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from support.pool.beds import SETTINGS, RedisBed, Scheduler, add_user, entry, started, submission


class Past:
    """A pool on a Redis of its own, and what that had in its files at some time, to be what it starts with again."""

    def __init__(self, server: EmbeddedRedis, folder: Path) -> None:
        self._server, self._kept = server, folder / "kept"
        self.bed = RedisBed(server.url, SETTINGS)

    def keep(self) -> None:
        shutil.copytree(self._server.folder, self._kept, ignore=shutil.ignore_patterns("*.sock"))

    async def bring_back(self) -> None:
        self._server.kill()
        shutil.rmtree(self._server.folder)
        shutil.copytree(self._kept, self._server.folder)
        self._server.restart()
        # Its users are in no file, and connections that broke would cost a call each.
        add_user(self.bed.url, self.bed.deployment)
        await self.bed.bare.close()
        self.bed.bare = self.bed.pool = RedisPool(self.bed.url, self.bed.deployment, self.bed.settings)
        await self.bed.redis.connection_pool.disconnect()


@pytest.fixture
async def past(own_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Past]:
    past = Past(own_redis, tmp_path)
    yield past
    await past.bed.recount()
    await past.bed.close()


@pytest.fixture
def bed(past: Past) -> RedisBed:
    return past.bed


async def finish(bed: RedisBed, scheduler: Scheduler, *, logged: int) -> None:
    """The request is claimed again, and its tokens are 5, 6 and 7 whatever the log had of them."""
    again = (await scheduler.take())["a.0"]
    assert len(again.log) == logged
    answers = await bed.pool.commit([entry(again, logged, *(5, 6, 7)[logged:], end=FinishReason.LENGTH)])
    assert answers == [CommitAnswer.APPLIED]
    log = await bed.pool.read("a.0", 0)
    assert [token.id for token in log.tokens] == [5, 6, 7]
    assert log.end is not None


async def test_a_lost_commit_is_a_gap_for_the_next_one_and_returns_the_request(bed: RedisBed, past: Past) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    past.keep()
    await bed.pool.commit([entry(owned["a.0"], 1, 6)])
    await past.bring_back()
    assert await bed.pool.commit([entry(owned["a.0"], 2, 7)]) == [CommitAnswer.NOT_YOURS]
    await finish(bed, scheduler, logged=1)


async def test_after_a_lost_end_the_unknown_request_is_given_back(bed: RedisBed, past: Past) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5, 6)])
    past.keep()
    await bed.pool.commit([entry(owned["a.0"], 2, 7, end=FinishReason.LENGTH)])
    await past.bring_back()
    await bed.pool.give_back(await scheduler.heartbeat())
    await finish(bed, scheduler, logged=2)


async def test_the_commits_of_a_lost_claim_are_refused(bed: RedisBed, past: Past) -> None:
    scheduler, _ = await started(bed)
    await bed.pool.submit(submission("a"))
    past.keep()
    owned = await scheduler.take()
    await past.bring_back()
    assert await bed.pool.commit([entry(owned["a.0"], 0, 5)]) == [CommitAnswer.NOT_YOURS]
    assert (await bed.pool.status("a.0")).state is OwnershipState.QUEUED
    await finish(bed, scheduler, logged=0)


async def test_a_lost_seat_is_entered_again_with_an_epoch_above_the_stages(bed: RedisBed, past: Past) -> None:
    _, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    past.keep()
    successor = Scheduler(bed, "p2")
    known = await successor.enter(is_holder_dead=True)
    await past.bring_back()
    with pytest.raises(SeatLost):
        await successor.heartbeat()
    assert await successor.enter(reported_epoch=known, is_holder_dead=True) > known
    assert await bed.pool.commit([entry(owned["a.0"], 1, 6)]) == [CommitAnswer.NOT_YOURS]
    await finish(bed, successor, logged=1)
