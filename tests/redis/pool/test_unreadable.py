"""Records that this release cannot read, as a rollback leaves them: a sweep passes over them to what is behind."""

from typing import Any

import pytest

from orca.core.domain.errors import UnknownRequest
from orca.core.domain.request import End, FinishReason
from orca.pool.contract import SKIPPED_FOR_MS
from orca.pool.records import OnDisconnect, OwnershipState
from orca.pool.schemas import SCHEMAS
from support.pool.beds import REVISION, SETTINGS, UNREAD_MS, Bed, state, submission

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
    assert (await bed.pool.read("b.0", 0)).end == End(FinishReason.ERROR, 0)


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
