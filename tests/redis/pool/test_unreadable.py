"""Records that this release cannot read, as a rollback leaves them: a sweep passes over them to what is behind."""

import struct
from typing import Any

import orjson
import pytest

from orca.core.domain.errors import UnknownRequest
from orca.core.domain.request import End, FinishReason, Token
from orca.pool.contract import SKIPPED_FOR_MS
from orca.pool.records import LogSlice, OnDisconnect, OwnershipState
from orca.pool.schemas import SCHEMAS
from support.pool.beds import REVISION, SETTINGS, UNREAD_MS, Bed, RedisBed, Scheduler, entry, started, state, submission

UNREADABLE = 9  # a schema number of a release to come


async def crowd(bed: Bed, **changes: Any) -> None:
    """More unreadable requests than one sweep script visits, followed by one that this release can read."""
    for number in range(120):
        await bed.bare.submit(submission(f"a{number}", **changes))
        await bed.set_record_schema(f"a{number}", UNREADABLE)
    await bed.bare.submit(submission("last", **changes))


async def test_deadlines_after_many_unreadable_records_are_enforced(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await crowd(bed, deadline_ms=0)
    await bed.pool.sweep()
    assert (await bed.pool.read("last.0", 0)).end == End(FinishReason.DEADLINE_EXCEEDED, 0)
    assert await state(bed, "a0.0") is OwnershipState.QUEUED


async def test_requests_without_readers_after_many_unreadable_records_are_cancelled(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await crowd(bed)
    await bed.pass_awake(UNREAD_MS)
    await bed.pool.sweep()
    assert (await bed.pool.read("last.0", 0)).end == End(FinishReason.CANCELLED, 0)
    assert await state(bed, "a0.0") is OwnershipState.QUEUED


async def test_a_retired_queue_after_many_unreadable_records_is_ended(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await crowd(bed, on_disconnect=OnDisconnect.KEEP)
    await bed.pool.promise_slots("r2", 100)
    await bed.pool.set_revision("r2", 2)
    await bed.pass_awake(SETTINGS.retire_ms)
    await bed.pool.sweep()
    assert (await bed.pool.read("last.0", 0)).end == End(FinishReason.MODEL_REPLACED, 0)
    assert await state(bed, "a0.0") is OwnershipState.QUEUED


async def test_the_first_promise_skips_unreadable_records_and_ends_readable_ones(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    for parent in ("a", "b"):
        await bed.pool.submit(submission(parent, max_new_tokens=100))
    await bed.set_record_schema("a", UNREADABLE)
    await bed.pool.promise_slots(REVISION, 64)
    assert await state(bed, "a.0") is OwnershipState.QUEUED
    detail = "prompt and max_tokens need 104 slots, the engine has 64"
    assert (await bed.pool.read("b.0", 0)).end == End(FinishReason.REFUSED, 0, detail=detail)


async def test_ended_requests_after_many_unreadable_records_are_forgotten(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    for number in range(120):
        await bed.bare.submit(submission(f"a{number}"))
        await bed.bare.cancel(f"a{number}")
        await bed.set_record_schema(f"a{number}", UNREADABLE)
    await bed.pool.submit(submission("last"))
    await bed.pool.cancel("last")
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await bed.pool.status("last.0")
    assert await state(bed, "a0.0") is OwnershipState.ENDED


async def test_skipped_records_are_handled_by_a_release_that_can_read_them(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a"))
    await bed.set_record_schema("a", UNREADABLE)
    await bed.pass_awake(UNREAD_MS)
    await bed.pool.sweep()
    await bed.set_record_schema("a", SCHEMAS.newest)
    await bed.pass_awake(SKIPPED_FOR_MS)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.ENDED


def body(*header: object) -> bytes:
    """Return a body that is well formed and has this header."""
    packed = orjson.dumps(header)
    return struct.pack("<I", len(packed)) + packed + struct.pack("<I", 1)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xff\xff\x7f[",
        body("b", 0, REVISION, 4, ["temperature"], None, None),
        body("b", 0, REVISION, 4, {}, None, None, None, [1]),
        # The body of another request, which has ended or belongs to another group.
        body("c", 0, REVISION, 4, {}, None, None),
    ],
)
async def test_a_damaged_body_ends_its_request_and_the_others_run(redis_bed: RedisBed, damaged: bytes) -> None:
    """Nothing of ours writes such bytes, but a Redis may be restored, moved or edited."""
    await redis_bed.pool.set_revision(REVISION, 1)
    for parent in ("a", "b", "c"):
        await redis_bed.pool.submit(submission(parent))
    await redis_bed.redis.set(redis_bed.keys.named("body", "b.0"), damaged)
    scheduler = Scheduler(redis_bed)
    await scheduler.enter()
    assert list(await scheduler.take()) == ["a.0", "c.0"]
    assert (await redis_bed.pool.read("b.0", 0)).end == End(FinishReason.ERROR, 0)
    assert list(await scheduler.heartbeat()) == ["a.0", "c.0"]


@pytest.mark.parametrize("token", [b"Lx", b"1.5", b"x"])
async def test_a_damaged_log_fails_its_own_readers_only(redis_bed: RedisBed, token: bytes) -> None:
    scheduler, owned = await started(redis_bed, "a", "b")
    await redis_bed.redis.xadd(redis_bed.keys.named("log", "a.0"), {"token": token}, id="1-0")
    await redis_bed.pool.commit([entry(owned["b.0"], 0, 5)])
    found = await redis_bed.pool.read_many({"a.0": 0, "b.0": 0})
    assert found == {"a.0": None, "b.0": LogSlice(0, (Token(5),), None)}
    await redis_bed.pool.give_back({name: claimed.claim for name, claimed in owned.items()})
    assert list(await scheduler.take()) == ["b.0"]
    end = (await redis_bed.pool.status("a.0")).end
    assert end == End(FinishReason.ERROR, 1)
