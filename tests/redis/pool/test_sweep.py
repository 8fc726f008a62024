"""The sweep, and time: leases, readers, deadlines, retired revisions, retention, and a pool that stood still."""

import contextlib
from collections.abc import Callable

import pytest

from orca.core.domain.errors import PoolFull, UnknownRequest
from orca.core.domain.request import End, FinishReason
from orca.pool.records import CommitAnswer, OnDisconnect, OwnershipState
from support.pool.beds import (
    REVISION,
    SETTINGS,
    UNREAD_MS,
    Bed,
    Scheduler,
    entry,
    started,
    state,
    submission,
    with_settings,
)


async def test_the_requests_of_a_dead_group_go_to_another(bed: Bed) -> None:
    _, owned = await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    other = Scheduler(bed, "p2", "g2")
    await other.enter()
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    await other.heartbeat()
    await bed.pool.sweep()
    taken = (await other.take())["a.0"]
    assert [token.id for token in taken.log] == [5]
    assert await bed.pool.commit([entry(owned["a.0"], 1, 6)]) == [CommitAnswer.NOT_YOURS]


async def test_a_holder_that_comes_back_after_the_sweep_owns_nothing(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    await bed.pass_awake(SETTINGS.seat_lease_ms)
    await bed.pool.sweep()
    assert await scheduler.heartbeat() == {}
    assert list(await scheduler.take()) == ["a.0"]


async def test_a_frozen_pool_expires_no_lease(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    await bed.freeze(3_600_000)
    await bed.pool.sweep()
    assert list(await scheduler.heartbeat()) == ["a.0"]
    assert await state(bed, "a.0") is OwnershipState.OWNED


async def test_a_clock_that_jumps_back_expires_no_lease_and_stops_no_timer(bed: Bed) -> None:
    scheduler, _ = await started(bed, "a")
    await bed.freeze(-3_600_000)
    await bed.pool.sweep()
    assert list(await scheduler.heartbeat()) == ["a.0"]
    for _ in range(4):
        await bed.freeze(1000)
        await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.QUEUED


async def test_the_lease_of_a_silent_group_expires_while_others_call(bed: Bed) -> None:
    await started(bed, "a")
    for _ in range(SETTINGS.seat_lease_ms // 500 + 1):
        await bed.freeze(500)
        await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.QUEUED


async def test_a_request_without_a_reader_is_cancelled_after_lease_and_grace(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pass_awake(UNREAD_MS - 2000)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is not OwnershipState.ENDED
    await bed.pass_awake(2000)
    await bed.pool.sweep()
    assert (await bed.pool.read("a.0", 0)).end == End(FinishReason.CANCELLED, 0)


async def test_a_request_to_be_kept_needs_no_reader(bed: Bed) -> None:
    await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await bed.pool.detach("a", "reader")
    await bed.pass_awake(10 * UNREAD_MS)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.QUEUED


async def test_a_renewed_reader_keeps_its_request(bed: Bed) -> None:
    await started(bed, "a")
    for _ in range(5):
        await bed.pass_awake(SETTINGS.reader_lease_ms)
        await bed.pool.renew([("a", "reader"), ("gone", "reader"), ("a", "stranger")])
        await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.QUEUED


async def test_a_disconnect_removes_only_its_own_reader_entry(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.attach("a", "other")
    await bed.pool.detach("a", "reader")
    await bed.pass_awake(SETTINGS.reader_lease_ms + SETTINGS.resume_grace_ms - 2000)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is not OwnershipState.ENDED


async def test_the_grace_counts_from_the_last_reader_that_left(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pass_awake(3000)
    await bed.pool.detach("a", "reader")
    await bed.pass_awake(SETTINGS.resume_grace_ms - 2000)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is not OwnershipState.ENDED
    await bed.pass_awake(2000)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.ENDED


async def test_a_client_that_comes_back_within_the_grace_continues(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.detach("a", "reader")
    await bed.pass_awake(SETTINGS.resume_grace_ms - 2000)
    await bed.pool.attach("a", "resumed")
    await bed.pass_awake(SETTINGS.resume_grace_ms)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is not OwnershipState.ENDED


async def test_a_frozen_pool_expires_no_reader(bed: Bed) -> None:
    await started(bed, "a")
    await bed.freeze(3_600_000)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.OWNED


async def test_a_deadline_ends_waiting_and_running_requests_by_the_wall_clock(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", deadline_ms=60_000)
    await bed.pool.submit(submission("b", deadline_ms=60_000))
    await bed.pool.submit(submission("c", deadline_ms=600_000))
    await bed.pass_deadlines(60_000)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    await bed.pool.sweep()
    assert (await bed.pool.read("a.0", 0)).end == End(FinishReason.DEADLINE_EXCEEDED, 1)
    assert (await bed.pool.read("b.0", 0)).end == End(FinishReason.DEADLINE_EXCEEDED, 0)
    assert list(await scheduler.take()) == ["c.0"]


async def test_a_deadline_counts_from_arrival_by_the_clock_of_the_pool(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    (stored,) = await bed.pool.submit(submission("a", deadline_ms=60_000))
    assert stored.deadline_wall_ms == stored.submitted_ms + 60_000
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.QUEUED
    assert (await bed.pool.parent("a")).requests == (stored,)


async def test_a_request_that_expires_in_the_queue_is_never_claimed(bed: Bed) -> None:
    scheduler, _ = await started(bed)
    await bed.pool.submit(submission("late", deadline_ms=60_000))
    await bed.pool.submit(submission("next"))
    await bed.pass_deadlines(60_000)
    assert list(await scheduler.take()) == ["next.0"]
    assert await state(bed, "late.0") is OwnershipState.QUEUED
    await bed.pool.sweep()
    assert (await bed.pool.read("late.0", 0)).end == End(FinishReason.DEADLINE_EXCEEDED, 0)


async def test_a_request_without_a_token_ends_at_its_first_token_deadline(bed: Bed) -> None:
    _, owned = await started(bed, "runs", first_token_deadline_ms=60_000, deadline_ms=600_000)
    await bed.pool.submit(submission("waits", first_token_deadline_ms=60_000))
    await bed.pass_deadlines(60_000)
    await bed.pool.sweep()
    for request_id in ("runs.0", "waits.0"):
        assert (await bed.pool.read(request_id, 0)).end == End(FinishReason.DEADLINE_EXCEEDED, 0)
    assert await bed.pool.commit([entry(owned["runs.0"], 0, 5)]) == [CommitAnswer.ENDED]
    await bed.recount()


@pytest.mark.parametrize("deadline_ms", [None, 600_000])
async def test_after_the_first_token_only_the_deadline_of_the_whole_request_holds(
    bed: Bed, deadline_ms: int | None
) -> None:
    _, owned = await started(bed, "a", first_token_deadline_ms=60_000, deadline_ms=deadline_ms)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    await bed.pass_deadlines(60_000)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.OWNED
    await bed.pass_deadlines(540_000)
    await bed.pool.sweep()
    exceeded = End(FinishReason.DEADLINE_EXCEEDED, 1)
    assert (await bed.pool.read("a.0", 0)).end == (None if deadline_ms is None else exceeded)
    await bed.recount()


async def test_a_request_with_a_token_is_claimed_again_after_its_first_token_deadline(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", first_token_deadline_ms=60_000)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    await bed.pass_deadlines(60_000)
    assert list(await scheduler.take()) == ["a.0"]


async def test_requests_of_a_replaced_revision_end_when_its_time_is_over(bed: Bed) -> None:
    scheduler, _ = await started(bed, "run", on_disconnect=OnDisconnect.KEEP)
    await bed.pool.submit(submission("wait", on_disconnect=OnDisconnect.KEEP))
    await bed.pool.promise_slots("r2", 100)
    await bed.pool.set_revision("r2", 2)
    await bed.pool.submit(submission("new", on_disconnect=OnDisconnect.KEEP, revision="r2"))
    await bed.pool.sweep()
    assert await state(bed, "wait.0") is OwnershipState.QUEUED
    await bed.pass_awake(SETTINGS.retire_ms)
    await scheduler.heartbeat()
    await bed.pool.sweep()
    assert (await bed.pool.read("run.0", 0)).end == End(FinishReason.MODEL_REPLACED, 0)
    assert (await bed.pool.read("wait.0", 0)).end == End(FinishReason.MODEL_REPLACED, 0)
    assert await state(bed, "new.0") is OwnershipState.QUEUED


async def test_a_revision_that_comes_back_in_time_loses_nothing(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a", on_disconnect=OnDisconnect.KEEP))
    await bed.pool.promise_slots(REVISION, 100)
    await bed.pool.promise_slots("r2", 100)
    await bed.pool.set_revision("r2", 2)
    await bed.pool.set_revision(REVISION, 3)
    await bed.pass_awake(SETTINGS.retire_ms)
    await bed.pool.sweep()
    assert await state(bed, "a.0") is OwnershipState.QUEUED


async def test_an_ended_request_is_forgotten_after_its_retention_with_all_its_bytes(bed: Bed) -> None:
    await started(bed, "a", n=2)
    await bed.pool.cancel("a")
    await bed.pass_awake(SETTINGS.retention_ms - 2000)
    await bed.pool.sweep()
    assert (await bed.pool.read("a.0", 0)).end is not None
    await bed.pass_awake(2000)
    await bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await bed.pool.read("a.0", 0)
    stats = await bed.pool.stats()
    assert (stats.ended, stats.bytes_reserved) == (0, 0)


async def test_a_parent_stays_until_all_its_requests_have_ended(bed: Bed) -> None:
    _, owned = await started(bed, "a", n=2, on_disconnect=OnDisconnect.KEEP)
    await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.sweep()
    assert [token.id for token in (await bed.pool.read("a.0", 0)).tokens] == [5]


async def test_an_ended_request_with_a_living_reader_is_kept(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.cancel("a")
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.attach("a", "late reader")
    await bed.pool.sweep()
    assert (await bed.pool.read("a.0", 0)).end is not None
    await bed.pass_awake(SETTINGS.retention_ms)
    await bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await bed.pool.read("a.0", 0)


async def test_under_pressure_ended_requests_are_forgotten_earlier_but_not_at_once(
    make_bed: Callable[..., Bed],
) -> None:
    probe = make_bed()
    await started(probe, "a")
    bed = make_bed(with_settings(bytes_max=3 * (await probe.pool.stats()).bytes_reserved))
    await started(bed, "a", "b")
    await bed.pool.cancel("a")
    await bed.pass_awake(SETTINGS.retention_least_ms)
    await bed.pool.sweep()
    assert (await bed.pool.read("a.0", 0)).end is not None
    await bed.pool.submit(submission("c"))
    await bed.pool.sweep()
    with pytest.raises(UnknownRequest):
        await bed.pool.read("a.0", 0)


async def bed_for(make_bed: Callable[..., Bed], requests: int) -> Bed:
    """A pool with bytes for so many requests, ten at most, all of which wait."""
    probe = make_bed()
    await started(probe, "a0", on_disconnect=OnDisconnect.KEEP)
    bed = make_bed(with_settings(bytes_max=requests * (await probe.pool.stats()).bytes_reserved))
    await bed.pool.set_revision(REVISION, 1)
    for number in range(requests):
        await bed.pool.submit(submission(f"a{number}", on_disconnect=OnDisconnect.KEEP))
    return bed


async def kept(bed: Bed, requests: int) -> list[int]:
    found = []
    for number in range(requests):
        with contextlib.suppress(UnknownRequest):
            await bed.pool.status(f"a{number}.0")
            found.append(number)
    return found


async def test_pressure_forgets_the_oldest_end_first_and_no_more_than_relieves_it(
    make_bed: Callable[..., Bed],
) -> None:
    bed = await bed_for(make_bed, 10)
    for number in (7, 3, 5, 9):
        await bed.pool.cancel(f"a{number}")
        await bed.pass_awake(1)
    await bed.pass_awake(SETTINGS.retention_least_ms)
    await bed.pool.sweep()
    assert await kept(bed, 10) == [0, 1, 2, 3, 4, 5, 6, 8, 9]


async def test_a_refused_submission_gets_room_from_the_oldest_ends_with_nobody_reading(
    make_bed: Callable[..., Bed],
) -> None:
    bed = await bed_for(make_bed, 5)
    for number in (0, 1, 2):
        await bed.pool.cancel(f"a{number}")
    await bed.pass_awake(SETTINGS.retention_least_ms)
    await bed.pool.attach("a0", "late")
    large = submission("large", n=2)
    with pytest.raises(PoolFull):
        await bed.pool.submit(large)
    await bed.pool.sweep()
    await bed.pool.submit(large)
    assert 0 in await kept(bed, 5)


async def test_a_refused_submission_takes_nothing_that_ended_within_the_last_minute(
    make_bed: Callable[..., Bed],
) -> None:
    bed = await bed_for(make_bed, 2)
    await bed.pool.cancel("a0")
    await bed.pass_awake(SETTINGS.retention_least_ms - 2000)
    with pytest.raises(PoolFull):
        await bed.pool.submit(submission("large", n=2))
    await bed.pool.sweep()
    assert await kept(bed, 2) == [0, 1]


async def test_a_sweep_of_many_due_requests_ends_them_all(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    for i in range(450):
        await bed.bare.submit(submission(f"a{i}", deadline_ms=0))
    await bed.pool.sweep()
    stats = await bed.pool.stats()
    assert (stats.queued, stats.ended) == (0, 450)
