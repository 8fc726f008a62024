"""A Redis filled to the brim by real submits: the door refuses, and all that was accepted is finished in full."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orca.core.domain.errors import PoolFull
from orca.core.domain.request import End, FinishReason, Logprob, SamplingParams, Token
from orca.pool import codec
from orca.pool.records import Claimed, CommitAnswer, CommitEntry, OnDisconnect
from orca.pool.redis.embedded import EmbeddedRedis
from support.pool.beds import REVISION, RedisBed, Scheduler, started, submission, with_settings
from support.pool.kinds import KINDS, redis_binary

MAXMEMORY = 40 << 20
BYTES_MAX = codec.room_for_requests(MAXMEMORY)  # the most that a part starts with
TOP_MAX = 20
LAST_ID = 500_000  # of a vocabulary larger than any in use

# What weighs in different places: records alone, tokens, tokens with log probabilities, a prompt's, choices.
SHAPES: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 1},
    {"max_new_tokens": 300},
    {"max_new_tokens": 60, "sampling": SamplingParams(logprobs=TOP_MAX)},
    {"max_new_tokens": 2, "sampling": SamplingParams(prompt_logprobs=5), "prompt": tuple(range(100))},
    {"max_new_tokens": 30, "n": 4},
)


@pytest.fixture(params=[(kind, node) for kind in KINDS[1:] for node in (1024, 4096)], ids="{0[0]}-node-{0[1]}".format)
async def small_bed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RedisBed]:
    """Start a pool on a small Redis, with stream nodes as the product sets them and as Redis itself sets them."""
    kind, node_bytes = request.param
    options = ("--stream-node-max-bytes", str(node_bytes))
    with EmbeddedRedis(tmp_path, binary=redis_binary(kind), maxmemory_bytes=MAXMEMORY, options=options) as server:
        bed = RedisBed(server.url, with_settings(bytes_max=BYTES_MAX, max_queued=10**6))
        yield bed
        await bed.close()


async def fill(bed: RedisBed) -> int:
    """Submit until the door refuses. Returns: how many requests were accepted."""
    await bed.pool.set_revision(REVISION, 1)
    numbers, accepted = itertools.count(), 0
    while True:
        number = next(numbers)
        shape = SHAPES[number % len(SHAPES)]
        try:
            given = submission(f"cmpl-{number:032x}", on_disconnect=OnDisconnect.KEEP, **shape)
            accepted += len(await bed.pool.submit(given))
        except PoolFull:
            return accepted


def logprob(token: int, top: int) -> Logprob:
    return Logprob(token, -1.5, tuple((token + i, -2.0 - i) for i in range(top)))


def full_log(claimed: Claimed) -> CommitEntry:
    """All tokens that the request may have, each as large as it may be, and the end."""
    request, sampling = claimed.request, claimed.request.sampling
    own = None if sampling.logprobs is None else logprob(LAST_ID, sampling.logprobs)
    asked = sampling.prompt_logprobs
    prompt = () if asked is None else tuple(logprob(token, asked) for token in request.prompt[1:])
    first, more = Token(LAST_ID, own, prompt), [Token(LAST_ID, own)] * (request.max_new_tokens - 1)
    end = End(FinishReason.LENGTH, request.max_new_tokens)
    return CommitEntry(request_id=request.id, claim=claimed.claim, index=0, tokens=(first, *more), end=end)


async def test_all_accepted_requests_finish_when_memory_is_full(small_bed: RedisBed) -> None:
    accepted, finished = await fill(small_bed), 0
    assert accepted > 1000
    scheduler = Scheduler(small_bed)
    await scheduler.enter()
    while owned := await scheduler.take(free_slots=10**9, total_slots=10**9, most=50):
        # The file is rewritten once meanwhile.
        if not finished:
            await small_bed.redis.bgrewriteaof()
        answers = await small_bed.pool.commit([full_log(claimed) for claimed in owned.values()])
        assert answers == [CommitAnswer.APPLIED] * len(owned)
        await scheduler.heartbeat()
        finished += len(owned)
    assert finished == accepted
    assert int((await small_bed.redis.info("memory"))["used_memory"]) < MAXMEMORY
    await small_bed.recount()


@pytest.mark.parametrize("node_bytes", [1024, 4096])
@pytest.mark.parametrize("top", [None, 0, 1, 5, TOP_MAX])
async def test_a_token_weighs_less_than_what_is_reserved_for_it(
    own_redis: EmbeddedRedis, node_bytes: int, top: int | None
) -> None:
    # On a busy machine ten submits take longer than a request lives that nobody reads.
    bed, sampling = RedisBed(own_redis.url, with_settings(resume_grace_ms=600_000)), SamplingParams(logprobs=top)
    await bed.redis.config_set("stream-node-max-bytes", node_bytes)
    _, owned = await started(bed, *(f"r{number}" for number in range(10)), sampling=sampling, max_new_tokens=1000)
    tokens = tuple(Token(LAST_ID, None if top is None else logprob(5, top)) for _ in range(200))
    used = []
    for index in (0, 200, 400, 600):
        await bed.pool.commit(
            [
                CommitEntry(request_id=one.request.id, claim=one.claim, index=index, tokens=tokens)
                for one in owned.values()
            ]
        )
        used.append(await bed.data_bytes())
    assert (used[-1] - used[0]) / (len(owned) * 600) < codec.token_bytes(sampling)
    await bed.close()
