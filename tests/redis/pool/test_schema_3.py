"""The fields of schema 3: stored and given back whole, and never while the release before may read them."""

from collections.abc import Callable

import pytest

from orca.core.domain.errors import NeverFits, NotStoredYet
from orca.core.domain.request import End, FinishReason, SamplingParams, Token
from orca.pool.records import CommitAnswer, CommitEntry
from orca.pool.schemas import SCHEMA_3_FIELDS, SCHEMA_3_SAMPLING
from support.pool.beds import REVISION, Bed, RedisBed, Scheduler, started, submission, whole_log

FIELDS = {
    "decoder_prefix": (0, 250_004),
    "weight": 0.25,
    "first_token_goal_ms": 4_000,
    "cache_salt": "a b",
    "key_hash": "6f1e",
    "head_hash": "aa07",
}
SAMPLING = {
    "grammar": "start: /[a-z]+/\n",
    "allowed_token_ids": (5, 9),
    "forbidden_token_ids": (1,),
    "forbidden_sequences": ((5, 9), (9, 9, 5)),
}


def test_the_table_names_every_field() -> None:
    assert (tuple(FIELDS), tuple(SAMPLING)) == (SCHEMA_3_FIELDS, SCHEMA_3_SAMPLING)


async def test_every_field_comes_back_with_the_claim_and_with_the_parent(bed: Bed) -> None:
    _, owned = await started(bed, "a", sampling=SamplingParams(**SAMPLING), **FIELDS)
    [request] = (await bed.pool.parent("a")).requests
    assert owned["a.0"].request == request
    assert {name: getattr(request, name) for name in FIELDS} == FIELDS
    assert {name: getattr(request.sampling, name) for name in SAMPLING} == SAMPLING
    await bed.recount()


@pytest.mark.parametrize("name", [*FIELDS, *SAMPLING])
async def test_no_field_is_stored_while_the_release_before_may_read_it(make_bed: Callable[..., Bed], name: str) -> None:
    bed = make_bed()
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.set_schema(2)
    one = {name: FIELDS[name]} if name in FIELDS else {"sampling": SamplingParams(**{name: SAMPLING[name]})}
    with pytest.raises(NotStoredYet, match=f"{name}: not available while schema 2 ") as refused:
        await bed.pool.submit(submission("a", **one))
    assert refused.value.param == name
    await bed.pool.submit(submission("plain"))
    await bed.pool.set_schema(3)
    await bed.pool.submit(submission("a", **one))
    await bed.recount()


async def test_a_number_of_cached_prompt_tokens_is_read_and_claimed_with_token_0(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    log = (Token(7, cached_prompt_tokens=3), Token(8))
    for index, token in enumerate(log):
        await bed.pool.commit([CommitEntry(request_id="a.0", claim=owned["a.0"].claim, index=index, tokens=(token,))])
    assert await whole_log(bed.pool, "a.0") == list(log)
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    assert (await scheduler.take())["a.0"].log == log


async def test_a_record_of_an_older_schema_is_without_the_number_of_cached_prompt_tokens(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.set_schema(2)
    scheduler = Scheduler(bed)
    await scheduler.enter()
    await bed.pool.submit(submission("a"))
    claimed = (await scheduler.take())["a.0"]
    first = CommitEntry(request_id="a.0", claim=claimed.claim, index=0, tokens=(Token(7, cached_prompt_tokens=3),))
    assert await bed.pool.commit([first]) == [bed.applied]
    assert await bed.pool.commit([first]) == [CommitAnswer.ALREADY_THERE]
    assert await whole_log(bed.pool, "a.0") == [Token(7)]


async def test_a_decoder_prefix_needs_whole_blocks_of_two_tables(bed: Bed) -> None:
    """A source of 17 tokens needs 32 slots; a prefix of 2 and 15 new tokens need 32 more."""
    await bed.pool.set_revision(REVISION, 1)
    scheduler = Scheduler(bed)
    await scheduler.enter()
    assert await bed.pool.state_block_tokens(scheduler.caller, 16) == 16
    await bed.pool.promise_slots(REVISION, 63)
    large = {"prompt": tuple(range(17)), "decoder_prefix": (0, 1), "max_new_tokens": 15}
    with pytest.raises(NeverFits, match="need 64 slots, the engine has 63"):
        await bed.pool.submit(submission("a", **large))
    await bed.pool.set_promise(REVISION, 64, expected=63)
    await bed.pool.submit(submission("a", **large))
    assert await scheduler.take(free_slots=63) == {}
    assert list(await scheduler.take(free_slots=64)) == ["a.0"]
    larger = await bed.pool.larger_requests(REVISION, 63)
    assert (larger.unfinished, larger.smallest, larger.largest) == (1, 64, 64)


async def test_the_first_promise_ends_a_request_that_two_tables_make_too_large(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a", prompt=tuple(range(17)), decoder_prefix=(0, 1), max_new_tokens=15))
    await bed.pool.submit(submission("b", prompt=tuple(range(16)), decoder_prefix=(0, 1), max_new_tokens=15))
    scheduler = Scheduler(bed)
    await scheduler.enter()
    await bed.pool.state_block_tokens(scheduler.caller, 16)
    await bed.pool.promise_slots(REVISION, 48)
    end = (await bed.pool.status("a.0")).end
    assert end == End(FinishReason.REFUSED, 0, detail="prompt and max_tokens need 64 slots, the engine has 48")
    assert list(await scheduler.take()) == ["b.0"]


async def test_a_field_of_a_later_release_is_ignored(redis_bed: RedisBed) -> None:
    """A later release fills a reserved field, or adds one, under the same number."""
    await started(redis_bed, "a", weight=2.0, sampling=SamplingParams(seed=3))
    key = redis_bed.keys.named("body", "a.0")
    body: bytes = await redis_bed.redis.get(key)
    end = 4 + int.from_bytes(body[:4], "little")
    header = (
        body[4:end].replace(b'"weight":2.0', b'"unheard_of":[1],"weight":2.0').replace(b'"seed"', b'"top_z":1,"seed"')
    )
    assert len(header) == end - 4 + len(b'"unheard_of":[1],') + len(b'"top_z":1,')
    await redis_bed.redis.set(key, len(header).to_bytes(4, "little") + header + body[end:])
    request = (await redis_bed.pool.status("a.0")).request
    assert (request.weight, request.sampling) == (2.0, SamplingParams(seed=3))


async def test_the_reserved_histogram_of_lengths_is_left_alone(redis_bed: RedisBed) -> None:
    key = redis_bed.keys.named("lengths", REVISION)
    await redis_bed.redis.hset(key, mapping={"3,5": "1.5", "ms": "1"})
    _, owned = await started(redis_bed, "a")
    await redis_bed.pool.cancel("a")
    await redis_bed.pool.sweep()
    assert owned
    assert await redis_bed.redis.hgetall(key) == {b"3,5": b"1.5", b"ms": b"1"}
