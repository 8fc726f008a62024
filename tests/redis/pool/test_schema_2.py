"""This release takes over a deployment that the release before left behind: every record of schema 2, as bytes."""

import pytest

from orca.core.domain.request import End, FinishReason, Logprob, Request, SamplingParams, Token
from orca.core.domain.step import Claim
from orca.pool.records import CommitAnswer, CommitEntry, OwnershipState
from support.pool.beds import SETTINGS, RedisBed, Scheduler, entry
from support.pool.schema_2 import write_schema_2

OLD = Request(
    parent="old",
    choice=0,
    revision="r1",
    prompt=(1, 2, 3, 4),
    max_new_tokens=12,
    sampling=SamplingParams(temperature=0.5, logit_bias=((3, -1.5),), seed=7, stop_token_ids=(9,), stop=("a",)),
    first_token_deadline_ms=9_000,
    arrival=1,
    submitted_ms=1_700_000_000_000,
)
LOG = (Token(5, Logprob(5, -0.25, ((5, -0.25), (6, -1.5)))), Token(70_000))


@pytest.fixture
async def bed(redis_bed: RedisBed) -> RedisBed:
    await write_schema_2(redis_bed.redis, redis_bed.keys)
    return redis_bed


async def test_a_running_request_of_schema_2_continues_where_its_log_ends(bed: RedisBed) -> None:
    scheduler = Scheduler(bed, "p2")
    assert await scheduler.enter(is_holder_dead=True) == 4
    claimed = (await scheduler.take())["old.0"]
    assert (claimed.request, claimed.log) == (OLD, LOG)
    await bed.pool.commit([entry(claimed, 2, 8, end=FinishReason.STOP)])
    found = await bed.pool.read("old.0", 0)
    assert (found.tokens, found.end) == ((*LOG, Token(8)), End(FinishReason.STOP, 3))
    await bed.recount()


async def test_an_ended_request_of_schema_2_is_read_with_its_stop(bed: RedisBed) -> None:
    end = End(FinishReason.STOP, 2, "a")
    assert (await bed.pool.read("over.0", 0)).end == end
    status = await bed.pool.status("over.0")
    assert (status.state, status.tokens, status.end) == (OwnershipState.ENDED, 2, end)
    assert (await bed.pool.parent("over")).render == '{"kind":"test"}'


async def test_an_ended_request_of_schema_2_is_forgotten_after_the_retention(bed: RedisBed) -> None:
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.sweep()
    assert [key async for key in bed.redis.scan_iter(bed.keys.prefix + "*over*")] == []
    assert (await bed.pool.stats()).ended == 0
    await bed.recount()


async def test_a_late_commit_of_a_dead_schema_2_owner_is_refused(bed: RedisBed) -> None:
    await Scheduler(bed, "p2").enter(is_holder_dead=True)
    late = CommitEntry(request_id="old.0", claim=Claim(1, "p1/2"), index=2, tokens=(Token(8),))
    assert await bed.pool.commit([late]) == [CommitAnswer.NOT_YOURS]
    assert (await bed.pool.status("old.0")).tokens == 2


async def test_unknown_fields_of_a_record_are_ignored(bed: RedisBed) -> None:
    for kind, name in (("req", "old.0"), ("par", "old"), ("seat", "g1")):
        await bed.redis.hset(bed.keys.named(kind, name), "of_a_later_release", "1")
    scheduler = Scheduler(bed, "p2")
    await scheduler.enter(is_holder_dead=True)
    assert (await scheduler.take())["old.0"].request == OLD
